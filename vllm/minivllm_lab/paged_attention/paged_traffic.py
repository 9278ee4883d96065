"""Bytes that attention fetches from a GPU's memory when a sequence's keys and values lie in blocks.

A warp's loads are served in whole pieces of memory: sectors of 32 bytes, four of which make a line of 128. Keys and
values that lie together fill the pieces; the 4 bytes of a block-table entry do not, and the piece around them is
fetched for nothing. Counted for one sequence and one KV head, whose rows of a block lie together, as in a cache
[blocks, kv_heads, block_size, head_dim] (vLLM's layout HND).

No cache behind the chip is assumed, so a GPU, with its L2, may fetch less. Time is not counted: a kernel must have the
entry before it can ask for the block, and waits.

Sectors and lines: CUDA C++ Best Practices Guide, "Coalesced Access to Global Memory".
"""

from dataclasses import dataclass

from minivllm.config.checks import positive_count

SECTOR, LINE = 32, 128
"""Bytes of the pieces of memory: what L2 hands to a warp, and what a cache keeps track of."""
ENTRY = 4
"""Bytes of a block-table entry, an int32."""


@dataclass(frozen=True)
class PagedTraffic:
    """What is fetched for one sequence and one KV head, in bytes."""

    needed: int
    """Keys and values of the sequence's tokens."""
    keys_and_values: int
    """Fetched for them, in whole pieces."""
    table: int
    """Fetched for entries of the block table, in whole pieces."""

    @property
    def fetched(self) -> int:
        """All bytes that are fetched."""
        return self.keys_and_values + self.table

    @property
    def factor(self) -> float:
        """Bytes fetched for each byte needed, at least 1."""
        return self.fetched / self.needed


def paged_traffic(
    length: int, block_size: int, row_bytes: int, piece: int = SECTOR, *, per_token: bool = False
) -> PagedTraffic:
    """Traffic of attention over `length` tokens in blocks of `block_size`.

    Args:
        length: tokens of the sequence; what lies behind its last one is masked, and not fetched.
        block_size: token slots in a block.
        row_bytes: bytes of one token's keys in one KV head; its values have as many.
        piece: bytes fetched at once: `SECTOR` or `LINE`.
        per_token: the kernel reads an entry for each token, not for each block.

    Raises:
        MinivllmError: an argument is not a positive whole number.
    """
    for name, value in (("length", length), ("block_size", block_size), ("row_bytes", row_bytes), ("piece", piece)):
        positive_count(name, value)
    runs, reads = counted(length, block_size, row_bytes, piece, per_token)
    return PagedTraffic(2 * length * row_bytes, 2 * runs, reads * _whole(ENTRY, piece))


def counted(length: int, block_size: int, row_bytes: int, piece: int, per_token: bool) -> tuple[int, int]:
    """Bytes fetched for the keys, and entries read; the arguments of `paged_traffic`, unchecked, for many calls."""
    full, rest = divmod(length, block_size)
    runs = full * _whole(block_size * row_bytes, piece) + _whole(rest * row_bytes, piece)
    return runs, length if per_token else full + (rest > 0)


def _whole(count: int, piece: int) -> int:
    """Bytes of the pieces that a run of `count` bytes covers; it starts where a piece does."""
    return -(-count // piece) * piece
