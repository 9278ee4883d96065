"""What a block size costs requests of given lengths: slots that stay empty, and bytes that attention fetches in vain.

Counted over requests at some point of their lives, those that live longer weighing more: what one would see on looking
at a busy server at a random moment.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from minivllm.config.checks import require
from minivllm_lab.paged_attention.paged_traffic import SECTOR, counted, paged_traffic
from minivllm_simulate.workloads import RequestLengths

GOLDEN = 0.618
"""Multiples of it, without their whole part, lie evenly in 0 to 1 however many there are."""


@dataclass(frozen=True)
class Moment:
    """One request as it is seen at some moment."""

    prompt: int
    tokens: int
    """Prompt and what each sample has written by then."""
    weight: int
    """Steps that it lives."""


@dataclass(frozen=True)
class Held:
    """Slots of a cache in blocks, over all requests that were looked at."""

    slots: int
    """In blocks that somebody holds."""
    tokens: int
    """Slots of those in which a token lies."""
    unshared: int
    """Slots that would be held if each sample had a copy of the prompt."""

    @property
    def empty(self) -> float:
        """The share of the held slots in which no token lies."""
        return 1 - self.tokens / self.slots

    @property
    def saved(self) -> float:
        """The share of blocks that sharing the prompt saves."""
        return 1 - self.slots / self.unshared


def moments(requests: Iterable[RequestLengths]) -> tuple[Moment, ...]:
    """Each request at a point of its life, the points spread evenly from its first output token to its last."""
    return tuple(
        Moment(
            one.prompt_tokens,
            one.prompt_tokens + 1 + int(number * GOLDEN % 1 * (one.output_tokens - 1)),
            one.output_tokens,
        )
        for number, one in enumerate(requests)
    )


def held(seen: Sequence[Moment], block_size: int, samples: int = 1) -> Held:
    """Slots in blocks of `block_size`, `samples` answers to each request sharing the full blocks of its prompt.

    Raises:
        MinivllmError: no requests, or a block or a number of samples below 1.
    """
    require(bool(seen), "there are no requests to look at")
    require(min(block_size, samples) >= 1, f"a block of {block_size} slots, {samples} samples: each is at least 1")
    blocks = stored = unshared = 0
    for one in seen:
        whole = -(-one.tokens // block_size)
        shared = one.prompt // block_size if samples > 1 else 0
        blocks += one.weight * (shared + samples * (whole - shared))
        stored += one.weight * (samples * one.tokens - (samples - 1) * shared * block_size)
        unshared += one.weight * samples * whole
    return Held(blocks * block_size, stored, unshared * block_size)


def fetched_in_vain(
    seen: Sequence[Moment], block_size: int, row_bytes: int, piece: int = SECTOR, *, per_token: bool = False
) -> float:
    """Bytes that attention fetches beyond those it needs, for each byte that it needs (see `paged_traffic`).

    Each sample reads its whole past, shared or not, so their number makes no difference.

    Raises:
        MinivllmError: no requests, or an argument that `paged_traffic` refuses.
    """
    require(bool(seen), "there are no requests to look at")
    paged_traffic(1, block_size, row_bytes, piece)  # refuses what makes no sense
    tokens = keys = entries = 0
    for one in seen:
        runs, reads = counted(one.tokens, block_size, row_bytes, piece, per_token)
        tokens += one.weight * one.tokens
        keys += one.weight * runs
        entries += one.weight * reads
    return (2 * keys + entries * piece) / (2 * tokens * row_bytes) - 1
