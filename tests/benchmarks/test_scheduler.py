"""Test the scheduler's benchmark: its workload is the one it claims, and it reports what was
measured.
"""

import json
from pathlib import Path

import pytest

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks/results/scheduler.cpu.json"


@pytest.mark.parametrize("caching", [True, False])
def test_all_decode_from_the_second_step_on(bench, caching):
    work = bench.work_of(20, repeats=1, enable_prefix_caching=caching)
    scheduler = bench.scheduler_for(work)
    for step in range(1 + work["steps"]):
        output = scheduler.schedule()
        counts = list(output.num_scheduled_tokens.values())
        assert counts == ([len(prompt) for prompt in work["prompts"]] if step == 0 else [1] * 20)
        scheduler.update_from_output(output, bench.sampled(list(output.num_scheduled_tokens)))
    assert len(scheduler.running) == 20


def test_what_is_timed_is_both_halves_of_the_step(bench):
    work = bench.work_of(4, repeats=2, enable_prefix_caching=True)
    result = bench.fastest_run(bench.scheduler_for(work), bench.sampled, work["steps"], 2)
    assert result["step_us"] == pytest.approx(result["schedule_us"] + result["update_us"], abs=0.2)
    assert min(result.values()) > 0


def test_the_time_grows_no_faster_than_the_requests_and_is_below_vllms():
    figures = json.loads(RESULTS.read_text())["figures"]
    for case in ("prefix_caching", "no_prefix_caching"):
        ours = {int(batch): both[case]["minivllm"]["step_us"] for batch, both in figures.items()}
        assert ours[256] / ours[64] < 4.4
        assert ours[64] / ours[16] < 4.4
        assert all(both[case]["minivllm"]["step_us"] < both[case]["vllm"]["step_us"] for both in figures.values())
