"""Exercise 02. Write the block pool and the block table: allocate, share, copy on write, free.

Fill in the functions that raise, then ask what is still missing:

    make check N=02

Needed: lesson 02 up to "The mechanism". The solution is in vllm/02_paged_attention.py; try first. No GPU and no model:
all of this is bookkeeping on the host.
"""

from collections import deque


def slot_mapping(block_ids, positions, block_size: int) -> list[int]:
    """The slot in the cache of each of a sequence's positions.

    The cache is one row of slots; block b is the slots b * block_size to (b + 1) * block_size - 1. Position 0 of the
    sequence lies at the start of the first block of its table, and each block takes `block_size` positions.

    Trap: a slot is no block. The table says which block; where inside it, the position says.

    >>> slot_mapping([7, 3], [0, 3, 4], block_size=4)
    [28, 31, 12]
    """
    raise NotImplementedError("for each position: which entry of the table, and how far into that block")


class KVCacheBlock:
    """Given. `block_size` token slots in every layer; `ref_cnt` sequences hold the block, 0 means that it is free."""

    def __init__(self, block_id: int) -> None:
        self.block_id, self.ref_cnt = block_id, 0


class BlockPool:
    """All blocks of the cache. Block 0 is the null block: it pads tables, and nobody ever gets it."""

    def __init__(self, num_gpu_blocks: int) -> None:
        """Given. The left end of `free` is taken next."""
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_gpu_blocks)]
        self.free = deque(self.blocks[1:])

    def get_num_free_blocks(self) -> int:
        """Given."""
        return len(self.free)

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take blocks from the left end; each has one holder then.

        Where fewer are free, raise a ValueError and take none.

        Trap: a caller that got two of three blocks has nothing that it can use, and nobody else has them either.
        """
        raise NotImplementedError("take num_blocks from the left end, or raise and take none")

    def touch(self, blocks) -> None:
        """One holder more for each of these blocks, which somebody holds already."""
        raise NotImplementedError("count the new holder of each block")

    def free_blocks(self, ordered_blocks) -> None:
        """One holder less for each block. Those that nobody holds any more go back to the left end, as one group: the
        first of `ordered_blocks` is taken next, then the second.

        Raise a ValueError for a block that nobody holds: it is being freed twice.

        Traps: a block that is still shared stays where it is. A block freed twice would be handed out twice, and two
        sequences would write into it.
        """
        raise NotImplementedError("count one holder less; what nobody holds goes to the left end, in the order given")


class BlockTable:
    """The blocks of one sequence, in the order of its tokens."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        """Given."""
        self.pool, self.block_size = pool, block_size
        self.blocks: list[KVCacheBlock] = []
        self.num_tokens = 0

    def append(self, num_tokens: int) -> tuple[list[int], list[tuple[int, int]]]:
        """Make room for `num_tokens` more tokens; returns (their slots, copies).

        Take as few new blocks as will do: none while the last block has room. `copies` is empty, but for one case. If
        the next token goes into a last block that other sequences hold too, this sequence must not write there: take a
        new block in its place, let go of the shared one, and return [(shared block's id, new block's id)]. Whoever
        called copies the keys and values over before writing.

        Where the pool has too few blocks, its ValueError goes on to the caller, and table, pool and counts are as they
        were.

        Traps: a *full* last block that is shared needs no copy, since nobody will write into it again. The last one who
        holds a block writes into it without a copy. Take the blocks before you let go of any.
        """
        raise NotImplementedError("take the blocks that are missing; copy a shared, half full last block")

    def fork(self) -> "BlockTable":
        """A second sequence with the same past: same blocks, same number of tokens, nothing copied.

        Traps: each block has one holder more now. The two tables must not be the same list.
        """
        raise NotImplementedError("a new table with the same blocks, each counted once more")

    def free(self) -> None:
        """Let go of all blocks, the last one first, and be empty.

        Trap: the head of a sequence is what others may want again (lesson 05), so it is given up last.
        """
        raise NotImplementedError("free the blocks in reverse, and forget them")
