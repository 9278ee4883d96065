"""Lesson 03's walk for a tile of queries whose rows see different numbers of keys, for kernels
of later lessons.
"""

from minivllm.platforms.triton_utils import tl, triton


@triton.jit
def attend_keys(
    query, keys, values, first_key, kv_head, end, visible, scale,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Attend from a tile of queries to the keys from `first_key` to `first_key + end` of one KV
    head, in one pass.

    query [rows, BLOCK_D]; keys, values [all keys, KV_HEADS, HEAD_DIM]; row i sees the first
    `visible[i]` of the keys. Returns float32 [rows, BLOCK_D]. Reads the `end` keys and values once,
    in tiles of BLOCK_T.
    """
    column = tl.arange(0, BLOCK_D)
    peak, total = tl.full([query.shape[0]], -1e30, tl.float32), tl.zeros([query.shape[0]], tl.float32)
    result = tl.zeros([query.shape[0], BLOCK_D], tl.float32)
    for start in range(0, end, BLOCK_T):
        token = start + tl.arange(0, BLOCK_T)
        at = ((first_key + token).to(tl.int64) * KV_HEADS + kv_head)[:, None] * HEAD_DIM + column[None, :]
        there = (token < end)[:, None] & (column < HEAD_DIM)[None, :]
        k, v = tl.load(keys + at, mask=there, other=0.0), tl.load(values + at, mask=there, other=0.0)
        seen = token[None, :] < visible[:, None]
        peak, total, result = add_keys(peak, total, result, query, k, v, seen, scale)
    return result / tl.maximum(total, 1e-30)[:, None]


@triton.jit
def attend_blocks(
    query, k_cache, v_cache, table, kv_head, end, visible, scale,
    BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Attend like `attend_keys`, but to keys in blocks: key t is at t % BLOCK_SIZE of block
    `table[t // BLOCK_SIZE]`.

    k_cache, v_cache [blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM]; `table` points at the request's row
    of int32 numbers.
    """
    column = tl.arange(0, BLOCK_D)
    peak, total = tl.full([query.shape[0]], -1e30, tl.float32), tl.zeros([query.shape[0]], tl.float32)
    result = tl.zeros([query.shape[0], BLOCK_D], tl.float32)
    for start in range(0, end, BLOCK_T):
        token = start + tl.arange(0, BLOCK_T)
        block = tl.load(table + token // BLOCK_SIZE, mask=token < end, other=0).to(tl.int64)
        at = ((block * BLOCK_SIZE + token % BLOCK_SIZE) * KV_HEADS + kv_head)[:, None] * HEAD_DIM + column[None, :]
        there = (token < end)[:, None] & (column < HEAD_DIM)[None, :]
        k, v = tl.load(k_cache + at, mask=there, other=0.0), tl.load(v_cache + at, mask=there, other=0.0)
        seen = token[None, :] < visible[:, None]
        peak, total, result = add_keys(peak, total, result, query, k, v, seen, scale)
    return result / tl.maximum(total, 1e-30)[:, None]


@triton.jit
def add_keys(peak, total, result, query, k, v, seen, scale):
    """Add one tile of keys to the online softmax and return its new (peak, total, weighted sum).
    `seen` [rows, keys] is a mask.
    """
    scores = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
    scores = tl.where(seen, scores, -float("inf"))
    new_peak = tl.maximum(peak, tl.max(scores, axis=1))
    weights, keep = tl.exp(scores - new_peak[:, None]), tl.exp(peak - new_peak)
    total = total * keep + tl.sum(weights, axis=1)
    result = result * keep[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return new_peak, total, result
