"""Check the part of exercise 04 that needs NumPy, torch or Triton, and run the engine with the learner's part."""

import math
from functools import lru_cache
from itertools import accumulate

import torch

from minivllm.config import Parts
from minivllm.platforms.triton_utils import tl, triton
from minivllm_lab.continuous_batching.learner_policy import learner_policy
from minivllm_lab.checks.kernel_trace import trace_kernel
from minivllm_lab.checks.plugged import Plugged


# ---- the kernel ------------------------------------------------------------------------------------------------------

BLOCK_Q, BLOCK_T = 4, 16


@triton.jit
def _owners_kernel(owners, query_start_loc, num_seqs, FIND: tl.constexpr, BLOCK_Q: tl.constexpr):
    tile = tl.program_id(0)
    tl.store(owners + tile, FIND(query_start_loc, tile, num_seqs, BLOCK_Q))


def _starts(lengths):
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def _clean(trace):
    """Check that no program writes what another one reads or writes, or touches memory beside its tensors."""
    for found in (trace.races, trace.out_of_bounds):
        assert not found, f"{found[0]}. Do rows that are not the request's have a mask?"


def check_rows_see_their_own_keys(module):
    """Stretch: each row sees the keys up to itself: a decode all, a prompt 1, 2, 3 …, a chunk its context and more."""
    for queries, lengths in (([1, 5, 6], [10, 5, 6]), ([4, 1, 3], [10, 1, 9]), ([2, 0, 8], [2, 7, 30])):
        visible = torch.full((sum(queries),), -1, dtype=torch.int32)
        seq_lens = torch.tensor(lengths, dtype=torch.int32)
        trace = trace_kernel(module.visible_kernel, (len(queries),), visible, _starts(queries), seq_lens, BLOCK=8)
        _clean(trace)
        expected = [n - new + row + 1 for new, n in zip(queries, lengths) for row in range(new)]
        found = visible.tolist()
        hint = ""
        if found == [one - 1 for one in expected]:
            hint = ": these are positions; a row sees its own key too"
        elif found == [row + 1 for new in queries for row in range(new)]:
            hint = ": the keys computed before are missing; seq_len - query_len of them come first"
        assert found == expected, f"{queries} rows of {lengths} keys see {found}, and {expected} is right{hint}"


