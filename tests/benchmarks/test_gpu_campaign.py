"""Test the GPU campaign: stages in order of value, each with a limit, and a record kept up to date."""

import json
import re
from pathlib import Path

import pytest
from refusals import assert_refused

from minivllm_lab.exercise import load


def stage(bench, name, code, seconds=60):
    return bench.Stage(name, ("-c", code), seconds)


def ended(into):
    return {row["stage"]: row["ended"] for row in json.loads((into / "campaign.json").read_text())["figures"]["stages"]}


def test_what_hangs_or_fails_is_said_and_what_follows_finds_the_record_of_it(bench, tmp_path):
    count = f"import json; print(len(json.load(open({str(tmp_path / 'campaign.json')!r}))['figures']['stages']))"
    stages = [
        stage(bench, "hangs", "print('so far', flush=True); import time; time.sleep(60)", seconds=3),
        stage(bench, "fails", "raise SystemExit(3)"),
        stage(bench, "works", f"import minivllm; print(minivllm.__name__); {count}"),
    ]
    bench.run_all(stages, tmp_path, minutes=5)
    assert ended(tmp_path) == {"hangs": "stopped after 3 s", "fails": "exit code 3", "works": "passed"}
    assert (tmp_path / "logs" / "hangs.txt").read_text() == "so far\n"
    assert (tmp_path / "logs" / "works.txt").read_text() == "minivllm\n2\n"


def test_no_stage_starts_when_the_time_is_over(bench, tmp_path):
    bench.run_all([stage(bench, "late", "pass")], tmp_path, minutes=(bench.LEAST_SECONDS - 1) / 60)
    assert ended(tmp_path) == {"late": "not started: no time left"}


def test_tests_and_kernels_come_first_and_every_lesson_is_there(bench, tmp_path):
    names = [stage.name for stage in bench.stages_of("cuda", "a-gpu", False, tmp_path)]
    assert names[:3] == ["tests", "kernels", "engine-8b"]
    assert [name for name in names if name.startswith("lesson-")] == [f"lesson-{n:02}" for n in range(1, 13)]


def test_a_stage_that_is_not_there_is_refused_by_name(bench, tmp_path):
    stages = bench.stages_of("cuda", "a-gpu", False, tmp_path)
    assert_refused("no stage 'kernel': the stages are tests, kernels, ", bench.chosen, stages, ["tests", "kernel"])


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_scripts_know_the_flags_of_their_stages(bench, load_benchmark, tmp_path, device):
    """Lesson 01's flags stand for those of all lessons, which share them."""
    stages = bench.stages_of(device, "a-gpu", device == "cpu", tmp_path)
    assert (stages[0].arguments[-1] == "--collect-only") == (device == "cpu")
    for stage in stages[1:]:
        script = Path(stage.arguments[0])
        if script.parent == bench.BENCHMARKS or stage.name == "lesson-01":
            module = load_benchmark(script.stem) if script.parent == bench.BENCHMARKS else load(script)
            result = module.parser().parse_args(stage.arguments[1:])
            assert result.device == device
            assert re.fullmatch(r"\w+\.a-gpu\.json", Path(result.json).name)


def test_the_program_runs_the_chosen_stages_and_fails_if_one_does(bench, tmp_path, monkeypatch):
    stages = [stage(bench, "works", "pass"), stage(bench, "fails", "raise SystemExit(3)")]
    monkeypatch.setattr(bench, "stages_of", lambda *_settings: stages)
    flags = ["--device", "cpu", "--into", str(tmp_path)]
    bench.main(bench.parser().parse_args([*flags, "--only", "works"]))
    assert ended(tmp_path) == {"works": "passed"}
    with pytest.raises(SystemExit, match="1"):
        bench.main(bench.parser().parse_args(flags))
    assert ended(tmp_path) == {"works": "passed", "fails": "exit code 3"}
