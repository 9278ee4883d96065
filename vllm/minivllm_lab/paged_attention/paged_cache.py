"""A real model's KV cache in lesson 02's blocks, and the time of attention over blocks of every
size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.kernels.unified_attention import unified_attention
from minivllm.models.decoder import Decoder
from minivllm_lab.block_tables import Pool
from minivllm_lab.paged_model import PagedModel
from minivllm_lab.proof import furthest
from minivllm_lab.timing import in_turns


class PagedCache(PagedModel):
    """A model whose sequences have block tables that can fork.

    `new_table` makes an empty table from a pool and a block size. `written` [blocks, block_size]
    records which token each slot holds, for inspection.
    """

    def __init__(self, model: Decoder, pool: Pool, new_table: Callable[[Any, int], Any], block_size: int) -> None:
        super().__init__(model, len(pool.blocks), block_size)
        self.written = torch.zeros(self.num_blocks, block_size, dtype=torch.int64)
        self.pool, self.table = pool, partial(new_table, pool, block_size)

    def step(self, tables: Sequence[Any], new: Sequence[list[int]]) -> Tensor:
        """Append each sequence's new tokens and compute them -> logits of each sequence's last
        token [sequences, vocab].
        """
        starts = [table.num_tokens for table in tables]
        room = [table.append(len(tokens)) for table, tokens in zip(tables, new, strict=True)]
        self.copy([pair for _, copies in room for pair in copies])  # before anything is written
        logits = []
        for table, tokens, start, (slots, _) in zip(tables, new, starts, room, strict=True):
            self.written.view(-1)[slots] = torch.tensor(tokens)
            logits.append(self.forward(tokens, start, table.block_ids()))
        return torch.stack(logits)

    def copy(self, copies: Iterable[tuple[int, int]]) -> None:
        """Copy (source, target) pairs of blocks in all layers, all pairs at once."""
        pairs = list(copies)
        sources, targets = [source for source, _ in pairs], [target for _, target in pairs]
        self.written[targets] = self.written[sources]
        self.cache[:, targets] = self.cache[:, sources]

    def tokens_of(self, table: Any) -> list[int]:
        """Return the tokens in this sequence's slots."""
        return self.written[table.block_ids()].flatten()[: table.num_tokens].tolist()


def gather_decode(q: Tensor, keys: Tensor, values: Tensor, block_table: Tensor, lengths: Tensor) -> Tensor:
    """Attend through block tables: gather each sequence's tokens from its blocks, then use
    PyTorch's attention.

    q [sequences, heads, head_dim]; keys, values [blocks, block_size, kv_heads, head_dim];
    block_table [sequences, width]; lengths [sequences], each at least 1 -> like q.
    """
    results = []
    for query, row, length in zip(q, block_table.long(), lengths.tolist(), strict=True):
        k, v = (cache[row].flatten(0, 1)[:length].transpose(0, 1) for cache in (keys, values))
        results.append(F.scaled_dot_product_attention(query[:, None], k, v, enable_gqa=True)[:, 0])
    return torch.stack(results)


def blocks_held(pool: Pool) -> int:
    """Return the number of blocks that tables hold: all but the null block and the free ones."""
    return len(pool.blocks) - 1 - pool.get_num_free_blocks()


def in_blocks(data: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Scatter [2, sequences, length, kv_heads, head_dim] over blocks in random order.

    Returns the caches [2, blocks, block_size, kv_heads, head_dim], and the table int32 [sequences,
    length / block_size].
    """
    blocks = data.reshape(2, -1, block_size, *data.shape[3:])
    order = torch.randperm(blocks.shape[1], device=data.device)
    caches = torch.empty_like(blocks)
    caches[:, order] = blocks
    return caches, order.view(data.shape[1], -1).int()


def random_case(heads: int, kv_heads: int, head_dim: int, block_size: int, lengths: Sequence[int]) -> list[Tensor]:
    """Make random float16 arguments of `gather_decode`, with blocks scattered over the caches."""
    width = -(-max(lengths) // block_size)
    block_table = (torch.randperm(len(lengths) * width, dtype=torch.int32) + 1).view(len(lengths), width)
    keys, values = torch.randn(2, len(lengths) * width + 1, block_size, kv_heads, head_dim).half()
    q = torch.randn(len(lengths), heads, head_dim).half()
    return [q, keys, values, block_table, torch.tensor(lengths, dtype=torch.int32)]


def time_by_block_size(device: torch.device, sizes: Sequence[int], decode: Callable[..., Tensor], rounds: int) -> dict:
    """Time decode attention by block size, in alternating runs, against a contiguous cache: one
    block per sequence.

    On a GPU it times `decode`, in bfloat16; on a CPU it times the engine's attention, which always
    reads the table. The best round counts: other work can only slow a round down.

    Returns:
        `shape` in words, `contiguous_ms`, and relative to it `again`, for a second contiguous cache, and
        `ratio` by block size.

    Raises:
        AssertionError: a block size gives a different result.
    """
    cuda = device.type == "cuda"
    attend = decode if cuda else _engine_decode
    sequences, length, heads, kv_heads, head_dim = (64, 4096, 32, 8, 128) if cuda else (16, 1024, 8, 2, 64)
    dtype = torch.bfloat16 if cuda else torch.float32
    data = torch.randn(2, sequences, length, kv_heads, head_dim, device=device).to(dtype)
    q = torch.randn(sequences, heads, head_dim, device=device).to(dtype)
    lengths = torch.full((sequences,), length, dtype=torch.int32, device=device)
    one_each = torch.arange(sequences, dtype=torch.int32, device=device)[:, None]
    names = ("contiguous", "again")
    runs = {name: partial(attend, q, *data.clone(), one_each, lengths, paged=False) for name in names}
    for size in sizes:
        caches, block_table = in_blocks(data, size)
        runs[str(size)] = partial(attend, q, *caches, block_table, lengths)
    expected = runs["contiguous"]()
    for size, run in runs.items():
        assert furthest(run(), expected) < 1e-2, f"blocks of {size} give a different result"
    seconds = {name: min(times) for name, times in in_turns(runs, rounds, device).items()}
    ratio = {name: best / seconds["contiguous"] for name, best in seconds.items() if name != "contiguous"}
    shape = f"{sequences} sequences of {length:,} tokens, {heads} heads on {kv_heads}"
    return {"shape": shape, "contiguous_ms": seconds["contiguous"] * 1e3, "again": ratio.pop("again"), "ratio": ratio}


def _engine_decode(q: Tensor, *caches_and_table: Tensor, paged: bool = True) -> Tensor:
    keys, values, block_table, lengths = caches_and_table
    starts = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
    return unified_attention(q, keys, values, starts, lengths, block_table, q.shape[-1] ** -0.5)
