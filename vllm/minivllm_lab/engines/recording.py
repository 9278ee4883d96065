"""Timed steps of a real engine, with their shapes."""

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from minivllm.config import CacheConfig
from minivllm.core.engine_messages import EngineCoreRequest
from minivllm.engine.arg_utils import EngineArgs
from minivllm.engine.core import EngineCore
from minivllm.executor.uniproc_executor import UniprocExecutor
from minivllm.sampling_params import SamplingParams
from minivllm_lab.engines.inside import runner_of
from minivllm_simulate.cost_model import MeasuredStep, StepShape


class Recording(NamedTuple):
    """A run: its measured steps, each step's scheduled tokens by request id, and the number of
    output tokens.
    """

    steps: list[MeasuredStep]
    scheduled: list[dict[str, int]]
    output_tokens: int
    num_preemptions: int

    @property
    def seconds(self) -> float:
        """Total seconds of all steps."""
        return sum(step.seconds for step in self.steps)

    @property
    def throughput(self) -> float:
        """Output tokens per second."""
        return self.output_tokens / self.seconds

    @property
    def decode_seconds(self) -> float:
        """Median seconds of the steps in which every request got one token."""
        return statistics.median(step.seconds for step in self.steps if step.shape.num_tokens == step.shape.num_reqs)

    @property
    def most_running(self) -> int:
        """Largest number of requests in a step."""
        return max(step.shape.num_reqs for step in self.steps)


def bare_engine(model: str | Path, device: torch.device, cache: CacheConfig, **settings: Any) -> EngineCore:
    """Return an engine without a tokenizer that has exactly this pool; `settings` are further
    engine arguments.

    Its caller takes one step after another, so no step is scheduled ahead, not even on a GPU,
    unless `settings` say otherwise: the worker would then keep the drafts and the sampled tokens
    for the step in flight.

    Raises:
        MinivllmError: the settings are invalid, or the pool cannot hold one request of
            `max_model_len` tokens.
    """
    settings = {"async_scheduling": False, **settings}
    settings |= {"num_gpu_blocks_override": cache.num_gpu_blocks, "block_size": cache.block_size}
    settings |= {"enable_prefix_caching": cache.enable_prefix_caching, "skip_tokenizer_init": True}
    return EngineCore(EngineArgs(model=model, device=device.type, **settings))


def own_clock(core: EngineCore) -> Callable[[], float]:
    """Return the clock for this engine: process time on a single-threaded CPU, since other
    processes do not affect it; otherwise wall-clock time.
    """
    here = isinstance(core.executor, UniprocExecutor) and runner_of(core).device.type == "cpu"
    return time.process_time if here and torch.get_num_threads() == 1 else time.perf_counter


def add_greedy(core: EngineCore, name: str, token_ids: list[int], max_tokens: int) -> None:
    """Add a request that gets exactly `max_tokens` tokens, each the likeliest."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    core.add_request(EngineCoreRequest(name, token_ids, params, (), time.monotonic()))


def record_run(core: EngineCore, lengths: Sequence[tuple[int, int]], warm_up: bool = True) -> Recording:
    """Serve requests of these (prompt, output) lengths, all waiting at the start, and time every
    step.

    Sampling is greedy and end-of-sequence tokens are ignored, so that the outputs have exactly
    these lengths. Requests are named "0", "1", … A few of them are served first as warm-up.

    Raises:
        MinivllmError: the engine rejects a request.
    """
    if warm_up:
        record_run(core, lengths[:2], warm_up=False)
    steps, scheduled, num_tokens, preempted = [], [], 0, core.scheduler.num_preemptions
    clock = own_clock(core)
    for index, (prompt, output) in enumerate(lengths):
        prompt_ids = [1 + index % (core.model_config.vocab_size - 1)] * prompt
        add_greedy(core, str(index), prompt_ids, output)
    while core.has_unfinished_requests():
        start = clock()
        output = core.scheduler.schedule()
        requests, new = core.scheduler.requests, output.num_scheduled_tokens
        shape = StepShape.of((count, requests[i].num_computed_tokens - count) for i, count in new.items())
        engine_outputs = core.scheduler.update_from_output(output, core.executor.start_model(output).result())
        steps.append(MeasuredStep(shape, clock() - start))
        scheduled.append(dict(new))
        num_tokens += sum(len(output.new_token_ids) for output in engine_outputs)
    return Recording(steps, scheduled, num_tokens, core.scheduler.num_preemptions - preempted)
