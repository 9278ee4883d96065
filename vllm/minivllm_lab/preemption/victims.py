"""Rules other than the engine's for picking the preemption victim, and V0's swap, for comparison
only.

    Scheduler(scheduler_config, cache_config, SchedulingPolicy(victim=victim_rule("least computed")))
    Scheduler(scheduler_config, cache_config, SwapSpace(block_size).policy(victim_rule("last in")))

Everything but the choice of the victim stays the engine's own. Two rules were proposed for vLLM in
pull requests: "least computed" (vllm#53723, measured in vllm#54644) and "fewest left" (vllm#36980).

A swap keeps what a victim had computed: its blocks go to a host with room for all of them, and come
back before the request runs again, so nothing is computed twice. That was vLLM V0's method for
requests of several sequences, with at most `--swap-space` GiB (v0.6.0: `vllm/core/scheduler.py`,
`_preempt_by_swap`); V1 has none. Here the copies take no time: `take_copied_blocks` counts them, so
that a simulation can charge for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from minivllm.core.kv_cache_manager import KVCacheManager
from minivllm.core.policy import DEFAULT_POLICY, SchedulingPolicy, find_prefix, running_then_waiting
from minivllm.core.remote_kv import Prefix
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler
from minivllm.core.step import Step

Blocks = Mapping[str, Sequence[Any]]
Victim = Callable[[Sequence[Request], str, Blocks], Request]


RULES: dict[str, Victim] = {
    "last in": lambda running, *_: running[-1],
    "first in": lambda running, *_: running[0],
    "most blocks": lambda running, _, blocks: max(running[::-1], key=lambda each: len(blocks.get(each.request_id, ()))),
    "fewest left": lambda running, *_: min(running[::-1], key=lambda each: each.max_tokens - each.num_output_tokens),
    "least computed": lambda running, *_: min(running[::-1], key=lambda each: each.num_computed_tokens),
}
"""Each rule picks one of the running requests; of equals, the one admitted last. The first rule is
vLLM's (first come, first served). "fewest left" counts the answer's missing tokens, which an engine
can only guess.
"""


def victim_rule(name: str = "") -> Victim:
    """Return the rule of `RULES` with this name; an empty name gives vLLM's rule, which follows the
    scheduler's policy.
    """
    return RULES[name] if name else DEFAULT_POLICY.victim


class SwapSpace:
    """One scheduler's host memory, with room for the blocks of all victims."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.on_host: dict[str, int] = {}
        """Computed tokens of each request whose blocks are on the host."""
        self._copied = [0, 0]

    def policy(self, victim: Victim) -> SchedulingPolicy:
        """Return a policy that swaps out the requests that `victim` picks."""
        return SchedulingPolicy(
            schedule=self._swap_in, victim=partial(self._swap_out, victim), find_prefix=self._find_prefix
        )

    def take_copied_blocks(self) -> tuple[int, int]:
        """Return how many blocks were copied to the host and back since the last call."""
        out, back = self._copied
        self._copied = [0, 0]
        return out, back

    def _swap_out(self, victim: Victim, running: Sequence[Request], policy: str, blocks: Blocks) -> Request:
        request = victim(running, policy, blocks)
        if request.num_computed_tokens:
            self.on_host[request.request_id] = request.num_computed_tokens
            self._copied[0] += self._blocks(request.num_computed_tokens)
        return request

    def _find_prefix(self, request: Request, manager: KVCacheManager) -> Prefix:
        cached, kept = find_prefix(request, manager), self.on_host.get(request.request_id, 0)
        return cached if kept <= cached.num_tokens else Prefix((), 0, num_external=kept)

    def _swap_in(self, scheduler: Scheduler, step: Step) -> None:
        running_then_waiting(scheduler, step)
        for request in step.admitted:
            self._copied[1] += self._blocks(self.on_host.pop(request.request_id, 0))

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)
