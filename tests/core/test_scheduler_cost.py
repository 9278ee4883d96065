"""Test that the scheduler's work grows with the batch and with nothing else.

Work is counted in function calls, which are the same on every machine; benchmarks/scheduler.py
measures the time.
"""

import sys
from collections.abc import Callable
from types import FrameType

import pytest
from core.driving import make_scheduler

from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler
from minivllm.core.scheduler_output import ModelRunnerOutput


def decoding(num_requests: int, num_blocks: int = 2000, num_waiting: int = 0) -> Scheduler:
    """Return a scheduler whose next steps decode `num_requests` requests."""
    scheduler = make_scheduler(
        num_gpu_blocks=num_blocks, max_model_len=40, max_num_seqs=num_requests, max_num_batched_tokens=9 * num_requests
    )
    for index in range(num_requests + num_waiting):
        scheduler.add_request(Request(f"r{index}", [index] * 9, max_tokens=20))
    step(scheduler)
    return scheduler


def step(scheduler: Scheduler) -> None:
    output = scheduler.schedule()
    sampled = ModelRunnerOutput({request_id: [7] for request_id in output.num_scheduled_tokens})
    scheduler.update_from_output(output, sampled)


def calls(function: Callable[[], object]) -> int:
    count = 0

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def calls_of_steps(scheduler: Scheduler) -> int:
    """Count the function calls of eight steps, in which every request takes two new blocks and
    publishes two.
    """
    return calls(lambda: [step(scheduler) for _ in range(8)])


def test_linear_in_running_requests_and_few_calls_each() -> None:
    few, many = calls_of_steps(decoding(32)), calls_of_steps(decoding(128))
    assert many <= 4 * few
    assert many / (8 * 128) < 30


@pytest.mark.parametrize("num_blocks", [500, 8000])
def test_independent_of_the_pool(num_blocks: int) -> None:
    assert calls_of_steps(decoding(32, num_blocks)) == calls_of_steps(decoding(32))


def test_independent_of_how_many_wait() -> None:
    per_step = (calls_of_steps(decoding(32, num_waiting=1000)) - calls_of_steps(decoding(32, num_waiting=1))) / 8
    assert per_step == 0
