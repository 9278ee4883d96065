"""Check the part of exercise 10 that needs NumPy, torch or Triton, and run the engine with the learner's part."""

import math
from functools import lru_cache
from itertools import accumulate

import torch

from minivllm.config import Parts
from minivllm.platforms.triton_utils import tl, triton
from minivllm_lab.chunked_prefill.learner_policy import learner_policy
from minivllm_lab.checks.kernel_trace import trace_kernel
from minivllm_lab.checks.plugged import Plugged


# ---- the kernel ------------------------------------------------------------------------------------------------------

SHAPE, OTHER_SHAPE = (3, 2, 20), (4, 1, 24)
"""Query heads of a group, KV heads, head dim."""
BLOCK_SIZE, DECODE_M, CHUNK_M, BLOCK_T = 4, 4, 16, 16
QUERIES, LENGTHS, DECODES = [1, 1, 7, 5, 1, 11], [9, 30, 7, 18, 21, 25], 2
"""Two decodes, then chunks: a whole prompt, a later chunk, a chunk of one token, one of several tiles."""


@triton.jit
def _tiles_kernel(found, query_start_loc, num_decodes, num_seqs, FIND: tl.constexpr, BLOCK_Q: tl.constexpr):
    request, first = FIND(query_start_loc, tl.program_id(0), num_decodes, num_seqs, BLOCK_Q)
    tl.store(found + 2 * tl.program_id(0), request)
    tl.store(found + 2 * tl.program_id(0) + 1, first)


