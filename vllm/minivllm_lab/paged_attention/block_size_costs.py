"""The cost of a block size for requests of given lengths: empty slots, and bytes that attention
fetches in vain.

Each request is counted at some point of its life, and longer lives weigh more, which gives a busy
server at a random moment.

A warp's loads are served in whole pieces of memory: sectors of 32 bytes, four of which make a line
of 128. Adjacent keys and values fill the pieces; the 4 bytes of a block-table entry do not, and the
rest of its piece is fetched in vain. The count is for one sequence and one KV head, whose rows in a
block are adjacent, as in a cache [blocks, kv_heads, block_size, head_dim] (vLLM's layout HND).

No L2 cache is assumed, so a GPU may fetch less. Time is not counted: a kernel must read the entry
before it can request the block, and has to wait for it.

Sectors and lines: CUDA C++ Best Practices Guide, "Coalesced Access to Global Memory".
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from minivllm_simulate.workloads import RequestLengths

SECTOR, LINE = 32, 128
"""Bytes of the pieces of memory: what L2 hands to a warp, and what a cache keeps track of."""
ENTRY = 4
"""Bytes of a block-table entry, an int32."""
GOLDEN = 0.618
"""The fractional parts of its multiples are spread evenly over 0 to 1, however many there are."""


class Moment(NamedTuple):
    """One request at some moment of its life."""

    prompt: int
    tokens: int
    """Prompt tokens and those that each sample has generated so far."""
    weight: int
    """Steps of its life."""


class Held(NamedTuple):
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
    """
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
    """Return the bytes that attention fetches in vain per byte that it needs, as `fetched` counts
    them.

    Each sample reads its whole past, shared or not, so the number of samples makes no difference.
    """
    total = needed = 0
    for moment in seen:
        total += moment.weight * sum(fetched(moment.tokens, block_size, row_bytes, piece, per_token=per_token))
        needed += moment.weight * 2 * moment.tokens * row_bytes
    return total / needed - 1


def fetched(
    length: int, block_size: int, row_bytes: int, piece: int = SECTOR, *, per_token: bool = False
) -> tuple[int, int]:
    """Count the bytes fetched for keys and values, and for entries of the block table.

    Args:
        length: tokens of the sequence; slots after its last one are masked, and not fetched.
        block_size: token slots in a block.
        row_bytes: bytes of one token's keys in one KV head; its values have as many.
        piece: bytes fetched at once: `SECTOR` or `LINE`.
        per_token: the kernel reads an entry for each token, not for each block.
    """
    full, rest = divmod(length, block_size)
    keys = full * _whole(block_size * row_bytes, piece) + _whole(rest * row_bytes, piece)
    entries = length if per_token else full + (rest > 0)
    return 2 * keys, entries * _whole(ENTRY, piece)


def _whole(count: int, piece: int) -> int:
    """Round a run of `count` bytes up to whole pieces; the run starts at a piece's boundary."""
    return -(-count // piece) * piece
