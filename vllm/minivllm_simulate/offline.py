"""Runs the real scheduler on requests that all arrive at the start, many similar steps at a time.

While a batch only decodes and no request can join, consecutive steps are alike, and need no decision: every request
gets a token, and the block pool allocates what the single steps would have taken. The scheduler is asked for the step
in which requests end. The resulting steps equal those of `virtual_clock.simulate`
(tests/simulate/test_offline.py), in half to nine tenths of the time where no drafts are verified: half for few requests
with long answers. The sweeps of `widgets/optimization_catalog` run on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import comb

from minivllm.config import CacheConfig, SchedulerConfig
from minivllm.core.engine_messages import EngineCoreOutput
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler
from minivllm.core.scheduler_output import CachedRequestData, ModelRunnerOutput, SchedulerOutput
from minivllm.errors import MinivllmError
from minivllm_simulate.cost_model import Cost, StepShape
from minivllm_simulate.virtual_clock import (
    GENERATED,
    Acceptance,
    ShapeOf,
    SimulatedRequest,
    decoding_shapes,
    to_request,
)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive steps that differ only in every context growing by one token per step.

    A step's counts are then polynomials of at most degree two, determined by the shapes of the first three steps.
    Where there are fewer, the last of them stands for those that are missing.
    """

    steps: int
    first: StepShape
    second: StepShape
    third: StepShape

    @property
    def num_tokens(self) -> int:
        """New tokens of all its steps together."""
        one, two, three = (shape.num_tokens for shape in (self.first, self.second, self.third))
        return self.steps * one + comb(self.steps, 2) * (two - one) + comb(self.steps, 3) * (three - 2 * two + one)

    def shapes(self) -> Iterator[StepShape]:
        """The shape of every step."""
        return (self.at(index) for index in range(self.steps))

    def at(self, index: int) -> StepShape:
        """The shape of one step."""
        one, two, three = self.first, self.second, self.third
        bends = index * (index - 1) // 2
        tokens, more_tokens = one.num_tokens, two.num_tokens - one.num_tokens
        keys, more_keys = one.num_keys, two.num_keys - one.num_keys
        pairs, more_pairs = one.num_pairs, two.num_pairs - one.num_pairs
        return StepShape(
            one.num_reqs,
            tokens + index * more_tokens + bends * (three.num_tokens - two.num_tokens - more_tokens),
            keys + index * more_keys + bends * (three.num_keys - two.num_keys - more_keys),
            pairs + index * more_pairs + bends * (three.num_pairs - two.num_pairs - more_pairs),
        )

    def seconds(self, cost: Cost) -> float:
        """All its steps together, within 0.01 % for a cost that has no jumps."""
        last = self.steps - 1
        return self._seconds(cost, 0, last, cost.seconds(self.first), cost.seconds(self.at(last)))

    def _seconds(self, cost: Cost, first: int, last: int, at_first: float, at_last: float) -> float:
        """Seconds of steps `first` to `last`. Costs are convex: if the middle lies on the chord, so does every step."""
        steps = last - first + 1
        if steps <= 2:
            return at_first + at_last if steps == 2 else at_first
        middle = (first + last) // 2
        at_middle = cost.seconds(self.at(middle))
        chord = at_first + (at_last - at_first) * (middle - first) / (last - first)
        if abs(chord - at_middle) < 1e-4 * at_middle:
            return steps * (at_first + at_last) / 2
        right = self._seconds(cost, middle, last, at_middle, at_last) - at_middle
        return self._seconds(cost, first, middle, at_first, at_middle) + right


@dataclass(frozen=True)
class OfflineRun:
    """What the scheduler decided, in counts."""

    stretches: tuple[Stretch, ...]
    prefix_hits: int
    """Prompt tokens that the prefix cache held when their request was first admitted."""
    preemptions: int

    @property
    def num_steps(self) -> int:
        """Steps until the last token."""
        return sum(stretch.steps for stretch in self.stretches)

    @property
    def request_steps(self) -> int:
        """Requests of every step, added up."""
        return sum(stretch.steps * stretch.first.num_reqs for stretch in self.stretches)

    @property
    def computed_tokens(self) -> int:
        """Tokens that went through the model."""
        return sum(stretch.num_tokens for stretch in self.stretches)

    def shapes(self) -> Iterator[StepShape]:
        """The shape of every step."""
        return (shape for stretch in self.stretches for shape in stretch.shapes())

    def seconds(self, cost: Cost) -> float:
        """All steps together."""
        return sum(stretch.seconds(cost) for stretch in self.stretches)


def run_offline(
    workload: Sequence[SimulatedRequest],
    scheduler_config: SchedulerConfig,
    cache_config: CacheConfig,
    *,
    acceptance: float = 0.0,
    shape_of: ShapeOf = StepShape.of,
) -> OfflineRun:
    """Run a workload to its end. The arguments are those of `virtual_clock.simulate`.

    Raises:
        MinivllmError: an empty workload, a request that comes later than the others, or one that the scheduler refuses.
    """
    if not workload:
        raise MinivllmError("a simulation needs at least one request")
    if any(one.arrival or one.after is not None for one in workload):
        raise MinivllmError("all requests of an offline run are there at the start: arrival is 0, after is None")
    return Stretches(workload, Scheduler(scheduler_config, cache_config), Acceptance(acceptance), shape_of).run()


