"""Who is preempted, and what becomes of it: other rules than the engine's, and V0's swap. For comparison only.

    simulate(workload, scheduler_config, cache_config, cost, scheduler=scheduler_with("least computed"))
    simulate(workload, scheduler_config, cache_config, cost, scheduler=scheduler_with(swaps=True))

Everything but the choice of the victim stays the engine's own. Rules that pull requests have proposed for vLLM:
"least computed" (vllm#53723, measured in vllm#54644), "fewest left" (vllm#36980).

A scheduler that swaps keeps what a victim had computed: its blocks go to a host that has room for all, and come back
before the request runs again, so nothing of it is computed twice. That was vLLM V0's way for requests of several
sequences, `--swap-space` GiB at most (v0.6.0: `vllm/core/scheduler.py`, `_preempt_by_swap`); V1 has none. Here the
copies take no time by themselves: `take_copied_blocks` says how many there were, for a cost to be put on them.
"""

from __future__ import annotations

from collections.abc import Callable

from minivllm.config import NO_PARTS, CacheConfig, Parts, SchedulerConfig
from minivllm.config.checks import require
from minivllm.core.remote_kv import Prefix
from minivllm.core.request import Request
from minivllm.core.request_queue import RequestQueue
from minivllm.core.scheduler import Scheduler, Step

Rule = Callable[[Scheduler], Request]


def _last(scheduler: Scheduler) -> Request:
    return scheduler.running[-1]


def _first(scheduler: Scheduler) -> Request:
    return scheduler.running[0]


def _most_blocks(scheduler: Scheduler) -> Request:
    held = scheduler.kv_cache_manager.req_to_blocks
    return max(reversed(scheduler.running), key=lambda request: len(held.get(request.request_id, ())))


def _fewest_left(scheduler: Scheduler) -> Request:
    return min(reversed(scheduler.running), key=lambda request: request.max_tokens - request.num_output_tokens)


def _least_computed(scheduler: Scheduler) -> Request:
    return min(reversed(scheduler.running), key=lambda request: request.num_computed_tokens)


RULES: dict[str, Rule] = {
    "last in": _last,
    "first in": _first,
    "most blocks": _most_blocks,
    "fewest left": _fewest_left,
    "least computed": _least_computed,
}
"""Each names the victim among those who run; of equals, the one admitted last. The first is vLLM's (first come, first
served); "fewest left" goes by the answer's tokens that are missing, which an engine can only guess."""


class VictimScheduler(Scheduler):
    """The engine's scheduler with another rule for victims, and perhaps with a host for their blocks."""

    rule: Rule | None = None
    """None: the engine's own, by its policy."""
    swaps = False

    def __init__(self, scheduler_config: SchedulerConfig, cache_config: CacheConfig, parts: Parts = NO_PARTS) -> None:
        super().__init__(scheduler_config, cache_config, parts)
        self.on_host: dict[str, int] = {}
        """Computed tokens of each request whose blocks are on the host."""
        self._copied = [0, 0]

    def take_copied_blocks(self) -> tuple[int, int]:
        """Blocks that were copied out to the host, and back, since it was last asked."""
        out, back = self._copied
        self._copied = [0, 0]
        return out, back

    def _choose_victim(self) -> Request:
        rule = type(self).rule
        return super()._choose_victim() if rule is None else rule(self)

    def _preempt_request(self, request: Request, step: Step) -> None:
        computed = request.num_computed_tokens
        super()._preempt_request(request, step)
        if self.swaps and computed:
            self.on_host[request.request_id] = computed
            self._copied[0] += self._blocks(computed)

    def _find_prefix(self, request: Request) -> Prefix | None:
        found, kept = super()._find_prefix(request), self.on_host.get(request.request_id, 0)
        return found if found is None or kept <= found.num_tokens else Prefix((), 0, num_external=kept)

    def _admit(self, request: Request, step: Step, chunk_limit: int, queue: RequestQueue | None = None) -> bool | None:
        admitted = super()._admit(request, step, chunk_limit, queue)
        if admitted:
            self._copied[1] += self._blocks(self.on_host.pop(request.request_id, 0))
        return admitted

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.cache_config.block_size)


def scheduler_with(victim: str = "", *, swaps: bool = False) -> type[VictimScheduler]:
    """The engine's scheduler with this rule of RULES (empty: by its policy), swapping or not.

    Raises:
        MinivllmError: there is no such rule.
    """
    require(not victim or victim in RULES, f"victim is one of {', '.join(RULES)}, not {victim!r}")
    attributes = {"rule": RULES.get(victim), "swaps": swaps}
    return type("VictimScheduler", (VictimScheduler,), attributes)
