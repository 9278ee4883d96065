"""Steps of a real engine, timed, with what each asked of the device; and the same run foretold by the simulator.

What is recorded is what a cost model is fitted to, and what it is judged by.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from minivllm.engine.core import EngineCore
from minivllm.engine.core_request import EngineCoreRequest
from minivllm.engine.engine_args import EngineArgs
from minivllm.errors import MinivllmError
from minivllm.sampling_params import SamplingParams
from minivllm.scheduler_config import CacheConfig, SchedulerConfig
from minivllm.simulate.cost_model import Cost, MeasuredStep, StepShape
from minivllm.simulate.virtual_clock import SimulatedRequest, simulate


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


def bare_engine(model: str | Path, device: torch.device, cache: CacheConfig, **settings: Any) -> EngineCore:
    """An engine without a tokenizer that has exactly this pool; `settings` are further engine arguments.

    Raises:
        MinivllmError: settings that cannot be, or a pool in which not one request of `max_model_len` fits.
    """
    settings |= {"num_gpu_blocks_override": cache.num_gpu_blocks, "block_size": cache.block_size}
    settings |= {"enable_prefix_caching": cache.enable_prefix_caching, "skip_tokenizer_init": True}
    return EngineCore(EngineArgs(model=model, device=device.type, **settings))


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


def foretell(
    lengths: Sequence[tuple[int, int]], recording: Recording, config: SchedulerConfig, cache: CacheConfig, cost: Cost
) -> float:
    """(modelled − measured) / measured seconds of a recorded run of these (prompt, output) lengths.

    Raises:
        MinivllmError: the simulation does not take the steps that the engine took: other settings, or a fault.
    """
    result = simulate([SimulatedRequest(*one) for one in lengths], config, cache, cost)
    if [step.scheduled for step in result.steps] != recording.scheduled:
        raise MinivllmError("the simulation takes other steps than the engine took: are the settings the same?")
    return result.seconds / recording.seconds - 1
