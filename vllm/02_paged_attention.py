"""Lesson 02. PagedAttention: the KV cache in small blocks, a table for each sequence, and blocks that several share.

Builds the naive allocator, then block pool, block tables, reference counts and copy-on-write, and two Triton kernels:
decode attention through a block table, and a copy of many blocks in one launch.
You learn where a reserved cache loses its memory, why blocks lose next to none, what looking a block up costs the
kernel, and what one forgotten reference does.

    uv run python vllm/02_paged_attention.py                      # under a minute on a laptop, no GPU needed
    uv run python vllm/02_paged_attention.py --block-size 128 --slots 8192
    uv run python vllm/02_paged_attention.py --beam-width 8 --prompt "class Queue"
"""

import argparse
import math
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from rich.markup import escape
from torch import Tensor

from minivllm.config import EMBEDDED_MODEL
from minivllm.errors import MinivllmError
from minivllm.kernels.unified_attention import unified_attention
from minivllm.lab import palette
from minivllm.lab.cli import lesson_parser, positive_int, run
from minivllm.lab.figures import curves, panels
from minivllm.lab.lesson import begin, keep
from minivllm.lab.progress import track
from minivllm.lab.proof import furthest, prove, refusal, show_errors
from minivllm.lab.tables import closing, console, heading, table
from minivllm.lab.timing import in_turns
from minivllm.models.attention import CausalAttention
from minivllm.models.decoder import Decoder
from minivllm.models.loader import load_model
from minivllm.models.tokenizer import load_tokenizer
from minivllm.platforms.triton_utils import tl, triton
from minivllm.simulate.memory_replay import Running, TablesOnDemand, replay
from minivllm.simulate.workloads import WORKLOADS, RequestLengths

# %% 1. The pain: one unbroken region for each request

LONGEST = 2048  # tokens of the longest request that is served


class Reservations:
    """The naive way: a request keeps one region of neighbouring slots, the first that is long enough, until it ends."""

    def __init__(self, slots: int, region: Callable[[RequestLengths], int]) -> None:
        self.slots, self.region = slots, region
        self.taken: list[tuple[int, int]] = []  # (first slot, slots) of each region, in order

    def admit(self, one: Running) -> bool:
        """Reserve the whole region now, in the first hole that is long enough."""
        size, hole = self.region(one.lengths), 0
        for first, length in [*self.taken, (self.slots, 0)]:
            if first - hole >= size:
                one.home = (hole, size)
                insort(self.taken, one.home)
                return True
            hole = first + length
        return False

    def grow(self, one: Running) -> bool:
        """One more token goes where it was reserved."""
        return True

    def release(self, one: Running) -> None:
        """Give the region back."""
        self.taken.remove(one.home)

    def held(self, one: Running) -> int:
        """All of the region, written or not."""
        return one.home[1]


# What is reserved, by name. Nobody knows an output's length in advance: all but the first are for comparison.
REGIONS: dict[str, Callable[[RequestLengths], int]] = {
    "max": lambda request: LONGEST,
    "pow2": lambda request: request.prompt_tokens + triton.next_power_of_2(request.output_tokens),
    "buddy": lambda request: triton.next_power_of_2(request.total),  # all regions of a buddy allocator are such
    "exact": lambda request: request.total,
}
TITLES = {
    "max": "greatest length",
    "pow2": "power of two",
    "buddy": "exact, buddy",
    "exact": "exact",
    "paged": "blocks",
}

# %% 2. The mechanism: a pool of equal blocks, and a table for each sequence


# region: pool
class KVCacheBlock:
    """`block_size` token slots in every layer. `ref_cnt` sequences hold the block; where none does, it is free."""

    def __init__(self, block_id: int) -> None:
        self.block_id, self.ref_cnt = block_id, 0


