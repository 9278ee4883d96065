"""Test the reading of the run queue for this process's threads."""

import pytest

from minivllm.platforms.cpu_time import CpuTimes, between, stolen_seconds, thread_times


def test_every_thread_is_read_but_one_that_has_just_ended_or_is_not_counted(tmp_path):
    for thread, text in ((7, "3000000000 1000000000 12\n"), (8, "500000000 0 1\n"), (9, ""), (10, None)):
        (tmp_path / str(thread)).mkdir()
        if text is not None:
            (tmp_path / str(thread) / "schedstat").write_text(text)
    assert thread_times(tmp_path) == {7: CpuTimes(3.0, 1.0), 8: CpuTimes(0.5, 0.0)}


def test_a_system_that_does_not_say_has_no_times(tmp_path):
    assert thread_times(tmp_path / "nowhere") == {}
    assert stolen_seconds(tmp_path / "nowhere") == 0.0
    assert between({}, {}).waited_share == 0.0


def test_what_passed_counts_new_threads_whole_and_ended_ones_not():
    before = {1: CpuTimes(5.0, 1.0), 2: CpuTimes(9.0, 9.0)}
    after = {1: CpuTimes(6.0, 1.5), 3: CpuTimes(1.0, 0.5)}
    passed = between(before, after)
    assert (passed.ran, passed.waited) == pytest.approx((2.0, 1.0))
    assert passed.waited_share == pytest.approx(1 / 3)


def test_stolen_time_is_the_eighth_column(tmp_path):
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 1 2 3 4 5 6 250 0 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n")
    assert stolen_seconds(stat) == pytest.approx(2.5)