def check_tiles_find_their_request(module):
    """Stretch: a tile belongs to the last request that does not begin after it, found by halving."""
    for queries in ([1, 5, 6], [4, 4], [1] * 9, [0, 3, 0, 0, 9], [17]):
        starts, tiles = _starts(queries), sum(queries) // BLOCK_Q + len(queries)
        first = [start // BLOCK_Q + index for index, start in enumerate(starts.tolist()[:-1])]
        expected = [max(i for i in range(len(queries)) if first[i] <= tile) for tile in range(tiles)]
        owners = torch.full((tiles,), -1, dtype=torch.int32)
        arguments = (owners, starts, len(queries))
        trace = trace_kernel(_owners_kernel, (tiles,), *arguments, FIND=module.find_sequence, BLOCK_Q=BLOCK_Q)
        found = owners.tolist()
        hint = (
            ": one too far; the last that does not begin *after* the tile" if found == [x + 1 for x in expected] else ""
        )
        assert found == expected, f"rows {queries}, tiles of {BLOCK_Q}: owners {found}, and {expected} is right{hint}"
        most = tiles * (math.floor(math.log2(len(queries))) + 1)
        read = trace.bytes_read // 4
        assert read <= most, (
            f"{tiles} tiles, {len(queries)} requests: {read} entries read, {most} are enough if you halve"
        )


QUERIES, LENGTHS, GROUP, KV_HEADS, HEAD_DIM = [1, 5, 6, 0, 9], [40, 5, 22, 3, 9], 3, 2, 20


def _attention_by_row(q, keys, values):
    """Compute attention in float64, row by row."""
    out, starts, firsts = torch.empty_like(q), _starts(QUERIES).tolist(), _starts(LENGTHS).tolist()
    for index, (new, length) in enumerate(zip(QUERIES, LENGTHS)):
        for row in range(new):
            mine = slice(firsts[index], firsts[index] + length - new + row + 1)
            for head in range(GROUP * KV_HEADS):
                k, v = keys[mine, head // GROUP], values[mine, head // GROUP]
                weights = torch.softmax(k @ q[starts[index] + row, head] / math.sqrt(HEAD_DIM), 0)
                out[starts[index] + row, head] = weights @ v
    return out


@lru_cache(maxsize=1)  # two checks look at one launch
def _traced(module):
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(sum(QUERIES), GROUP * KV_HEADS, HEAD_DIM, generator=draw)
    keys, values = torch.randn(2, sum(LENGTHS), KV_HEADS, HEAD_DIM, generator=draw)
    out = torch.full_like(q, float("nan"))
    trace = trace_kernel(
        module.ragged_kernel, (len(q) // BLOCK_Q + len(QUERIES), GROUP * KV_HEADS), out, q, keys, values,
        _starts(QUERIES), _starts(LENGTHS), len(QUERIES), HEAD_DIM**-0.5, GROUP=GROUP, KV_HEADS=KV_HEADS,
        HEAD_DIM=HEAD_DIM, BLOCK_D=32, BLOCK_Q=BLOCK_Q, BLOCK_T=BLOCK_T,
    )  # fmt: skip
    return trace, out, _attention_by_row(q.double(), keys.double(), values.double())


def check_one_launch_serves_all(module):
    """Stretch: one launch serves a decode, a prompt, a chunk, an empty request and a prompt of several tiles."""
    trace, out, expected = _traced(module)
    _clean(trace)
    starts = _starts(QUERIES).tolist()
    for index, new in enumerate(QUERIES):
        rows = slice(starts[index], starts[index] + new)
        missing = torch.isnan(out[rows]).any(-1).any(-1)
        assert not missing.any(), f"request {index}: row {int(missing.int().argmax())} of its {new} is not written"
        off = (out[rows].double() - expected[rows]).abs()
        what = f"request {index}, {new} rows of {LENGTHS[index]} keys, is off by {float(off.max()) if new else 0:.2g}"
        heads = off.amax((0, 2)) > 1e-4 if new else torch.zeros(1, dtype=torch.bool)
        hint = (
            f", in heads {heads.nonzero().flatten().tolist()} only: which KV head is theirs?" if not heads.all() else ""
        )
        assert not heads.any(), what + hint


def check_only_keys_that_are_seen_are_read(module):
    """Stretch: each tile and head reads K and V once, up to the last key that it sees; `out` is written once."""
    trace, out, _ = _traced(module)
    ends = [
        length - new + min(tile + BLOCK_Q, new)
        for new, length in zip(QUERIES, LENGTHS)
        for tile in range(0, new, BLOCK_Q)
    ]
    whole = [length for new, length in zip(QUERIES, LENGTHS) for _ in range(0, new, BLOCK_Q)]
    row = 4 * HEAD_DIM * GROUP * KV_HEADS  # bytes of all heads
    least, other = 2 * sum(ends) * row + len(out) * row, 2 * sum(whole) * row + len(out) * row
    tiles = len(out) // BLOCK_Q + len(QUERIES)
    most = least + tiles * GROUP * KV_HEADS * 4 * (4 + math.floor(math.log2(len(QUERIES))) + 1)
    hint = " Do all tiles read to the end of their request?" if trace.bytes_read >= other else ""
    assert trace.bytes_read <= most, f"{trace.bytes_read:,} bytes read, and {most:,} are enough.{hint}"
    assert trace.bytes_written == len(out) * row, f"{trace.bytes_written:,} bytes written; out has {len(out) * row:,}"


# ---- in the engine ---------------------------------------------------------------------------------------------------


def plug(module) -> Plugged:
    """Let the learner's `schedule` decide every step of the engine, on a pool so small that it must preempt."""
    return Plugged(
        parts=Parts(policy=learner_policy(module.schedule)),
        engine_args={
            "num_gpu_blocks_override": 12, "block_size": 4, "max_model_len": 40, "max_num_batched_tokens": 12,
            "enable_prefix_caching": False,
        },
    )  # fmt: skip
