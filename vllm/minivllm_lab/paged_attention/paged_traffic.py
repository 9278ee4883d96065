"""Bytes that attention fetches from a GPU's memory when a sequence's keys and values are in blocks.

A warp's loads are served in whole pieces of memory: sectors of 32 bytes, four of which make a line
of 128. Adjacent keys and values fill the pieces; the 4 bytes of a block-table entry do not, and the
rest of its piece is fetched in vain. The count is for one sequence and one KV head, whose rows in a
block are adjacent, as in a cache [blocks, kv_heads, block_size, head_dim] (vLLM's layout HND).

No L2 cache is assumed, so a GPU may fetch less. Time is not counted: a kernel must read the entry
before it can request the block, and has to wait for it.

Sectors and lines: CUDA C++ Best Practices Guide, "Coalesced Access to Global Memory".
"""

SECTOR, LINE = 32, 128
"""Bytes of the pieces of memory: what L2 hands to a warp, and what a cache keeps track of."""
ENTRY = 4
"""Bytes of a block-table entry, an int32."""


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
