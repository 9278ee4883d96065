"""Lesson 10's proof of its kernel on awkward steps, and the count of what tiles of each size compute."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from minivllm_lab.lesson import LessonCode
from minivllm_lab.progress import track
from minivllm_lab.proof import furthest, show_errors
from minivllm_lab.tables import record_table

BLOCK_SIZE = 16

AWKWARD = {
    "decodes and chunks": ([1, 1, 1, 17, 40, 5], [33, 1, 70, 17, 90, 37]),
    "decodes only": ([1, 1, 1], [5, 64, 31]),
    "chunks only": ([2, 33], [2, 34]),
    "one token in a chunk's place": ([1, 1, 9], [8, 40, 9]),
}


def mixed_case(
    queries: Sequence[int], seq_lens: Sequence[int], heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return a step's tensors, keyed by the lesson's argument names, with scattered blocks."""
    tables = [-(-length // BLOCK_SIZE) for length in seq_lens]
    ids = iter((torch.randperm(sum(tables)) + 1).tolist())
    block_table = torch.zeros(len(tables), max(tables), dtype=torch.int32)
    for row, count in enumerate(tables):
        block_table[row, :count] = torch.tensor([next(ids) for _ in range(count)], dtype=torch.int32)
    q = torch.randn(sum(queries), heads, head_dim).to(dtype)
    return {
        "out": torch.full_like(q, math.nan),
        "q": q,
        "caches": torch.randn(2, sum(tables) + 1, BLOCK_SIZE, kv_heads, head_dim).to(dtype),
        "starts": torch.tensor([0, *accumulate(queries)], dtype=torch.int32),
        "seq_lens": torch.tensor(list(seq_lens), dtype=torch.int32),
        "block_table": block_table,
    }


def exact(case: Mapping[str, Tensor]) -> Tensor:
    """Compute a case's attention in float64, request by request."""
    q, caches = case["q"].cpu().double(), case["caches"].cpu().double()
    starts, out = case["starts"].tolist(), torch.empty_like(q)
    for index, length in enumerate(case["seq_lens"].tolist()):
        rows, blocks = slice(starts[index], starts[index + 1]), case["block_table"][index].cpu().long()
        keys, values = caches[:, blocks].flatten(1, 2)[:, :length].repeat_interleave(q.shape[1] // caches.shape[3], 2)
        new = rows.stop - rows.start
        visible = torch.ones(new, length, dtype=torch.bool).tril(length - new)
        scores = torch.einsum("qhd,khd->hqk", q[rows], keys) / math.sqrt(q.shape[2])
        out[rows] = torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -math.inf).softmax(2), values)
    return out


def num_decodes_of(queries: Sequence[int], name: str) -> int:
    """Count the leading requests with one token; in the case "one token in a chunk's place", one of
    them counts as a chunk.
    """
    return sum(count == 1 for count in queries) - (name == "one token in a chunk's place")


def verify_kernel(
    mixed_launch: LessonCode, in_two_launches: LessonCode, device: torch.device, quick: bool
) -> dict[str, float]:
    """Compare one launch and two with float64 on awkward steps; `quick` tests only one shape of
    heads.

    Raises:
        AssertionError: a row is wrong, or was not written.
    """
    errors: dict[str, float] = {}
    for heads, kv_heads, head_dim in track([(4, 2, 32), (6, 2, 80)][quick:], "verifying the kernel"):
        for name, lengths in AWKWARD.items():
            case = mixed_case(*lengths, heads, kv_heads, head_dim, torch.float16)
            expected = exact(case)
            for launch in (mixed_launch, in_two_launches):
                fresh = {key: tensor.clone().to(device) for key, tensor in case.items()}
                error = furthest(launch(**fresh, num_decodes=num_decodes_of(lengths[0], name)).double(), expected)
                errors[name] = max(errors.get(name, 0.0), error)
    return {"largest_error": show_errors("One launch, and two", errors, 4e-3)}


STEP = ([1] * 32 + [480], [1024] * 32 + [1504])
"""New tokens and keys of each request: 32 decodes and a chunk of a prompt, 512 tokens in all."""
TILES = {"tiles of 16 rows": (16, 16), "tiles of 64": (64, 64), "16 for decodes, 64 else": (16, 64)}


def compare_tiles(tile_work: LessonCode) -> dict[str, dict[str, int]]:
    """Count a step's rows, scores and keys for each choice of tiles."""
    queries, lengths = STEP
    records = {}
    for name, (decode, chunk) in TILES.items():
        records[name] = tile_work(queries, lengths, tile_rows=[decode if new == 1 else chunk for new in queries])
    record_table(
        "32 decodes and a chunk of 480, each after 1,024 keys; 4 heads a group",
        {
            name: {
                **record,
                "share": record["real"] / record["rows"],
                "millions": record["scores"] / 1e6,
                "kept": record["keeps"] / record["scores"],
            }
            for name, record in records.items()
        },
        "for each KV head {name} | tiles {tiles} | rows {rows:,} | real {share:.0%} | M scores {millions:.2f} | "
        "kept {kept:.0%} | keys {keys:,}",
    )
    return records
