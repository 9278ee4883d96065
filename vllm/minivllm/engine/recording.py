"""Steps of a real engine, timed, with what each of them asked of the device: what a cost model is fitted to."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from minivllm.engine.core import EngineCore
from minivllm.engine.core_request import EngineCoreRequest
from minivllm.errors import MinivllmError
from minivllm.sampling_params import SamplingParams
from minivllm.simulate.cost_model import MeasuredStep, StepShape


@dataclass(frozen=True)
class Recording:
    """A run: its steps as measured, tokens by request id of each step, and the tokens that came out."""

    steps: list[MeasuredStep]
    scheduled: list[dict[str, int]]
    output_tokens: int
    num_preemptions: int

    @property
    def seconds(self) -> float:
        """All steps together."""
        return sum(step.seconds for step in self.steps)

    @property
    def throughput(self) -> float:
        """Output tokens per second."""
        return self.output_tokens / self.seconds

    @property
    def most_running(self) -> int:
        """Requests in the largest step."""
        return max(step.shape.num_reqs for step in self.steps)


def own_clock(core: EngineCore) -> Callable[[], float]:
    """The clock for this engine: on a CPU with one thread the process's own, which other work does not disturb."""
    one_thread = core.runner.device.type == "cpu" and torch.get_num_threads() == 1
    return time.process_time if one_thread else time.perf_counter


def record_run(core: EngineCore, lengths: Sequence[tuple[int, int]], warm_up: bool = True) -> Recording:
    """Serve requests of these (prompt, output) lengths that all wait at once, and time every step.

    Sampling is greedy and end-of-sequence tokens are ignored, so that the lengths are what was asked for. Requests are
    named "0", "1", … A few of them are served before, to warm up.

    Raises:
        MinivllmError: no requests, or one that the engine refuses.
    """
    if not lengths:
        raise MinivllmError("a recording needs at least one request")
    if warm_up:
        record_run(core, lengths[:2], warm_up=False)
    steps, scheduled, num_tokens, preempted = [], [], 0, core.scheduler.num_preemptions
    clock = own_clock(core)
    for index, (prompt, output) in enumerate(lengths):
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        prompt_ids = [1 + index % (core.model_config.vocab_size - 1)] * prompt
        core.add_request(EngineCoreRequest(str(index), prompt_ids, params, (), time.monotonic()))
    while core.has_unfinished_requests():
        start = clock()
        output = core.scheduler.schedule()
        requests, new = core.scheduler.requests, output.num_scheduled_tokens
        shape = StepShape.of((count, requests[i].num_computed_tokens - count) for i, count in new.items())
        news = core.scheduler.update_from_output(output, core.runner.execute_model(output))
        steps.append(MeasuredStep(shape, clock() - start))
        scheduled.append(dict(new))
        num_tokens += sum(len(one.new_token_ids) for one in news)
    return Recording(steps, scheduled, num_tokens, core.scheduler.num_preemptions - preempted)
