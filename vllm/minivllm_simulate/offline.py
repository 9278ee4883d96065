"""Runs of requests that all arrive at the start, in counts: only the order of steps matters, and no
time passes.

The sweeps of `widgets/optimization_catalog` use them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from minivllm.config import CacheConfig, SchedulerConfig
from minivllm.config.checks import require
from minivllm.core.scheduler import Scheduler
from minivllm_simulate.cost_model import StepShape
from minivllm_simulate.simulated_engine import Acceptance, ShapeOf, SimulatedEngine, Stretch
from minivllm_simulate.virtual_clock import SimulatedRequest, to_request


class OfflineRun(NamedTuple):
    """The scheduler's decisions, expressed in counts."""

    stretches: tuple[Stretch, ...]
    prefix_hits: int
    """Prompt tokens that the prefix cache held when their request was first admitted."""
    preemptions: int

    @property
    def num_steps(self) -> int:
        """Number of steps until the last token."""
        return sum(stretch.steps for stretch in self.stretches)

    @property
    def request_steps(self) -> int:
        """Number of requests in a step, summed over all steps."""
        return sum(stretch.steps * stretch.first.num_reqs for stretch in self.stretches)

    @property
    def computed_tokens(self) -> int:
        """Tokens that went through the model."""
        return sum(stretch.num_tokens for stretch in self.stretches)


def run_offline(
    workload: Sequence[SimulatedRequest], scheduler_config: SchedulerConfig, cache_config: CacheConfig, *,
    acceptance: float = 0.0, shape_of: ShapeOf = StepShape.of,
) -> OfflineRun:  # fmt: skip
    """Run a workload to completion. The arguments are those of `virtual_clock.simulate`.

    Raises:
        MinivllmError: a request arrives later than the others, or the scheduler refuses one.
    """
    later = any(request.arrival or request.after is not None for request in workload)
    require(not later, "all requests of an offline run must be there at the start: arrival 0, after None")
    engine = SimulatedEngine(Scheduler(scheduler_config, cache_config), Acceptance(acceptance), shape_of)
    requests = [to_request(index, spec, 0.0) for index, spec in enumerate(workload)]
    for request in requests:
        engine.add(request)
    stretches = []
    while engine.scheduler.has_unfinished_requests():
        stretches.append(engine.stretch())
    hits = sum(request.num_cached_tokens for request in requests)
    return OfflineRun(tuple(stretches), hits, engine.scheduler.num_preemptions)
