"""Measure how full a pipeline is: when each stage computed, by the number of steps in flight.

    serve = lambda: llm.generate(prompts, params)
    one, two = (record_pipeline(core_of(llm), serve, batches) for batches in (1, 2))
    print(one.fullness, two.fullness, *two.timeline(), sep="\\n")

With p stages and m steps in flight, min(m, p) / p of the stages can be at work; the rest is the
bubble. Steps in flight never share a request, and the scheduler puts all requests that fit into one
step: a second step exists only if the prompts exceed one token budget. So record with a
`max_num_batched_tokens` of half the prompts, and without prefix-cache hits (`reset_prefix_cache`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from minivllm.core.scheduler_output import SchedulerOutput
from minivllm.engine.core import EngineCore
from minivllm.errors import MinivllmError

Span = tuple[float, float]


@dataclass(frozen=True)
class PipelineRecord:
    """The times at which the stages computed. `spans[i]`: (start, end) of each step on stage i, in
    seconds of one clock. `in_flight`: steps in flight as each step started, itself included.
    """

    spans: list[list[Span]]
    in_flight: list[int]

    @property
    def seconds(self) -> float:
        """Seconds from the first start to the last end."""
        return self._end - self._start

    @property
    def fullness(self) -> float:
        """The fraction of the stages that were busy, averaged over time: 0 to 1."""
        busy = sum(end - start for spans in self.spans for start, end in spans)
        return busy / (self.seconds * len(self.spans))

    def timeline(self, columns: int = 60) -> list[str]:
        """Return a line of digits for each stage: the last digit of the step that took more than
        half of a column's time, or a dot.
        """
        width = self.seconds / columns
        edges = [self._start + column * width for column in range(columns)]
        return ["".join(_mark(spans, edge, edge + width) for edge in edges) for spans in self.spans]

    @property
    def _start(self) -> float:
        return min(start for spans in self.spans for start, _ in spans)

    @property
    def _end(self) -> float:
        return max(end for spans in self.spans for _, end in spans)


def record_pipeline(core: EngineCore, serve: Callable[[], Any], batches: int) -> PipelineRecord:
    """Record what `serve()` has the engine do, with at most `batches` steps in flight.

    Raises:
        MinivllmError: the model is not split into stages, or `serve` ran no step.
    """
    executor, ranks_of_stage = core.executor, core.args.tensor_parallel_size
    if core.args.pipeline_parallel_size == 1:
        raise MinivllmError("there is no pipeline to record: give the engine a pipeline_parallel_size of 2 or more")
    queue, start, most = core.batch_queue, executor.start_model, executor.max_concurrent_batches
    in_flight: list[int] = []

    def counted(scheduler_output: SchedulerOutput) -> Any:
        if scheduler_output.num_scheduled_tokens:
            in_flight.append(1 + sum(bool(batch.scheduler_output.num_scheduled_tokens) for batch in queue))
        return start(scheduler_output)

    executor.max_concurrent_batches, executor.start_model = batches, counted  # type: ignore[method-assign]
    try:
        executor.collective_rpc("record_times")
        serve()
        spans = executor.collective_rpc("recorded_times")[::ranks_of_stage]
    finally:
        executor.max_concurrent_batches = most
        del executor.start_model
    if not in_flight:
        raise MinivllmError("nothing was computed, so there is no pipeline to look at")
    return PipelineRecord(spans, in_flight)


def _mark(spans: list[Span], start: float, end: float) -> str:
    shares = [max(0.0, min(end, until) - max(start, since)) for since, until in spans]
    most = max(shares, default=0.0)
    return str(shares.index(most) % 10) if most > (end - start) / 2 else "."
