"""Lesson 02. PagedAttention: the KV cache in small blocks, a table for each sequence, and blocks that several share.

Builds a block pool, block tables with reference counts and copy-on-write, and Triton kernels that read through a table.
You learn where a reserved cache loses its memory, why blocks lose next to none, and what one forgotten reference does.

    uv run python vllm/02_paged_attention.py   # under a minute on a laptop, no GPU needed; try --block-size 1
"""

import math
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from minivllm.errors import MinivllmError
from minivllm.platforms.triton_utils import tl, triton
from minivllm_lab.cli import run
from minivllm_lab.disturbance import Control
from minivllm_lab.lesson import begin, keep
from minivllm_lab.paged_attention import report
from minivllm_lab.paged_attention.allocators import TablesOnDemand, reservations
from minivllm_lab.paged_attention.beam_search import measure_sharing
from minivllm_lab.paged_attention.paged_cache import PagedCache, gather_decode, random_case
from minivllm_lab.progress import track
from minivllm_lab.proof import furthest, prove, refusal, show_errors
from minivllm_lab.tables import heading

# %% 1. The pain: one contiguous region for each request
LONGEST = 2048  # tokens of the longest request that is served
BLOCK_T = 64  # tokens that a program of the decode kernel reads at a time, as in lesson 01
RESERVATIONS = reservations(LONGEST)  # four ways to reserve a region: three of the paper's, and a better one


# %% 2. The mechanism: a pool of equal blocks, and a table for each sequence
# region: pool
class KVCacheBlock:
    """`block_size` token slots in every layer. `ref_cnt` sequences hold the block; at 0 it is free."""

    def __init__(self, block_id: int) -> None:
        self.block_id, self.ref_cnt = block_id, 0


class BlockPool:
    """All blocks. Block 0 is the null block: it pads tables and is never allocated."""

    def __init__(self, num_gpu_blocks: int) -> None:
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_gpu_blocks)]
        self.free = deque(self.blocks[1:])  # allocated from the left end

    def get_num_free_blocks(self) -> int:
        """Return the number of blocks that no sequence holds."""
        return len(self.free)

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Allocate `num_blocks` blocks, each with a reference count of 1, or raise without allocating any."""
        if num_blocks > len(self.free):
            raise MinivllmError(f"cannot take {num_blocks} blocks: {len(self.free)} are free")
        blocks = [self.free.popleft() for _ in range(num_blocks)]
        for block in blocks:
            block.ref_cnt = 1
        return blocks

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Increment each block's reference count."""
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """Decrement each block's reference count; those at 0 are allocated next, in this order."""
        free = []
        for block in ordered_blocks:
            if block.ref_cnt == 0:
                raise MinivllmError(f"double free of block {block.block_id}: nobody holds it")
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                free.append(block)
        self.free.extendleft(reversed(free))


