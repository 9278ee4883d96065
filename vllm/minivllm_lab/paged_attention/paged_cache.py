"""A real model's KV cache in the blocks of lesson 02, which provides the pool, the tables and the GPU kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.kernels.unified_attention import unified_attention
from minivllm.models.attention import CausalAttention
from minivllm.models.decoder import Decoder
from minivllm_lab.proof import furthest
from minivllm_lab.timing import in_turns


class Pool(Protocol):
    """All blocks, including free ones. Block 0 is the null block."""

    @property
    def blocks(self) -> Sequence[Any]:
        """Every block, the null block first."""
        ...

    def get_num_free_blocks(self) -> int:
        """Blocks that no table holds."""
        ...


class BlockTable(Protocol):
    """The blocks of one sequence: what lesson 02 builds."""

    num_tokens: int
    blocks: list[Any]

    @property
    def pool(self) -> Pool:
        """The pool that its blocks come from."""
        ...

    def append(self, num_tokens: int) -> tuple[list[int], list[tuple[int, int]]]:
        """Allocate slots for more tokens: the slots, and the (source, target) blocks to copy before writing them."""
        ...

    def fork(self) -> BlockTable:
        """A second sequence with the same past, sharing its blocks."""
        ...

    def free(self) -> None:
        """Release every block."""
        ...

    def block_ids(self) -> list[int]:
        """The ids of its blocks, in the order of the tokens."""
        ...


Decode = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""Attention of one query per sequence: (q, keys, values, block_table, lengths) as in `gather_decode`."""


class PagedCache:
    """Keys and values of all sequences in one tensor; the block tables map sequences to slots.

    `new_table` makes an empty table from a pool and a block size.
    `data` is [2 * layers, blocks, block_size, kv_heads, head_dim]. `written` [blocks, block_size] remembers which token
    was written into each slot, so that one can look. On a GPU `decode` attends; on a CPU torch
    does, since an interpreted kernel would take a thousand times longer.
    """

    def __init__(
        self,
        model: Decoder,
        pool: Pool,
        new_table: Callable[[Any, int], BlockTable],
        block_size: int,
        decode: Decode,
    ) -> None:
        shape = (len(pool.blocks), block_size, model.config.num_key_value_heads, model.config.head_dim)
        self.data = model.lm_head.weight.new_zeros(2 * model.config.num_hidden_layers, *shape)
        self.written = torch.zeros(shape[:2], dtype=torch.int64, device=self.data.device)
        self.model, self.pool, self.block_size, self._new_table = model, pool, block_size, new_table
        self._decode = decode if self.data.is_cuda else gather_decode

    @torch.inference_mode()
    def forward(self, tables: Sequence[BlockTable], new: Sequence[Sequence[int]]) -> Tensor:
        """Run one sequence's prompt, or one token of each sequence -> logits of the last tokens [n, vocab]."""
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
        prompt = CausalAttention(self.model.config)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self.data[2 * layer], self.data[2 * layer + 1]
            keys.flatten(0, 1)[slots], values.flatten(0, 1)[slots] = k, v
            if len(q) > len(tables):
                return prompt(layer, q, k, v)
            return self._decode(q.contiguous(), keys, values, block_table, lengths)

        hidden = self.model(ids, positions, attend)
        last = torch.tensor(counts, device=device).cumsum(0) - 1
        return self.model.compute_logits(hidden[last]).float()

    def copy(self, copies: Iterable[tuple[int, int]]) -> None:
        """Copy (source, target) blocks, in all layers."""
        copies = list(copies)
        sources, targets = [pair[0] for pair in copies], [pair[1] for pair in copies]
        self.written[targets] = self.written[sources]
        self.data[:, targets] = self.data[:, sources]

    def table(self) -> BlockTable:
        """An empty sequence."""
        return self._new_table(self.pool, self.block_size)

    def tokens_of(self, table: BlockTable) -> list[int]:
        """The tokens stored in this sequence's slots."""
        return self.written[table.block_ids()].flatten()[: table.num_tokens].tolist()


