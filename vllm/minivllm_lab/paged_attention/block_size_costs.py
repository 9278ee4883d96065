"""The cost of a block size for requests of given lengths: empty slots, and bytes that attention
fetches in vain.

Each request is counted at some point of its life, and longer lives weigh more, which gives a busy
server at a random moment.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from minivllm.config.checks import positive_count, require
from minivllm_lab.paged_attention.paged_traffic import SECTOR, fetched
from minivllm_simulate.workloads import RequestLengths

GOLDEN = 0.618
"""The fractional parts of its multiples are spread evenly over 0 to 1, however many there are."""


@dataclass(frozen=True)
class Moment:
    """One request at some moment of its life."""

    prompt: int
    tokens: int
    """Prompt tokens and those that each sample has generated so far."""
    weight: int
    """Steps of its life."""


@dataclass(frozen=True)
class Held:
    """Slots in held blocks, summed over requests."""

    slots: int
    tokens: int
    """Slots that hold a token."""
    unshared: int
    """Slots that would be held if each sample had a copy of the prompt."""

    @property
    def empty(self) -> float:
        """Return the share of the held slots without a token."""
        return 1 - self.tokens / self.slots

    @property
    def saved(self) -> float:
        """Return the share of blocks that sharing the prompt saves."""
        return 1 - self.slots / self.unshared


def moments(requests: Iterable[RequestLengths]) -> tuple[Moment, ...]:
    """Pick a point in each request's life, such that the points are spread evenly over the output
    tokens.
    """
    seen = []
    for number, lengths in enumerate(requests):
        generated = 1 + int(number * GOLDEN % 1 * (lengths.output_tokens - 1))
        seen.append(Moment(lengths.prompt_tokens, lengths.prompt_tokens + generated, lengths.output_tokens))
    return tuple(seen)


def held(seen: Sequence[Moment], block_size: int, samples: int = 1) -> Held:
    """Count slots in blocks of `block_size`; each request's `samples` outputs share its prompt's
    full blocks.

    Raises:
        MinivllmError: no requests, or a block or a number of samples below 1.
    """
    require(bool(seen), "there are no requests to look at")
    require(min(block_size, samples) >= 1, f"a block of {block_size} slots, {samples} samples: each must be at least 1")
    blocks = stored = unshared = 0
    for moment in seen:
        whole = -(-moment.tokens // block_size)
        shared = moment.prompt // block_size if samples > 1 else 0
        blocks += moment.weight * (shared + samples * (whole - shared))
        stored += moment.weight * (samples * moment.tokens - (samples - 1) * shared * block_size)
        unshared += moment.weight * samples * whole
    return Held(blocks * block_size, stored, unshared * block_size)


def fetched_in_vain(
    seen: Sequence[Moment], block_size: int, row_bytes: int, piece: int = SECTOR, *, per_token: bool = False
) -> float:
    """Return the bytes that attention fetches in vain per byte that it needs (see
    `paged_traffic.fetched`).

    Each sample reads its whole past, shared or not, so the number of samples makes no difference.

    Raises:
        MinivllmError: no requests, or an argument that is not a positive whole number.
    """
    require(bool(seen), "there are no requests to look at")
    for name, value in (("block_size", block_size), ("row_bytes", row_bytes), ("piece", piece)):
        positive_count(name, value)
    total = needed = 0
    for moment in seen:
        total += moment.weight * sum(fetched(moment.tokens, block_size, row_bytes, piece, per_token=per_token))
        needed += moment.weight * 2 * moment.tokens * row_bytes
    return total / needed - 1
