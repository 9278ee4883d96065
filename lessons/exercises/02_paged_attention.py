"""Exercise 02. Write the block pool, the block table, and the kernels that read through it.

Fill in the functions that raise, then ask what is still missing:

    make check N=02

Needed: lesson 02 to the end of "The mechanism". No GPU: the pool and the table are bookkeeping on the host, and the
kernels run in Triton's interpreter. As soon as the checks of your `BlockPool` pass, the same command serves requests on
it.
"""

from collections import deque

from minivllm.platforms.triton_utils import tl, triton


def slot_mapping(block_ids, positions, block_size: int) -> list[int]:
    """Return the slot in the cache of each of a sequence's positions.

    The cache is one row of slots; block b is the slots b * block_size to (b + 1) * block_size - 1. Position 0 of the
    sequence is at the start of the first block of its table, and each block takes `block_size` positions.

    Trap: a slot is not a block. The table gives the block, and the position the place inside it.

    >>> slot_mapping([7, 3], [0, 3, 4], block_size=4)
    [28, 31, 12]
    """
    raise NotImplementedError("for each position: which entry of the table, and how far into that block")


class KVCacheBlock:
    """Stands for `block_size` token slots in every layer, held by `ref_cnt` sequences; 0 means free. (Given.)"""

    def __init__(self, block_id: int) -> None:
        self.block_id, self.ref_cnt = block_id, 0


class BlockPool:
    """Holds all blocks of the cache. Block 0 is the null block: it pads tables and is never allocated."""

    def __init__(self, num_gpu_blocks: int) -> None:
        """Put all blocks but the null block into `free`; its left end is taken next. (Given.)"""
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_gpu_blocks)]
        self.free = deque(self.blocks[1:])

    def get_num_free_blocks(self) -> int:
        """Return the number of free blocks. (Given.)"""
        return len(self.free)

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take `num_blocks` blocks from the left end, and set their reference counts to 1.

        If fewer are free, raise a ValueError and take none.

        Trap: a caller that got two of three blocks can do nothing with them, and nor can anyone else.

        >>> pool = BlockPool(4)
        >>> [block.block_id for block in pool.get_new_blocks(2)]
        [1, 2]
        """
        raise NotImplementedError("take num_blocks from the left end, or raise and take none")

    def touch(self, blocks) -> None:
        """Increment the reference count of each of these blocks, which some sequence holds already."""
        raise NotImplementedError("count the new reference to each block")

    def free_blocks(self, ordered_blocks) -> None:
        """Decrement each block's reference count. Blocks that reach 0 return to the left end as one group: the first of
        `ordered_blocks` is taken next, then the second.

        Raise a ValueError for a block whose count is 0 already: it is being freed twice.

        Traps: a block that is still shared stays where it is. A block freed twice would be allocated twice, and two
        sequences would write into it.
        """
        raise NotImplementedError("decrement each count; blocks that reach 0 go to the left end, in the order given")


class BlockTable:
    """Lists the blocks of one sequence, in the order of its tokens."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        """Start without blocks and tokens. (Given.)"""
        self.pool, self.block_size = pool, block_size
        self.blocks: list[KVCacheBlock] = []
        self.num_tokens = 0

    def append(self, num_tokens: int) -> tuple[list[int], list[tuple[int, int]]]:
        """Make room for `num_tokens` more tokens; return (their slots, copies).

        Take as few new blocks as will do: none while the last block has room. `copies` is empty except in one case. If
        the next token goes into a last block that other sequences hold too, this sequence must not write there: take a
        new block in its place, release the shared one, and return [(shared block's id, new block's id)]. The caller
        copies the keys and values over before it writes.

        If the pool has too few blocks, let its ValueError reach the caller, and leave table, pool and counts unchanged.

        Traps: a *full* last block that is shared needs no copy, since no sequence will write into it again, and neither
        does `append(0)`, which writes nothing. A block's only holder writes into it without a copy. Take the new blocks
        before you release any.

        >>> BlockTable(BlockPool(8), block_size=4).append(5)
        ([4, 5, 6, 7, 8], [])
        """
        raise NotImplementedError("take the missing blocks; copy a shared last block that is partly full")

    def fork(self) -> "BlockTable":
        """Return a second sequence with the same past: same blocks, same number of tokens, nothing copied.

        Traps: each block has one more reference now. The two tables must not be the same list.
        """
        raise NotImplementedError("a new table with the same blocks, each counted once more")

    def free(self) -> None:
        """Free all blocks, the last one first, and empty the table.

        Trap: other requests may want the head of a sequence again (lesson 05), so it is freed last.
        """
        raise NotImplementedError("free the blocks in reverse, and forget them")


# ---- the kernel, in three steps --------------------------------------------------------------------------------------
#
# A gather copies the rows of sequences out of scattered blocks, one after another. A row is what the cache keeps of one
# token: WIDTH numbers. `cache` is [slots, WIDTH], `out` [tokens, WIDTH]; BLOCK_SIZE and WIDTH are powers of two. A
# pointer such as `cache` names the first element; `cache + n` is the n-th after it.


@triton.jit
def gather_token_kernel(out, cache, block_table, BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Step 1: copy tokens one by one. Program t copies the row of token t of one sequence. Grid: (its tokens,).

    block_table int32 [blocks of the sequence]. Each program reads one entry of the table and one row of the cache.

    Given: `column`, the places of a row's numbers. `tl.load(cache + slot * WIDTH + column)` is a row.
    """
    token = tl.program_id(0)
    column = tl.arange(0, WIDTH)
    raise NotImplementedError("find the token's slot through the table, load that row, store it in row `token` of out")


@triton.jit
def gather_block_kernel(out, cache, block_table, length, BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Step 2: copy whole blocks. Program p copies the rows of the p-th block of one sequence. Grid: (its blocks,).

    The sequence has `length` tokens: the last block may hold fewer than BLOCK_SIZE. Each program reads *one* entry of
    the table, and only rows that hold a token.

    Given: `row` [BLOCK_SIZE, 1] and `column` [1, WIDTH], which together name all elements of a block. A mask goes with
    the load and with the store: tl.load(at, mask=valid), tl.store(at, rows, mask=valid).

    Trap: after the sequence's last token the block holds what an earlier sequence left, and after the end of `out`
    comes other memory.
    """
    place = tl.program_id(0)
    row, column = tl.arange(0, BLOCK_SIZE)[:, None], tl.arange(0, WIDTH)[None, :]
    raise NotImplementedError("look the block up once, then load and store its rows, masked beyond `length`")


@triton.jit
def gather_cache_kernel(out, starts, cache, block_table, lengths, width, BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Step 3: copy all sequences in one launch. Program (s, p) copies the p-th block of sequence s.

    Grid: (sequences, width of the table). block_table int32 [sequences, width], row after row in memory; lengths and
    starts int32 [sequences]. Sequence s has `lengths[s]` tokens, and its rows begin at row `starts[s]` of out.

    Given: `row` and `column` as in step 2.

    Traps: a short sequence has programs with nothing to do; after its last block the table is filled with 0, the null
    block, which must not be read. Two sequences must not write the same rows of out: rows count from `starts[s]`.
    """
    sequence, place = tl.program_id(0), tl.program_id(1)
    row, column = tl.arange(0, BLOCK_SIZE)[:, None], tl.arange(0, WIDTH)[None, :]
    raise NotImplementedError("step 2 with this sequence's row of the table, its length, and its start in out")