class Stretches:
    """A run under way. `settled`: the last step admitted and ended nobody, so who waits then waits still."""

    def __init__(
        self, workload: Sequence[SimulatedRequest], scheduler: Scheduler, acceptance: Acceptance, shape_of: ShapeOf
    ) -> None:
        self.scheduler, self.acceptance, self.shape_of = scheduler, acceptance, shape_of
        self.requests = [to_request(index, spec, 0.0) for index, spec in enumerate(workload)]
        self.settled = False
        self.foreseen = 0
        """Of the coming steps, those that need no decision: nobody ends, joins or is preempted in them."""
        self.outputs: list[EngineCoreOutput] = []
        """What the last stretch gave."""
        self.scheduled: SchedulerOutput | None = None
        """What the scheduler decided for it."""

    def run(self) -> OfflineRun:
        """Run steps until no request is left."""
        for request in self.requests:
            self.scheduler.add_request(request)
        stretches = []
        while self.scheduler.has_unfinished_requests():
            stretches.append(self.stretch())
        hits = sum(request.num_cached_tokens for request in self.requests)
        return OfflineRun(tuple(stretches), hits, self.scheduler.num_preemptions)

    def stretch(self) -> Stretch:
        """Take as many steps as are alike, at least one."""
        self.foreseen = 0
        running = list(self.scheduler.running)
        steps = self.steps_alike(running)
        if steps == 1 and not self.foreseen:
            shape = self.shape_of(self._decide(1))
            return Stretch(1, shape, shape, shape)
        shape_at = decoding_shapes(self.shape_of, [request.num_computed_tokens for request in running])
        if steps <= self.foreseen:
            self._decode(running, steps)
            self._tell(running, steps)
        else:
            self._decode(running, steps - 1)
            self._decide(steps)
        return Stretch(steps, shape_at(0), shape_at(min(steps - 1, 1)), shape_at(min(steps - 1, 2)))

    def _decode(self, running: Sequence[Request], steps: int) -> None:
        """Take steps that need no decision: each request gets a token in each, and blocks for them."""
        for request in running:
            for _ in range(steps):
                request.append_output_token_id(GENERATED)
            self.scheduler.kv_cache_manager.allocate_slots(request, steps)
            request.num_computed_tokens += steps

    def _tell(self, running: Sequence[Request], steps: int) -> None:
        """Say of steps that needed no decision what the scheduler would have said."""
        tokens, scheduled = [GENERATED] * steps, {request.request_id: steps for request in running}
        self.outputs = [EngineCoreOutput(request_id, tokens) for request_id in scheduled]
        self.scheduled = SchedulerOutput([], CachedRequestData(), scheduled, steps * len(running), {}, set(), set())
        self.settled = True

    def _decide(self, steps: int) -> list[tuple[int, int]]:
        """The scheduler decides on the last of `steps` steps; returns (new tokens, tokens computed before) of each."""
        output = self.scheduler.schedule()
        scheduled, live = output.num_scheduled_tokens, self.scheduler.requests
        before = [(new, live[key].num_computed_tokens - new) for key, new in scheduled.items()]
        sampled = self._sampled(output)
        outputs = self.scheduler.update_from_output(output, ModelRunnerOutput(sampled))
        only_decodes = max(scheduled.values(), default=1) == 1 and not output.scheduled_new_reqs
        self.settled = only_decodes and not self.scheduler.finished_req_ids and not output.preempted_req_ids
        if steps > 1:  # the whole stretch is told, and not its last step alone
            output.num_scheduled_tokens, tokens = dict.fromkeys(scheduled, steps), [GENERATED] * steps
            for one in outputs:
                one.new_token_ids = tokens
        self.outputs, self.scheduled = outputs, output
        self._propose(sampled)
        return before

    def _sampled(self, output: SchedulerOutput) -> dict[str, list[int]]:
        """What each request samples that has caught up: the drafts that are accepted, and one more."""
        live, drafts = self.scheduler.requests, output.scheduled_spec_decode_tokens
        caught_up = [
            key for key in output.num_scheduled_tokens if live[key].num_computed_tokens >= live[key].num_tokens
        ]
        if not drafts:
            return {key: [GENERATED] for key in caught_up}
        return {key: [GENERATED] * (1 + self.acceptance.draw(len(drafts.get(key, ())))) for key in caught_up}

    def _propose(self, sampled: Iterable[str]) -> None:
        num_drafts = self.scheduler.drafting.num_speculative_tokens
        if num_drafts:
            drafts = {key: [GENERATED] * num_drafts for key in sampled if key in self.scheduler.requests}
            self.scheduler.update_draft_token_ids(drafts)

    def steps_alike(self, running: Sequence[Request]) -> int:
        """Number of coming steps that give each running request one token, without admissions or preemptions.

        They have no more tokens together than the budget allows for one.
        """
        scheduler = self.scheduler
        # Where a chunk is enough to be admitted, a smaller one may fit where a larger one did not.
        joins = bool(scheduler.waiting) and not (self.settled and scheduler.config.scheduler_reserve_full_isl)
        if joins or not running or scheduler.drafting.num_speculative_tokens:
            return 1
        if any(request.num_computed_tokens != request.num_tokens - 1 for request in running):
            return 1
        ends = min(request.max_tokens - request.num_output_tokens for request in running)
        ends = min(ends, scheduler.config.max_model_len - max(request.num_tokens for request in running))
        steps = min(ends, scheduler.config.max_num_batched_tokens // len(running))
        while steps and not self._has_room(running, steps):
            steps //= 2
        self.foreseen = min(steps, ends - 1)
        return max(1, steps)

    def _has_room(self, running: Sequence[Request], steps: int) -> bool:
        manager = self.scheduler.kv_cache_manager
        size, held, free = manager.block_size, manager.req_to_blocks, manager.block_pool.get_num_free_blocks()
        if len(running) * -(-steps // size) <= free:
            return True
        wanted = sum(-(-(one.num_computed_tokens + steps) // size) - len(held[one.request_id]) for one in running)
        return wanted <= free
