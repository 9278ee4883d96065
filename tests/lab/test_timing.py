"""Functions that take turns being timed."""

from minivllm_lab.timing import in_turns


def test_all_run_once_then_all_again():
    ran = []
    functions = {name: lambda name=name: ran.append(name) for name in "ab"}
    seconds = in_turns(functions, 3)
    assert ran == ["a", "b"] * 4, "one round to warm up"
    assert list(seconds) == ["a", "b"]
    assert all(len(times) == 3 and min(times) >= 0 for times in seconds.values())