@triton.jit
def _attend_kernel(
    out, q, k_cache, v_cache, query_start_loc, seq_lens, block_table, request, first, width, scale,
    ATTEND: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    mine, its = tl.load(request), tl.load(first)
    ATTEND(
        out, q, k_cache, v_cache, query_start_loc, seq_lens, block_table, mine, its, tl.program_id(0), width, scale,
        GROUP, KV_HEADS, HEAD_DIM, BLOCK_D, BLOCK_SIZE, BLOCK_M, BLOCK_T,
    )  # fmt: skip


def _starts(lengths):
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def _clean(trace):
    for found in (trace.races, trace.out_of_bounds):
        assert not found, f"{found[0]}. Do rows that are not the request's have a mask?"


def _tiles(queries, decodes, tile):
    """List (request, first token) of every tile, by the rule."""
    starts = _starts(queries).tolist()
    first = [i if i < decodes else (starts[i] - decodes) // tile + i for i in range(len(queries))]
    found = []
    for number in range(decodes + (starts[-1] - decodes) // tile + len(queries) - decodes):
        owner = number if number < decodes else max(i for i in range(decodes, len(queries)) if first[i] <= number)
        found.append((owner, 0 if number < decodes else (number - first[owner]) * tile))
    return found


def check_tiles_find_their_request(module):
    """Stretch: a decode's tile is its own; a chunk's tile is found by halving, among the chunks alone."""
    mixed = ([1, 1, 7, 3], 2), ([1, 17], 1), ([1, 1, 1, 5, 1, 8], 3), ([1] * 5 + [3] * 24, 5)
    cases = *mixed, ([1, 1, 1], 3), ([9, 4, 4], 0)
    for queries, decodes in cases:
        expected = _tiles(queries, decodes, 4)
        found = torch.full((len(expected), 2), -1, dtype=torch.int32)
        arguments = found, _starts(queries), decodes, len(queries)
        trace = trace_kernel(_tiles_kernel, (len(expected),), *arguments, FIND=module.find_tile, BLOCK_Q=4)
        tiles, where = [tuple(one) for one in found.tolist()], f"rows {queries}, {decodes} decodes, tiles of 4"
        for number, (one, right) in enumerate(zip(tiles, expected)):
            hint = ": a decode's tile is the request of its number" if number < decodes else ""
            assert one == right, f"{where}: tile {number} is {one}, and {right} is right{hint}"
        most = len(expected) * (math.floor(math.log2(max(1, len(queries) - decodes))) + 3)
        read = trace.bytes_read // 4
        assert read <= most, f"{where}: {read} entries read, {most} are enough if you halve"


@lru_cache(maxsize=2)
def _case(shape):
    group, kv_heads, head_dim = shape
    draw = torch.Generator().manual_seed(0)
    counts = [-(-length // BLOCK_SIZE) for length in LENGTHS]
    ids, table = iter((torch.randperm(sum(counts), generator=draw) + 1).tolist()), torch.zeros(6, max(counts)).int()
    for row, count in enumerate(counts):
        table[row, :count] = torch.tensor([next(ids) for _ in range(count)])
    q = torch.randn(sum(QUERIES), group * kv_heads, head_dim, generator=draw)
    caches = torch.randn(2, sum(counts) + 1, BLOCK_SIZE, kv_heads, head_dim, generator=draw)
    starts, out = _starts(QUERIES).tolist(), torch.empty_like(q, dtype=torch.float64)
    for index, (new, length) in enumerate(zip(QUERIES, LENGTHS)):
        keys, values = caches[:, table[index].long()].flatten(1, 2)[:, :length].double()
        for row in range(new):
            for head in range(group * kv_heads):
                k, v = (one[: length - new + row + 1, head // group] for one in (keys, values))
                weights = torch.softmax(k @ q[starts[index] + row, head].double() / math.sqrt(head_dim), 0)
                out[starts[index] + row, head] = weights @ v
    return q, caches, table, out


def _sizes(shape):
    group, kv_heads, head_dim = shape
    return {
        "GROUP": group, "KV_HEADS": kv_heads, "HEAD_DIM": head_dim, "BLOCK_D": triton.next_power_of_2(head_dim),
        "BLOCK_SIZE": BLOCK_SIZE, "BLOCK_T": BLOCK_T,
    }  # fmt: skip


def check_a_tile_attends_for_a_whole_group(module):
    """Stretch: a tile has the tokens of one request, each with all heads of the group, and writes no other row."""
    for shape, request, first, rows in (
        (SHAPE, 1, 0, 4), (SHAPE, 3, 0, 16), (SHAPE, 5, 5, 16), (SHAPE, 5, 10, 16), (SHAPE, 2, 10, 16),
        (OTHER_SHAPE, 5, 4, 16),
    ):  # fmt: skip
        _attends(module, shape, request, first, rows)


def _attends(module, shape, request, first, rows):
    """Run one tile; its rows are right, and no other row is written."""
    q, caches, table, expected = _case(shape)
    starts, (group, kv_heads, head_dim) = _starts(QUERIES).tolist(), shape
    out = torch.full_like(q, float("nan"))
    place = (torch.tensor([number], dtype=torch.int32) for number in (request, first))
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    arguments = out, q, *caches, _starts(QUERIES), lengths, table, *place, table.shape[1], head_dim**-0.5
    sizes = {"ATTEND": module.attend_tile, "BLOCK_M": rows, **_sizes(shape)}
    trace = trace_kernel(_attend_kernel, (kv_heads,), *arguments, **sizes)
    _clean(trace)
    begin = starts[request] + first
    end = max(begin, min(begin + rows // group, starts[request + 1]))
    what = f"tokens {first} to {first + end - begin} of request {request}, {group} heads of {head_dim} a group"
    written = ~torch.isnan(out).any(-1).any(-1)
    others = [token for token in written.nonzero().flatten().tolist() if not begin <= token < end]
    assert not others, f"{what}: row {others[0]} is written, which is not in this tile"
    assert written[begin:end].all(), f"{what}: a row, or a head of it, is not written"
    off = (out[begin:end].double() - expected[begin:end]).abs().amax((0, 2)) if end > begin else torch.zeros(1)
    wrong = (off > 1e-4).nonzero().flatten().tolist()
    hint = ", only in some heads: row i is head i % GROUP" if wrong and len(wrong) < group * kv_heads else ""
    assert not wrong, f"{what} is off by {float(off.max()):.2g}{hint}"


@lru_cache(maxsize=3)
def _traced(module, decode_rows=DECODE_M, shape=SHAPE):
    q, caches, table, expected = _case(shape)
    group, kv_heads, head_dim = shape
    out, tile = torch.full_like(q, float("nan")), CHUNK_M // group
    tiles = DECODES + (len(q) - DECODES) // tile + len(QUERIES) - DECODES if decode_rows == DECODE_M else DECODES
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    arguments = out, q, *caches, _starts(QUERIES), lengths, table, DECODES, len(QUERIES), table.shape[1], head_dim**-0.5
    sizes = {"DECODE_M": decode_rows, "CHUNK_M": CHUNK_M, **_sizes(shape)}
    trace = trace_kernel(module.mixed_kernel, (tiles, kv_heads), *arguments, **sizes)
    return trace, out, expected


def check_one_launch_serves_the_step(module):
    """Stretch: one launch computes a step's decodes and chunks: all rows right, none written twice."""
    for shape in (SHAPE, OTHER_SHAPE):
        trace, out, expected = _traced(module, shape=shape)
        _clean(trace)
        starts = _starts(QUERIES).tolist()
        for index, new in enumerate(QUERIES):
            rows = slice(starts[index], starts[index] + new)
            missing = torch.isnan(out[rows]).any(-1).any(-1)
            where = f"{shape[0]} heads a group, request {index}"
            assert not missing.any(), f"{where}: token {int(missing.int().argmax())} of its {new} is not written"
            off = float((out[rows].double() - expected[rows]).abs().max())
            assert off < 1e-4, f"{where}, {new} tokens of {LENGTHS[index]} keys, is off by {off:.2g}"


def check_each_kind_has_tiles_of_its_size(module):
    """Stretch: decodes have DECODE_M rows, chunks CHUNK_M; keys are read once a tile, up to the last that it sees."""
    trace, out, _ = _traced(module)
    group, kv_heads, head_dim = SHAPE
    tile, ends = CHUNK_M // group, list(LENGTHS[:DECODES])
    for new, length in zip(QUERIES[DECODES:], LENGTHS[DECODES:]):
        ends += [length - new + min(first + tile, new) for first in range(0, new, tile)]
    row = 4 * kv_heads * head_dim
    for name in ("k_cache", "v_cache"):
        read, right = trace.arguments[name].bytes_read, sum(ends) * row
        hint = ". Do tiles read to the end of their request?" if read > right else ". Are tiles larger than CHUNK_M?"
        assert read == right, f"{read:,} bytes of {name} are read, and {right:,} are right{hint}"
    assert trace.bytes_written == out.nbytes, f"{trace.bytes_written:,} bytes written; out has {out.nbytes:,}"
    _, out, _ = _traced(module, group - 1)
    written = ~torch.isnan(out[:DECODES])
    assert not written.any(), f"with DECODE_M {group - 1}, too few for {group} heads, decodes are computed. By whom?"


def plug(module) -> Plugged:
    """Use the learner's caps in both loops of the engine, with a threshold, a small budget and a tight pool."""
    return Plugged(
        parts=Parts(policy=learner_policy(module.chunk_limit, module.running_tokens, module.admitted_tokens)),
        engine_args={
            "num_gpu_blocks_override": 16, "block_size": 4, "max_model_len": 48, "max_num_batched_tokens": 12,
            "long_prefill_token_threshold": 3, "long_prefill_token_threshold_adaptive": True,
            "enable_prefix_caching": False,
        },
    )  # fmt: skip