def gather_decode(q: Tensor, keys: Tensor, values: Tensor, block_table: Tensor, lengths: Tensor) -> Tensor:
    """Reference attention through block tables: gather each sequence's tokens from its blocks, then attend.

    q [sequences, heads, head_dim]; keys, values [blocks, block_size, kv_heads, head_dim]; block_table [sequences,
    width]; lengths [sequences], each at least 1 -> like q.
    """
    results = []
    for query, row, length in zip(q, block_table.long(), lengths.tolist(), strict=True):
        k, v = (cache[row].flatten(0, 1)[:length].transpose(0, 1) for cache in (keys, values))
        results.append(F.scaled_dot_product_attention(query[:, None], k, v, enable_gqa=True)[:, 0])
    return torch.stack(results)


def blocks_held(pool: Pool) -> int:
    """Number of blocks held by tables: all but the null block and the free ones."""
    return len(pool.blocks) - 1 - pool.get_num_free_blocks()


def in_blocks(data: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Stores [2, sequences, length, kv_heads, head_dim] in randomly ordered blocks: the caches, and the block table.

    The caches are [2, blocks, block_size, kv_heads, head_dim], the table int32 [sequences, length / block_size].
    """
    blocks = data.reshape(2, -1, block_size, *data.shape[3:])
    order = torch.randperm(blocks.shape[1], device=data.device)
    caches = torch.empty_like(blocks)
    caches[:, order] = blocks
    return caches, order.view(data.shape[1], -1).int()


def random_case(heads: int, kv_heads: int, head_dim: int, block_size: int, lengths: Sequence[int]) -> list[Tensor]:
    """Arguments of `gather_decode` in float16: random numbers, in blocks that are scattered over the caches."""
    width = -(-max(lengths) // block_size)
    block_table = (torch.randperm(len(lengths) * width, dtype=torch.int32) + 1).view(len(lengths), width)
    keys, values = torch.randn(2, len(lengths) * width + 1, block_size, kv_heads, head_dim).half()
    q = torch.randn(len(lengths), heads, head_dim).half()
    return [q, keys, values, block_table, torch.tensor(lengths, dtype=torch.int32)]


def decode_case(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """A decode step large enough to time, in bfloat16 on a GPU and float32 on a CPU.

    Returns q [sequences, heads, head_dim], the keys and values [2, sequences, length, kv_heads, head_dim], and each
    sequence's length, int32 [sequences].
    """
    cuda = device.type == "cuda"
    sequences, length, heads, kv_heads, head_dim = (64, 4096, 32, 8, 128) if cuda else (16, 1024, 8, 2, 64)
    data = torch.randn(2, sequences, length, kv_heads, head_dim, device=device)
    q = torch.randn(sequences, heads, head_dim, device=device)
    data, q = (data.bfloat16(), q.bfloat16()) if cuda else (data, q)
    return q, data, torch.full((sequences,), length, dtype=torch.int32, device=device)


def engine_decode(
    q: Tensor, keys: Tensor, values: Tensor, block_table: Tensor, lengths: Tensor, paged: bool = True
) -> Tensor:
    """The engine's attention, called like lesson 02's kernel. It always reads the table; `paged` is ignored."""
    starts = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
    return unified_attention(q, keys, values, starts, lengths, block_table, q.shape[-1] ** -0.5)


def time_by_block_size(
    device: torch.device, sizes: Sequence[int], decode: Callable[..., Tensor]
) -> tuple[dict[str, list[float]], Tensor, Tensor]:
    """Seconds of each of 40 rounds of decode attention, by block size, in turns; and the queries and data attended to.

    "contiguous" and "contiguous again" are one block a sequence, with `paged=False`.

    Raises:
        AssertionError: a block size gives another result.
    """
    q, data, lengths = decode_case(device)
    one_each = torch.arange(len(q), dtype=torch.int32, device=device)[:, None]
    names = ("contiguous", "contiguous again")
    runs = {name: partial(decode, q, *data.clone(), one_each, lengths, paged=False) for name in names}
    for size in sizes:
        caches, block_table = in_blocks(data, size)
        runs[str(size)] = partial(decode, q, *caches, block_table, lengths)
    expected = runs["contiguous"]()
    for size, attend in runs.items():
        assert furthest(attend(), expected) < 1e-2, f"blocks of {size} give another result"
    return in_turns(runs, 40, device), q, data