# endregion
# region: slot_mapping
def slot_mapping(block_ids: Sequence[int], positions: Iterable[int], block_size: int) -> list[int]:
    """Map each position to its slot: look its block up in the table, then add its offset in the block."""
    return [block_ids[position // block_size] * block_size + position % block_size for position in positions]


# endregion
# region: table
class BlockTable:
    """The blocks of one sequence, in the order of its tokens."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.pool, self.block_size = pool, block_size
        self.blocks: list[KVCacheBlock] = []
        self.num_tokens = 0

    def append(self, num_tokens: int) -> tuple[list[int], list[tuple[int, int]]]:
        """Allocate slots for more tokens; return them, and the (source, target) blocks to copy before writing.

        If the last block is half full and shared, this sequence goes on in a copy of its own: copy-on-write.
        """
        blocks = self.pool.get_new_blocks(self.blocks_needed(num_tokens))  # raises before anything has changed
        copies = []
        if self.must_copy(num_tokens):
            shared, own = self.blocks.pop(), blocks.pop(0)
            self.pool.free_blocks([shared])
            self.blocks.append(own)
            copies.append((shared.block_id, own.block_id))
        self.blocks += blocks
        positions = range(self.num_tokens, self.num_tokens + num_tokens)
        self.num_tokens += num_tokens
        return slot_mapping(self.block_ids(), positions, self.block_size), copies

    def fork(self) -> "BlockTable":
        """Return a second sequence with the same past. Both share every block; nothing is copied."""
        child = BlockTable(self.pool, self.block_size)
        child.blocks, child.num_tokens = list(self.blocks), self.num_tokens
        self.pool.touch(child.blocks)
        return child

    def free(self) -> None:
        """Release every block, the last one first."""
        self.pool.free_blocks(reversed(self.blocks))
        self.blocks, self.num_tokens = [], 0

    def blocks_needed(self, num_tokens: int) -> int:
        """Return how many blocks `append(num_tokens)` takes from the pool."""
        blocks = -(-(self.num_tokens + num_tokens) // self.block_size)
        return blocks - len(self.blocks) + self.must_copy(num_tokens)

    def must_copy(self, num_tokens: int) -> bool:
        """Return whether the next token would be written into a block that another sequence reads."""
        return num_tokens > 0 and self.num_tokens % self.block_size > 0 and self.blocks[-1].ref_cnt > 1

    def block_ids(self) -> list[int]:
        """Return the table as the device needs it."""
        return [block.block_id for block in self.blocks]


# endregion


# %% 3. The same requests on the same memory, by every allocator
def paged(slots: int, block_size: int) -> TablesOnDemand:
    """Make a memory that reserves nothing: a request takes a block when a token needs it."""
    pool = BlockPool(1 + slots // block_size)
    return TablesOnDemand(slots, block_size, lambda: BlockTable(pool, block_size))


# %% 4. The kernels: gather through a block table, in three steps, then attend through it
# region: gather
@triton.jit
def gather_token_kernel(out, cache, block_table, BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Gather one token's row through its sequence's table. Grid: (tokens of the sequence,).

    out [tokens, WIDTH]; cache [slots, WIDTH], any dtype; block_table int32 [blocks of the sequence]. BLOCK_SIZE and
    WIDTH are powers of two. Reads tokens * WIDTH elements and one entry of the table for each token.
    """
    token = tl.program_id(0)
    block = tl.load(block_table + token // BLOCK_SIZE).to(tl.int64)
    slot = block * BLOCK_SIZE + token % BLOCK_SIZE
    column = tl.arange(0, WIDTH)
    tl.store(out + token * WIDTH + column, tl.load(cache + slot * WIDTH + column))


@triton.jit
def gather_block_kernel(out, cache, block_table, length, BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Gather one whole block per program. Grid: (blocks of the sequence,). The last block may be partly filled.

    Reads length * WIDTH elements and one entry of the table for each block.
    """
    place = tl.program_id(0)
    block = tl.load(block_table + place).to(tl.int64)
    row, column = tl.arange(0, BLOCK_SIZE)[:, None], tl.arange(0, WIDTH)[None, :]
    token = place * BLOCK_SIZE + row
    rows = tl.load(cache + (block * BLOCK_SIZE + row) * WIDTH + column, mask=token < length)
    tl.store(out + token * WIDTH + column, rows, mask=token < length)


@triton.jit
def gather_cache_kernel(out, starts, cache, block_table, lengths, width, BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Gather all sequences in one launch. Grid: (sequences, width of the table).

    Sequence s has `lengths[s]` tokens, and its rows begin at row `starts[s]` of out. block_table int32 [sequences,
    width]; the entries after a sequence's last block are padding, and their programs read nothing of the cache.
    """
    sequence, place = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths + sequence)
    if place * BLOCK_SIZE < length:
        block = tl.load(block_table + sequence * width + place).to(tl.int64)
        row, column = tl.arange(0, BLOCK_SIZE)[:, None], tl.arange(0, WIDTH)[None, :]
        token = place * BLOCK_SIZE + row
        rows = tl.load(cache + (block * BLOCK_SIZE + row) * WIDTH + column, mask=token < length)
        tl.store(out + (tl.load(starts + sequence) + token) * WIDTH + column, rows, mask=token < length)


# endregion
# region: decode_kernel
@triton.jit
def paged_decode_kernel(
    out, q, keys, values, block_table, lengths, table_width, scale,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, PAGED: tl.constexpr,
):  # fmt: skip
    """Attend with one query per sequence over its first `lengths[sequence]` tokens. Grid: (sequences, heads).

    q, out [sequences, heads, head_dim]; keys, values [blocks, block_size, kv_heads, head_dim]; block_table int32
    [sequences, table_width]; any float dtype, float32 inside. Only how it finds a token's slot differs from lesson 01's
    kernel; without PAGED, sequence i owns block i, and no table is read.
    Must read 2 * length * kv_heads * head_dim elements and length / block_size entries of the table a sequence.
    """
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(lengths + sequence)  # 1. how many tokens the sequence has
    column = tl.arange(0, BLOCK_D)
    in_head = column < HEAD_DIM
    row = (sequence * GROUP * KV_HEADS + head) * HEAD_DIM + column
    query = tl.load(q + row, mask=in_head, other=0.0).to(tl.float32) * scale
    maximum, total, result = -float("inf"), 0.0, tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, length, BLOCK_T):
        token = start + tl.arange(0, BLOCK_T)  # 2. a tile of positions
        block = sequence
        if PAGED:  # 3. the table: each position's block
            block = tl.load(block_table + sequence * table_width + token // BLOCK_SIZE, mask=token < length, other=0)
        slot = block.to(tl.int64) * BLOCK_SIZE + token % BLOCK_SIZE  # 4. the formula; 64 bits for a large cache
        at = (slot[:, None] * KV_HEADS + head // GROUP) * HEAD_DIM + column[None, :]
        there = (token < length)[:, None] & in_head[None, :]  # 5. read the slots that hold a token, no others
        k = tl.load(keys + at, mask=there, other=0.0).to(tl.float32)
        v = tl.load(values + at, mask=there, other=0.0).to(tl.float32)
        scores = tl.where(token < length, tl.sum(k * query[None, :], axis=1), -float("inf"))  # 6. as in lesson 01
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=0))
        weights, keep = tl.exp(scores - new_maximum), tl.exp(maximum - new_maximum)
        total = total * keep + tl.sum(weights, axis=0)
        result = result * keep + tl.sum(weights[:, None] * v, axis=0)
        maximum = new_maximum
    tl.store(out + row, result / tl.maximum(total, 1e-30), mask=in_head)  # no token, no weight: zero


# endregion


def paged_decode(q: Tensor, keys: Tensor, values: Tensor, block_table: Tensor, lengths: Tensor, paged=True) -> Tensor:
    """Launch the decode kernel: attention of q [sequences, heads, head_dim] over each sequence's tokens -> like q."""
    _, block_size, kv_heads, head_dim = keys.shape
    out, heads = torch.empty_like(q), q.shape[1]
    paged_decode_kernel[(len(q), heads)](
        out, q, keys, values, block_table, lengths, block_table.shape[1], 1 / math.sqrt(head_dim),
        GROUP=heads // kv_heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        BLOCK_D=triton.next_power_of_2(head_dim), BLOCK_T=BLOCK_T, PAGED=paged,
    )  # fmt: skip
    return out


def gather_cache(cache: Tensor, block_table: Tensor, lengths: Tensor) -> Tensor:
    """Gather the rows of all sequences, one after another: cache [blocks, block_size, width] -> [tokens, width]."""
    _, block_size, width = cache.shape
    out = cache.new_empty(int(lengths.sum()), width)
    starts, grid = lengths.cumsum(0, dtype=torch.int32) - lengths, tuple(block_table.shape)
    gather_cache_kernel[grid](out, starts, cache, block_table, lengths, grid[1], BLOCK_SIZE=block_size, WIDTH=width)
    return out


def verify_kernels(device: torch.device) -> dict:
    """Compare attention with float64 on awkward lengths and block sizes, and gathered rows bit for bit."""
    errors = {}
    for heads, kv_heads, head_dim, block_size in track([(4, 4, 64, 16), (6, 2, 80, 5), (8, 1, 128, 1)], "verifying"):
        case = random_case(heads, kv_heads, head_dim, block_size, (1, block_size, block_size + 1, 2 * BLOCK_T + 3))
        expected = gather_decode(*(x.double() if x.is_floating_point() else x for x in case))
        name = f"{heads} query heads, {kv_heads} KV heads of {head_dim}, blocks of {block_size}"
        errors[name] = furthest(paged_decode(*(x.to(device) for x in case)), expected)
    _, keys, _, block_table, lengths = random_case(1, 1, 32, 8, (1, 8, 9, 30))
    rows = [keys[table].flatten(0, 2)[:length] for table, length in zip(block_table, lengths, strict=True)]
    gathered = gather_cache(*(x.to(device) for x in (keys.flatten(2), block_table, lengths)))
    assert torch.equal(gathered.cpu(), torch.cat(rows)), "the gather returned other rows"
    return {"largest_error": show_errors("The kernels", errors, 2e-3, caption="gathered rows: bit for bit")}


# %% 5. Sharing: beams and samples of a real model, whose keys and values are in our blocks
def paged_cache(model, num_blocks: int, block_size: int) -> PagedCache:
    """Make an empty cache for a real model, with `num_blocks` blocks in the pool."""
    return PagedCache(model, BlockPool(num_blocks), BlockTable, block_size)


# %% 7. Break it
def double_free(pool: BlockPool) -> list[int]:
    """Free the same blocks twice, then serve two sequences; return the blocks that both of them got."""
    blocks = pool.get_new_blocks(3)
    pool.free_blocks(blocks)
    pool.free_blocks(blocks)
    first, second = ({block.block_id for block in pool.get_new_blocks(3)} for _ in range(2))
    return sorted(first & second)


def leak(cache: PagedCache, prompt: list[int], stranger: list[int], new_tokens: int) -> tuple[list[int], list[int]]:
    """Fork a request, end its first half, admit a stranger; return what the second half reads and generates."""
    first = cache.table()
    logits = cache.step([first], [prompt])
    second, generated = first.fork(), []
    first.free()
    cache.step([cache.table()], [stranger])
    for _ in range(new_tokens):
        generated.append(int(logits[0].argmax()))
        logits = cache.step([second], [generated[-1:]])
    return cache.tokens_of(second)[: len(prompt)], generated


def break_it(cache_of: Callable[[], PagedCache], decode, prompt: list[int], stranger: list[int]) -> dict:
    """Free blocks twice, empty the pool and forget a reference, with the checks and without them."""
    trusting, dry, forgetful = BlockPool(9), BlockTable(BlockPool(5), 16), cache_of()
    trusting.free_blocks = lambda blocks: trusting.free.extendleft(list(blocks)[::-1])  # checks nothing
    dry.append(64)
    forgetful.pool.touch = lambda blocks: None  # does not count a fork
    results: dict = {"double_free": double_free(trusting)}
    for name, cache in (("counted", cache_of()), ("forgotten", forgetful)):
        reads, writes = leak(cache, prompt, stranger, 16)
        results[name] = {"reads": decode(reads), "writes": decode(writes)}
    report.show_break(results, refusal(lambda: double_free(BlockPool(9))), refusal(lambda: dry.append(1)))
    return results


def main(arguments: Namespace) -> None:
    """Run the lesson from top to bottom."""
    plan = report.plan(arguments, LONGEST)
    device, results, control = begin("Lesson 02. PagedAttention", arguments), {}, Control()
    model, tokenizer, prompt, stranger = report.load_prompts(arguments, device)
    cache_of = partial(paged_cache, model, plan.cache_blocks(prompt, stranger), plan.block_size)
    heading("1–3. The same requests on the same memory")
    allocators = RESERVATIONS | {"paged": partial(paged, block_size=plan.block_size)}
    results["memory"] = report.measure_memory(plan, allocators)
    heading("4. The kernels, verified")
    results["kernels"] = prove(verify_kernels, device)
    heading("5. Sharing")
    results["sharing"] = measure_sharing(cache_of, lambda n, size: BlockTable(BlockPool(n), size), prompt, plan)
    report.show_sharing(results["sharing"], len(prompt), plan.beam_steps)
    heading("6. What a block size costs")
    with control.watch():
        results["blocks"] = report.measure_block_sizes(plan, device, paged, paged_decode)
    heading("7. Break it")
    results["broken"] = break_it(cache_of, tokenizer.decode, prompt, stranger)
    report.conclude(results, LONGEST)
    context = {"slots": report.SLOTS, "disturbance": control.record()}
    keep(__file__, results, arguments, report.draw, block_size=plan.block_size, **context)


parser = partial(report.parser, __doc__)
if __name__ == "__main__":
    run(main, parser())
