"""The scheduler decides what vLLM v0.33.0 decided, at every step of every recorded workload."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
from conformance.replay import replay

from minivllm.core.async_scheduler import AsyncScheduler
from minivllm_lab.predict.workload import recorded

HERE = Path(__file__).parent
DATA = HERE / "data"
TRACES = json.loads(gzip.decompress((DATA / "traces.json.gz").read_bytes()))


@pytest.mark.parametrize("name", sorted(TRACES))
def test_every_step_equals_the_recorded_one(name: str) -> None:
    workload = json.loads((DATA / f"{name}.json").read_text())
    steps = replay(workload)
    for ours, vllm in zip(steps, TRACES[name], strict=False):
        assert ours == vllm
    assert len(steps) == len(TRACES[name])


def test_one_step_at_a_time_the_scheduler_for_steps_in_flight_decides_the_same() -> None:
    for name, trace in TRACES.items():
        assert replay(json.loads((DATA / f"{name}.json").read_text()), AsyncScheduler) == trace, name


def test_with_drafts_every_step_equals_the_recorded_one_until_vllm_pads() -> None:
    """vLLM pads the first decode of a request that is being admitted with placeholder drafts, which
    we do not: README.md says so. Until then, and in all workloads where that does not happen, the
    steps are equal.
    """
    padded = []
    for name, workload, trace in recorded(HERE / "drafts"):
        num_drafts = workload["config"]["num_speculative_tokens"]
        ours = replay(workload)
        different = next(
            (step for step, (mine, vllm) in enumerate(zip(ours, trace, strict=False)) if mine != vllm), None
        )
        if different is None:
            assert len(ours) == len(trace), name
            continue
        mine, vllm = dict(ours[different]["scheduled"]), dict(trace[different]["scheduled"])
        extra = {request: count - mine[request] for request, count in vllm.items() if count != mine[request]}
        assert all(0 < count <= num_drafts and mine[request] == 1 for request, count in extra.items()), name
        assert not set(extra) & set(ours[different - 1]["running"]), f"{name}: it was running"
        padded.append(name)
    assert padded == ["w1207", "w1211", "w1223"]


def test_every_workload_has_a_trace() -> None:
    assert {path.stem for path in DATA.glob("w*.json")} == set(TRACES)


def test_replay_prints_the_trace() -> None:
    command = [sys.executable, HERE / "replay.py", DATA / "w1000.json"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert json.loads(printed)["steps"] == TRACES["w1000"]


def test_replay_says_what_is_wrong_with_a_workload(tmp_path: Path) -> None:
    path = tmp_path / "workload.json"
    path.write_text("{}")
    result = subprocess.run([sys.executable, HERE / "replay.py", path], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith(str(path))
    assert "Traceback" not in result.stderr
