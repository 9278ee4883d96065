"""The scheduler's counters, for logs and metrics.

In vLLM v0.33.0: `vllm/v1/metrics/stats.py` (`PrefixCacheStats`, `SchedulerStats`),
`vllm/v1/spec_decode/metrics.py` (`SpecDecodingStats`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from itertools import zip_longest
from typing import Any


@dataclass(frozen=True, slots=True)
class PrefixCacheStats:
    """Counts since the start: requests that looked up their prefix, tokens queried, tokens found.

    Requests that resume after a preemption mostly find their own blocks, so what they find is
    counted separately.
    """

    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_hits: int = 0

    def with_lookup(self, num_tokens: int, num_hits: int, preempted: bool) -> "PrefixCacheStats":
        """Return the counts after one more lookup, of `num_tokens` tokens, `num_hits` of them
        cached.
        """
        if preempted:
            return replace(self, preempted_hits=self.preempted_hits + num_hits)
        return replace(self, requests=self.requests + 1, queries=self.queries + num_tokens, hits=self.hits + num_hits)


@dataclass(slots=True)
class SpecDecodingStats:
    """Counts since the start: drafts (one per verification), draft tokens, and accepted tokens, in
    total and by position.

    `since` returns the counts between two snapshots.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)

    def copy(self) -> "SpecDecodingStats":
        """Return a snapshot that later counts leave unchanged."""
        return replace(self, num_accepted_tokens_per_pos=list(self.num_accepted_tokens_per_pos))

    def since(self, before: "SpecDecodingStats") -> "SpecDecodingStats":
        """Return what was counted since an earlier snapshot."""
        by_position = zip_longest(self.num_accepted_tokens_per_pos, before.num_accepted_tokens_per_pos, fillvalue=0)
        return SpecDecodingStats(
            self.num_drafts - before.num_drafts,
            self.num_draft_tokens - before.num_draft_tokens,
            self.num_accepted_tokens - before.num_accepted_tokens,
            [now - then for now, then in by_position],
        )

    def observe_draft(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Count a verification of `num_draft_tokens` tokens, the first `num_accepted_tokens` of
        them accepted.
        """
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted_tokens
        per_pos = self.num_accepted_tokens_per_pos
        per_pos.extend([0] * (num_draft_tokens - len(per_pos)))
        for position in range(num_accepted_tokens):
            per_pos[position] += 1


@dataclass(slots=True)
class SchedulerStats:
    """The scheduler's current state, and its counts since the start. `kv_cache_usage` is a
    fraction, 0 to 1.

    It is a snapshot: reading it resets nothing, and the difference of two gives the counts between
    them.
    """

    num_running_reqs: int
    num_waiting_reqs: int
    kv_cache_usage: float
    prefix_cache_stats: PrefixCacheStats
    spec_decoding_stats: SpecDecodingStats
    num_preemptions: int
    num_recomputed_tokens: int = 0
    """Tokens of preempted requests that were computed before, and are no longer cached when
    the requests resume.
    """
    connector_prefix_cache_stats: PrefixCacheStats | None = None
    """Lookups of a KV connector for tokens that the prefix cache did not have; None without one."""


def summed_stats(engines: Sequence[SchedulerStats]) -> SchedulerStats:
    """Return the state of several engines as one: counts are added, and the cache's usage is
    averaged.
    """
    if len(engines) == 1:
        return engines[0]
    total = _sum(engines)
    total.kv_cache_usage /= len(engines)
    return total


def _sum(values: Sequence[Any]) -> Any:
    """Add numbers, lists by position, and dataclasses field by field; None stays None."""
    first = values[0]
    if first is None:
        return None
    if isinstance(first, list):
        return [sum(counts) for counts in zip_longest(*values, fillvalue=0)]
    if is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in fields(first)]
        return replace(first, **{name: _sum([getattr(value, name) for value in values]) for name in names})
    return sum(values)