class BlockPool:
    """All blocks. Block 0 is the null block: it fills the unused places of tables, and nobody gets it."""

    def __init__(self, num_gpu_blocks: int) -> None:
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_gpu_blocks)]
        self.free = deque(self.blocks[1:])  # the left end is taken next

    def get_num_free_blocks(self) -> int:
        """Blocks that nobody holds."""
        return len(self.free)

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take blocks, all or none; each has one holder then."""
        if num_blocks > len(self.free):
            raise MinivllmError(f"cannot take {num_blocks} blocks: {len(self.free)} are free")
        blocks = [self.free.popleft() for _ in range(num_blocks)]
        for block in blocks:
            block.ref_cnt = 1
        return blocks

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """One holder more for each block."""
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """One holder less for each block. Those without one are taken next, in the order given."""
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
    """The slot of each position: which block the table names, and where in that block."""
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
        """Room for more tokens: their slots, and the (source, target) blocks to copy before they are written.

        If the last block is half full and another sequence reads it too, this one goes on in a block of its own.
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
        """A second sequence with the same past. Nothing is copied: every block has one holder more."""
        child = BlockTable(self.pool, self.block_size)
        child.blocks, child.num_tokens = list(self.blocks), self.num_tokens
        self.pool.touch(child.blocks)
        return child

    def free(self) -> None:
        """Let go of every block, the last one first."""
        self.pool.free_blocks(reversed(self.blocks))
        self.blocks, self.num_tokens = [], 0

    def blocks_needed(self, num_tokens: int) -> int:
        """Blocks that `append(num_tokens)` takes from the pool."""
        blocks = -(-(self.num_tokens + num_tokens) // self.block_size)
        return blocks - len(self.blocks) + self.must_copy(num_tokens)

    def must_copy(self, num_tokens: int) -> bool:
        """Would the next token be written into a block that another sequence reads?"""
        return num_tokens > 0 and self.num_tokens % self.block_size > 0 and self.blocks[-1].ref_cnt > 1

    def block_ids(self) -> list[int]:
        """The table as the device needs it."""
        return [block.block_id for block in self.blocks]


# endregion

# %% 3. The same requests on the same memory, by every allocator


def paged(slots: int, block_size: int) -> TablesOnDemand:
    """The other way: nothing is reserved, a block is taken when a token needs it."""
    pool = BlockPool(1 + slots // block_size)
    return TablesOnDemand(slots, block_size, lambda: BlockTable(pool, block_size))


def replayed(names: Iterable[str], steps: int, slots: int, seed: int) -> dict[str, list[RequestLengths]]:
    """Enough requests of each kind for so many steps, those of at most LONGEST tokens."""
    sampled = {name: WORKLOADS[name].sample(max(1000, steps * slots // 2000), seed) for name in names}
    return {name: [one for one in requests if one.total <= LONGEST] for name, requests in sampled.items()}


SHARES = {"tokens": "a token", "later": "will, later", "never": "never will", "outside": "outside"}  # of all slots


def measure_memory(slots: int, block_size: int, steps: int, seed: int) -> dict:
    """What the slots hold under every allocator, and how many requests run at once."""
    found: dict = {}
    for name, requests in track(replayed(WORKLOADS, steps, slots, seed).items(), "replaying requests"):
        memories: dict = {kind: Reservations(slots, region) for kind, region in REGIONS.items()}
        memories["paged"] = paged(slots, block_size)
        found[name] = {kind: replay(memory, requests, steps).figures() for kind, memory in memories.items()}
        for one in found[name].values():
            gains = {
                key: found[name]["paged"][key] / one[key] for key in ("tokens", "running", "served_per_1000_steps")
            }
            one["paged_over_this"] = gains
    kinds = found["sharegpt"].items()
    rows = [(TITLES[kind], *(f"{one[share]:.1%}" for share in SHARES), f"{one['running']:.1f}") for kind, one in kinds]
    title = f"What {slots:,} slots hold, requests like {WORKLOADS['sharegpt'].title}"
    table(title, ("reserved", *SHARES.values(), "run"), rows)
    rows = [(TITLES[kind], *(f"{kinds[kind]['tokens']:.1%}" for kinds in found.values())) for kind in TITLES]
    table("Slots that hold a token, requests like", ("reserved", *(WORKLOADS[name].title for name in found)), rows)
    return found


# %% 4. The kernels: attend through a block table, and copy blocks

BLOCK_T = 64  # tokens that a program of the decode kernel takes at once, as in lesson 01


# region: decode_kernel
@triton.jit
def paged_decode_kernel(
    out, q, keys, values, block_table, lengths, table_width, scale,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, PAGED: tl.constexpr,
):  # fmt: skip
    """One query of each sequence attends over its first `lengths[sequence]` tokens. Grid: (sequences, heads).

    q, out [sequences, heads, head_dim]; keys, values [blocks, block_size, kv_heads, head_dim]; block_table int32
    [sequences, table_width]; any float dtype, float32 inside. Lesson 01's kernel, but for how it finds a token's slot;
    without PAGED, sequence i owns block i, and no table is read.
    Must read 2 * length * kv_heads * head_dim elements and length / block_size entries of the table a sequence; does
    4 * length * heads * head_dim FLOPs.
    """
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(lengths + sequence)
    column = tl.arange(0, BLOCK_D)
    in_head = column < HEAD_DIM
    row = (sequence * GROUP * KV_HEADS + head) * HEAD_DIM + column
    query = tl.load(q + row, mask=in_head, other=0.0).to(tl.float32) * scale
    maximum, total, result = -float("inf"), 0.0, tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, length, BLOCK_T):
        token = start + tl.arange(0, BLOCK_T)
        block = sequence
        if PAGED:
            block = tl.load(block_table + sequence * table_width + token // BLOCK_SIZE, mask=token < length, other=0)
        slot = block.to(tl.int64) * BLOCK_SIZE + token % BLOCK_SIZE
        at = (slot[:, None] * KV_HEADS + head // GROUP) * HEAD_DIM + column[None, :]
        there = (token < length)[:, None] & in_head[None, :]
        k = tl.load(keys + at, mask=there, other=0.0).to(tl.float32)
        v = tl.load(values + at, mask=there, other=0.0).to(tl.float32)
        scores = tl.where(token < length, tl.sum(k * query[None, :], axis=1), -float("inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=0))
        weights, keep = tl.exp(scores - new_maximum), tl.exp(maximum - new_maximum)
        total = total * keep + tl.sum(weights, axis=0)
        result = result * keep + tl.sum(weights[:, None] * v, axis=0)
        maximum = new_maximum
    tl.store(out + row, result / tl.maximum(total, 1e-30), mask=in_head)  # no token, no weight: zero


# endregion


# region: copy_kernel
@triton.jit
def copy_blocks_kernel(cache, pairs, num_blocks, SIZE: tl.constexpr, CHUNK: tl.constexpr):
    """Copy blocks inside cache [planes, num_blocks, SIZE elements]. Grid: (pairs, planes, chunks of a block).

    pairs int32 [pairs, 2]: source, target. A plane is the keys or the values of one layer. All pairs run at once, so no
    target may be another pair's source. Reads and writes pairs * planes * SIZE elements; no arithmetic.
    """
    pair, plane = tl.program_id(0), tl.program_id(1).to(tl.int64)
    element = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    source, target = tl.load(pairs + 2 * pair), tl.load(pairs + 2 * pair + 1)
    block = tl.load(cache + (plane * num_blocks + source) * SIZE + element, mask=element < SIZE)
    tl.store(cache + (plane * num_blocks + target) * SIZE + element, block, mask=element < SIZE)


# endregion


def paged_decode(q: Tensor, keys: Tensor, values: Tensor, block_table: Tensor, lengths: Tensor, paged=True) -> Tensor:
    """The decode kernel: attention of q [sequences, heads, head_dim] over each sequence's tokens -> like q."""
    _, block_size, kv_heads, head_dim = keys.shape
    out, heads = torch.empty_like(q), q.shape[1]
    paged_decode_kernel[(len(q), heads)](
        out, q, keys, values, block_table, lengths, block_table.shape[1], 1 / math.sqrt(head_dim),
        GROUP=heads // kv_heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        BLOCK_D=triton.next_power_of_2(head_dim), BLOCK_T=BLOCK_T, PAGED=paged,
    )  # fmt: skip
    return out


def gather_decode(q: Tensor, keys: Tensor, values: Tensor, block_table: Tensor, lengths: Tensor) -> Tensor:
    """The same the long way: fetch each sequence's tokens out of its blocks, then attend."""
    results = []
    for query, row, length in zip(q, block_table, lengths.tolist(), strict=True):
        slots = slot_mapping(row.tolist(), range(length), keys.shape[1])
        k, v = (cache.flatten(0, 1)[slots].transpose(0, 1) for cache in (keys, values))
        results.append(F.scaled_dot_product_attention(query[:, None], k, v, enable_gqa=True)[:, 0])
    return torch.stack(results)


def copy_blocks(cache: Tensor, copies: list[tuple[int, int]]) -> None:
    """Copy (source, target) blocks in every plane of cache [planes, blocks, ...], in one launch."""
    if copies:
        pairs = torch.tensor(copies, dtype=torch.int32, device=cache.device)
        size, chunk = cache[0, 0].numel(), 2048  # 16 bytes a thread, on AMD too
        grid = (len(pairs), len(cache), triton.cdiv(size, chunk))
        copy_blocks_kernel[grid](cache, pairs, cache.shape[1], SIZE=size, CHUNK=chunk)


def verify_kernels(device: torch.device) -> dict:
    """Attention against float64 on awkward lengths and block sizes; copies, bit for bit."""
    errors = {}
    for heads, kv_heads, head_dim, block_size in track([(4, 4, 64, 16), (6, 2, 80, 5), (8, 1, 128, 1)], "verifying"):
        lengths = torch.tensor([1, block_size, block_size + 1, 2 * BLOCK_T + 3], dtype=torch.int32)
        width = -(-int(lengths.max()) // block_size)
        block_table = (torch.randperm(4 * width, dtype=torch.int32) + 1).view(4, width)
        keys, values = torch.randn(2, 4 * width + 1, block_size, kv_heads, head_dim).half()
        q = torch.randn(4, heads, head_dim).half()
        expected = gather_decode(q.double(), keys.double(), values.double(), block_table, lengths)
        found = paged_decode(*(tensor.to(device) for tensor in (q, keys, values, block_table, lengths)))
        shape = f"{heads} query heads, {kv_heads} KV heads of {head_dim}, blocks of {block_size}"
        errors[shape] = furthest(found, expected)
    cache = torch.randn(6, 9, 4, 2, 40, device=device)
    expected = cache.clone()
    expected[:, [2, 7, 8]] = cache[:, [1, 1, 5]]
    copy_blocks(cache, [(1, 2), (1, 7), (5, 8)])
    assert torch.equal(cache, expected), "blocks were not copied as told"
    return {"largest_error": show_errors("Both kernels", errors, 2e-3, caption="copied blocks: bit for bit")}


# %% 5. Sharing: parallel samples and beam search


class PagedCache:
    """Keys and values of all sequences in one tensor, and the pool that says whose is what."""

    def __init__(self, model: Decoder, num_blocks: int, block_size: int) -> None:
        shape = (num_blocks, block_size, model.config.num_key_value_heads, model.config.head_dim)
        self.data = model.lm_head.weight.new_zeros(2 * model.config.num_hidden_layers, *shape)
        self.written = torch.zeros(shape[:2], dtype=torch.int64, device=self.data.device)  # token ids, to look at
        self.model, self.block_size, self.pool = model, block_size, BlockPool(num_blocks)

    @torch.inference_mode()
    def forward(self, tables: list[BlockTable], new: list[list[int]]) -> Tensor:
        """One sequence's prompt, or the next token of each of several -> logits of their last tokens [n, vocab]."""
        starts = [one.num_tokens for one in tables]
        room = [one.append(len(tokens)) for one, tokens in zip(tables, new, strict=True)]
        self.copy([pair for _, copies in room for pair in copies])  # before anything is written
        device, counts = self.data.device, [len(tokens) for tokens in new]
        ids = torch.tensor([token for tokens in new for token in tokens], device=device)
        slots = torch.tensor([slot for found, _ in room for slot in found], device=device)
        positions = torch.cat([torch.arange(s, s + n, device=device) for s, n in zip(starts, counts, strict=True)])
        rows = [torch.tensor(one.block_ids(), dtype=torch.int32, device=device) for one in tables]
        block_table = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)  # with 0, the null block
        lengths = torch.tensor([one.num_tokens for one in tables], dtype=torch.int32, device=device)
        self.written.view(-1)[slots] = ids
        decode, prompt = (paged_decode if device.type == "cuda" else gather_decode), CausalAttention(self.model.config)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self.data[2 * layer], self.data[2 * layer + 1]
            keys.flatten(0, 1)[slots], values.flatten(0, 1)[slots] = k, v
            if len(q) > len(tables):
                return prompt(layer, q, k, v)
            return decode(q.contiguous(), keys, values, block_table, lengths)

        hidden = self.model(ids, positions, attend)
        last = torch.tensor(counts, device=device).cumsum(0) - 1
        return self.model.compute_logits(hidden[last]).float()

    def copy(self, copies: list[tuple[int, int]]) -> None:
        """Copy (source, target) blocks, in all layers."""
        sources, targets = [pair[0] for pair in copies], [pair[1] for pair in copies]
        self.written[targets] = self.written[sources]
        if self.data.is_cuda:
            copy_blocks(self.data, copies)
        elif copies:  # what the kernel does; interpreted, it takes a thousand times longer
            self.data[:, targets] = self.data[:, sources]

    def table(self) -> BlockTable:
        """An empty sequence."""
        return BlockTable(self.pool, self.block_size)

    def tokens_of(self, one: BlockTable) -> list[int]:
        """What lies where this sequence's table points."""
        return self.written.view(-1)[slot_mapping(one.block_ids(), range(one.num_tokens), self.block_size)].tolist()


def blocks_held(pool: BlockPool) -> int:
    """All blocks but the null block and the free ones."""
    return len(pool.blocks) - 1 - pool.get_num_free_blocks()


def saved_by_samples(requests: list[RequestLengths], samples: int, block_size: int) -> float:
    """The share of blocks that is saved when each request is answered `samples` times on one copy of its prompt."""
    shared = alone = 0
    for lengths in requests:
        pool = BlockPool(2 + samples * (1 + lengths.total // block_size))
        tables = [BlockTable(pool, block_size)]
        tables[0].append(lengths.prompt_tokens)
        tables += [tables[0].fork() for _ in range(samples - 1)]
        for _ in range(lengths.output_tokens):
            for one in tables:
                one.append(1)
            shared += blocks_held(pool)
            alone += sum(len(one.blocks) for one in tables)
    return 1 - shared / alone


@dataclass
class Beam:
    """One candidate: the tokens after the prompt, their log-probability, and where they are."""

    tokens: list[int]
    score: float
    table: BlockTable


# region: beam_search
def beam_search(
    cache: PagedCache, prompt: list[int], width: int, steps: int, fork: Callable[[BlockTable], BlockTable]
) -> tuple[list[Beam], list[int]]:
    """The `width` likeliest continuations of `steps` tokens, and the blocks held after each step.

    `fork` makes a child's table from its parent's.
    """
    beams, held = [Beam([], 0.0, cache.table())], []
    new = [prompt]
    for _ in range(steps):
        logits = cache.forward([beam.table for beam in beams], new)
        held.append(blocks_held(cache.pool))
        scores = logits.log_softmax(-1) + torch.tensor([[beam.score] for beam in beams], device=logits.device)
        best, places = scores.flatten().topk(width)
        parents, tokens = places // logits.shape[-1], places % logits.shape[-1]
        children = [
            Beam([*beams[parent].tokens, token], score, fork(beams[parent].table))
            for parent, token, score in zip(parents.tolist(), tokens.tolist(), best.tolist(), strict=True)
        ]
        for beam in beams:
            beam.table.free()
        beams, new = children, [beam.tokens[-1:] for beam in children]
    return beams, held


# endregion


def full_copy(cache: PagedCache, parent: BlockTable) -> BlockTable:
    """A child without sharing: blocks of its own for the whole past."""
    child = cache.table()
    child.append(parent.num_tokens)
    cache.copy(list(zip(parent.block_ids(), child.block_ids(), strict=True)))
    return child


PROMPT = (
    'class Stack:\n    """Keeps things in the order in which they came; the last one leaves first."""\n\n'
    "    def __init__(self, items=None):\n        self.items = list(items or [])\n\n"
    "    def push(self, item):\n        self."
)


def measure_sharing(cache_of, prompt: list[int], widths: list[int], steps: int, block_size: int, seed: int) -> dict:
    """Blocks that sharing saves: for parallel samples of many requests, and in a beam search that really runs."""
    found: dict = {"samples": {}, "beams": {}}
    for name in ("alpaca", "sharegpt"):
        requests = WORKLOADS[name].sample(40, seed)
        found["samples"][name] = {str(n): saved_by_samples(requests, n, block_size) for n in (2, 4, 6)}
    rows = [(WORKLOADS[n].title, *(f"{s:.1%}" for s in saved.values())) for n, saved in found["samples"].items()]
    table("Blocks saved when samples share their prompt", ("requests like", "2 samples", "4", "6"), rows)
    rows = []
    for width in track(widths, "beam search"):
        together, shared = beam_search(cache_of(), prompt, width, steps, BlockTable.fork)
        cache = cache_of()
        apart, alone = beam_search(cache, prompt, width, steps, lambda parent, cache=cache: full_copy(cache, parent))
        same = [(beam.tokens, beam.score) for beam in together] == [(beam.tokens, beam.score) for beam in apart]
        assert same, "sharing changed the beams"
        saved = 1 - sum(shared) / sum(alone)
        found["beams"][str(width)] = {"saved": saved, "most_alone": max(alone), "most_shared": max(shared)}
        found["best"] = together[0].tokens
        rows.append((width, max(alone), max(shared), f"{saved:.1%}"))
    title = f"Beam search, {len(prompt)} + {steps} tokens: the same beams both ways"
    table(title, ("beams", "most blocks, each its own", "shared", "saved on average"), rows)
    return found


# %% 6. The measurement: what a block size costs, in empty slots and in time


def in_blocks(data: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """[2, sequences, length, kv_heads, head_dim] laid into blocks in random order: the caches, and the block table."""
    blocks = data.reshape(2, -1, block_size, *data.shape[3:])
    order = torch.randperm(blocks.shape[1], device=data.device)
    caches = torch.empty_like(blocks)
    caches[:, order] = blocks
    return caches, order.view(data.shape[1], -1).int()


def measure_price(device: torch.device, sizes: tuple[int, ...], rounds: int) -> dict:
    """Decode attention through tables, over the same data with one region for each sequence.

    A GPU runs the kernel above, with the table and without. A CPU runs the engine's attention (lesson 03), where
    one block as long as the sequence stands for the contiguous cache: the same code, another table.
    """
    cuda = device.type == "cuda"
    sequences, length, heads, kv_heads, head_dim = (64, 4096, 32, 8, 128) if cuda else (16, 1024, 8, 2, 64)
    data = torch.randn(2, sequences, length, kv_heads, head_dim, device=device)
    q = torch.randn(sequences, heads, head_dim, device=device)
    data, q = (data.bfloat16(), q.bfloat16()) if cuda else (data, q)
    lengths = torch.full((sequences,), length, dtype=torch.int32, device=device)
    starts = torch.arange(sequences + 1, dtype=torch.int32, device=device)

    def attending(caches: Tensor, block_table: Tensor, paged: bool = True) -> Callable[[], Tensor]:
        if cuda:
            return lambda: paged_decode(q, *caches, block_table, lengths, paged)
        return lambda: unified_attention(q, *caches, starts, lengths, block_table, head_dim**-0.5)

    one_each = starts[:-1, None].contiguous()
    runs = {name: attending(data.clone(), one_each, paged=False) for name in ("contiguous", "contiguous again")}
    runs |= {str(size): attending(*in_blocks(data, size)) for size in sizes}
    expected = runs["contiguous"]()
    for size, attend in runs.items():
        assert furthest(attend(), expected) < 1e-2, f"blocks of {size} give another result"
    # The best round counts: other work can only slow one down.
    best = {name: min(seconds) for name, seconds in in_turns(runs, rounds, device).items()}
    ratio = {name: seconds / best["contiguous"] for name, seconds in best.items()}
    again, _ = ratio.pop("contiguous again"), ratio.pop("contiguous")
    shape = f"{sequences} sequences of {length:,} tokens, {heads} heads on {kv_heads}"
    return {"shape": shape, "contiguous_ms": best["contiguous"] * 1e3, "again": again, "ratio": ratio}


def measure_block_sizes(device: torch.device, slots: int, sizes: tuple[int, ...], steps: int, seed: int) -> dict:
    """Both costs of a block size: slots that stay empty in held blocks, and the time of attention."""
    price, empty = measure_price(device, sizes, 40), {}
    kinds = replayed(("alpaca", "sharegpt", "azure-conversation"), steps, slots, seed)
    for name, requests in track(kinds.items(), "replaying block sizes", total=len(kinds)):
        empty[name] = {str(size): replay(paged(slots, size), requests, steps).empty for size in sizes}
    rows = [
        (size, *(f"{shares[size]:.1%}" for shares in empty.values()), f"{LONGEST // int(size):,}", f"{ratio:.2f} ×")
        for size, ratio in price["ratio"].items()
    ]
    columns = ("block", *(WORKLOADS[name].title for name in empty), "table entries", "time")
    caption = (
        f"time: {price['shape']}, blocks scattered, against a contiguous cache ({price['contiguous_ms']:.2f} ms); "
        f"against a second contiguous cache, which says how far to trust it: {price['again']:.2f} ×"
    )
    table("Held slots that are empty, the table, and the time of attention", columns, rows, caption)
    return {"price": price, "empty": empty}


# %% 7. Break it


def double_free(pool: BlockPool) -> list[int]:
    """Free a table's blocks twice, then serve two more sequences: the blocks that both of them got."""
    first, one, other = (BlockTable(pool, 16) for _ in range(3))
    first.append(40)
    kept = list(first.blocks)
    first.free()
    pool.free_blocks(kept)
    one.append(40)
    other.append(40)
    return sorted(set(one.block_ids()) & set(other.block_ids()))


STRANGER = (
    'class Account:\n    """The account of one customer; nobody else may see it."""\n\n'
    "    def __init__(self, owner, password):\n        self.owner = owner\n        self.password = password\n\n"
    "    def check(self, password):\n        if self.password"
)


def leak(cache: PagedCache, mine: list[int], stranger: list[int], new_tokens: int) -> tuple[list[int], list[int]]:
    """Fork a request, end its first half, let a stranger in, go on with the second half.

    Returns the tokens that lie where its prompt should lie, and the tokens that it writes.
    """
    first = cache.table()
    logits = cache.forward([first], [mine])
    second, written = first.fork(), []
    first.free()
    cache.forward([cache.table()], [stranger])
    for _ in range(new_tokens):
        written.append(int(logits[0].argmax()))
        logits = cache.forward([second], [written[-1:]])
    return cache.tokens_of(second)[: len(mine)], written


def break_it(cache_of: Callable[[], PagedCache], tokenizer, mine: list[int], stranger: list[int]) -> dict:
    """A double free, a pool that runs dry and a forgotten reference: with the checks, and without them."""
    trusting, dry, forgetful = BlockPool(9), BlockTable(BlockPool(5), 16), cache_of()
    trusting.free_blocks = lambda blocks: trusting.free.extendleft(list(blocks)[::-1])  # takes back what it is given
    dry.append(64)
    forgetful.pool.touch = lambda blocks: None  # does not count a fork
    found: dict = {"double_free": double_free(trusting)}
    console.print(f"freed twice without a check, the blocks {found['double_free']} went to two sequences at once")
    console.print(f"freed twice: {refusal(lambda: double_free(BlockPool(9)))}")
    console.print(f"the pool is dry: {refusal(lambda: dry.append(1))}")
    for name, cache in (("counted", cache_of()), ("forgotten", forgetful)):
        reads, writes = leak(cache, mine, stranger, 16)
        found[name] = {"reads": tokenizer.decode(reads), "writes": tokenizer.decode(writes)}
    texts = {"finds": "reads", "goes on": "writes"}
    rows = [
        (line, *(escape(found[name][text].rstrip()) for name in ("counted", "forgotten")))
        for line, text in texts.items()
    ]
    title = "A request is forked, its first half ends, a stranger comes in"
    table(title, ("the second half", "its reference counted", "forgotten"), rows, words=True)
    return found


# %% The talk, in order


def draw(found: dict, path: str) -> None:
    """What the slots hold under each allocator, and what a block size costs in empty slots and in time."""
    kinds, price, empty = found["memory"]["sharegpt"], found["blocks"]["price"], found["blocks"]["empty"]
    start = [0.0] * len(kinds)
    with panels(path, 3, height=4) as (left, middle, right):
        colours = (palette.BLUE, palette.SKY, palette.ORANGE, palette.PALE)
        for (share, label), colour in zip(SHARES.items(), colours, strict=True):
            widths = [one[share] for one in kinds.values()]
            left.barh([TITLES[kind] for kind in kinds], widths, left=start, color=colour, label=label)
            start = [before + width for before, width in zip(start, widths, strict=True)]
        left.set(title="What the slots hold", xlabel="share of the slots, requests like ShareGPT", xlim=(0, 1))
        left.invert_yaxis()
        left.legend(ncols=2, loc="upper center", bbox_to_anchor=(0.4, -0.2))
        curves(middle, {WORKLOADS[name].title: shares for name, shares in empty.items()}, factor=100, octaves=True)
        middle.set(title="Empty slots in held blocks", xlabel="block size", ylabel="%", ylim=0)
        curves(right, {"with a table": price["ratio"]}, octaves=True)
        right.axhline(1, color=palette.GREY, linestyle="--", label="contiguous")
        right.axhline(price["again"], color=palette.GREY, linestyle=":", label="contiguous, once more")
        top = 1.3 * max(price["ratio"].values())
        right.set(title="Time of decode attention", xlabel="block size", ylabel="against contiguous", ylim=(0, top))
        right.legend(fontsize=8)


def main(arguments: argparse.Namespace) -> None:
    """Run the lesson from top to bottom."""
    device, slots, seed = begin("Lesson 02. PagedAttention", arguments), arguments.slots, arguments.seed
    model, config = load_model(arguments.model, device, "auto" if device.type == "cuda" else "float32")
    tokenizer = load_tokenizer(arguments.model)
    prompt, stranger = (tokenizer.encode(text).ids for text in (arguments.prompt, arguments.stranger))
    beam_steps, steps = (16, 600) if arguments.quick else (48, 8000) if arguments.full else (48, 2000)
    room = config.max_position_embeddings - beam_steps
    if not (0 < len(prompt) <= room and 0 < len(stranger) <= room):
        raise MinivllmError(f"both prompts must be 1 to {room} tokens, not {len(prompt)} and {len(stranger)}")
    if slots < LONGEST or arguments.block_size > LONGEST:
        raise MinivllmError(f"requests of {LONGEST} tokens are replayed: --slots must be more, --block-size no more")
    sizes = (1, 16, 512) if arguments.quick else (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    widths = [arguments.beam_width] if arguments.quick else sorted({2, 4, 6, arguments.beam_width})

    def cache_of() -> PagedCache:
        blocks = 1 + (max(len(prompt), len(stranger)) + beam_steps) // arguments.block_size
        return PagedCache(model, 2 + 2 * widths[-1] * blocks, arguments.block_size)

    found: dict = {}
    heading("1–3. The same requests on the same memory")
    found["memory"] = measure_memory(slots, arguments.block_size, steps, seed)
    heading("4. The kernels, verified")
    found["kernels"] = prove(verify_kernels, device)
    heading("5. Sharing")
    found["sharing"] = measure_sharing(cache_of, prompt, widths, beam_steps, arguments.block_size, seed)
    console.print(f"the likeliest begins: {tokenizer.decode(found['sharing']['best'])[:64]!r}", markup=False)
    heading("6. What a block size costs")
    found["blocks"] = measure_block_sizes(device, slots, sizes, steps // 3, seed)
    heading("7. Break it")
    found["broken"] = break_it(cache_of, tokenizer, prompt, stranger)
    reserved, blocks = (found["memory"]["sharegpt"][kind] for kind in ("max", "paged"))
    ratio, leaked = found["blocks"]["price"]["ratio"], found["broken"]["forgotten"]["reads"]
    closing(
        f"Requests like ShareGPT's: {reserved['tokens']:.0%} of the slots hold a token where each keeps {LONGEST:,}, "
        f"{blocks['tokens']:.0%} in blocks; {blocks['running'] / reserved['running']:.1f} times as many run at once.",
        f"Attention over blocks of 16 took {ratio['16']:.2f} times as long as over a contiguous cache, blocks of 1 "
        f"{ratio['1']:.2f} times.",
        f"One forgotten reference, and a request reads a stranger's text: {leaked[:48]!r}.",
    )
    keep(__file__, found, arguments, draw, block_size=arguments.block_size, slots=slots)


def parser() -> argparse.ArgumentParser:
    """The lesson's own knobs, beside those that every lesson has."""
    flags = lesson_parser(__doc__, EMBEDDED_MODEL)
    flags.add_argument("--prompt", default=PROMPT, help="text that the beam search continues")
    flags.add_argument("--stranger", default=STRANGER, help="text of the other request where a reference is forgotten")
    flags.add_argument("--block-size", type=positive_int, default=16, help="token slots in a block (default: 16)")
    flags.add_argument("--slots", type=positive_int, default=15_696, help="token slots of the replay (default: 15696)")
    flags.add_argument("--beam-width", type=positive_int, default=4, help="candidates of the beam search (default: 4)")
    return flags


if __name__ == "__main__":
    run(main, parser())
