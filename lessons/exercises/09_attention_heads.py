"""Exercise 09. Let query heads share keys and values; attend to latents without making keys; divide heads over ranks.

Fill in the functions, in any order, then ask what is still missing:

    make check N=09

Needed: lesson 09 to the end of "The mechanism". The kernels run in Triton's interpreter; no GPU is needed. As soon as
the checks of your `grouped_attention` pass, the same command runs the engine with it.
"""

import math

import torch

from minivllm.platforms.triton_utils import tl, triton

# ---- in torch --------------------------------------------------------------------------------------------------------


def grouped_attention(q, keys, values):
    """Compute causal attention in which query heads share keys and values.

    q             [queries, heads, head_dim]       the last positions: query i is at positions - queries + i
    keys, values  [positions, kv_heads, head_dim]  heads is a multiple of kv_heads
    returns       [queries, heads, head_dim], of q's dtype and device

    For each query head: softmax(q · keys / sqrt(head_dim)) · values, over the positions up to the query's own.
    Neighbouring query heads share a KV head: with 6 heads on 2, heads 0, 1, 2 read KV head 0, and 3, 4, 5 read KV head
    1.

    Traps: `repeat_interleave` and `expand(...).reshape(...)` give the right answer, but write every key into memory
    once for each head of a group; the check counts the elements that you make. Reshape the queries, which are few, to
    [queries, kv_heads, group, head_dim], and `torch.einsum` does the rest. Query i is not at position i.
    """
    raise NotImplementedError("reshape q into groups; scores, mask, softmax, and the sum of values, all by group")


def absorbed_attention(q_nope, q_rope, latents, k_rope, w_uk, w_uv):
    """Compute latent attention of one query over cached latents, without making a key or a value.

    q_nope   [heads, nope]         the part that is compared with keys made from latents
    q_rope   [heads, rope]         the part that is compared with the rotary keys
    latents  [positions, rank]     cached, one for all heads
    k_rope   [positions, rope]     cached, one for all heads
    w_uk     [heads, nope, rank]   makes a head's key from a latent:   k = w_uk[h] @ latent
    w_uv     [heads, v, rank]      makes a head's value from a latent: v = w_uv[h] @ latent
    returns  [heads, v]            softmax((q_nope · k + q_rope · k_rope) / sqrt(nope + rope)) · v

    q · (W c) is (Wᵀ q) · c: apply w_uk to the query, once, and not to each latent. And the weighted sum of W c is W
    times the weighted sum of c: apply w_uv at the end, once.

    Traps: divide the scores by the square root of nope + rope, the length of the key that is never made, not by that of
    rank + rope. A loop over heads that makes one head's keys at a time still makes them all.

    >>> q, w_uk = [[1., 2.]], [[[1., 0.], [1., 1.]]]    # one head, nope 2, rank 2: w_ukᵀ q = (3, 2)
    >>> latents = [[3., 1.]]                            # (3, 2) · (3, 1) = 11, as (1, 2) · (3, 4) with the key (3, 4)
    """
    raise NotImplementedError("query into the latents' space, scores, softmax, sum of latents, and only then w_uv")


def kv_heads_of_rank(rank: int, tp: int, num_kv_heads: int) -> list[int]:
    """List the KV heads that this rank keeps, if a model's heads are divided over `tp` ranks.

    rank     0 to tp - 1. It computes heads / tp query heads, starting at rank * heads / tp
    returns  the numbers of the KV heads that these query heads read, in order

    With at least as many KV heads as ranks, each rank keeps an equal share. With more ranks than KV heads, each rank
    keeps one, and tp // num_kv_heads ranks keep the same one: it is replicated.

    Raise ValueError (`MinivllmError` is one) if neither number divides the other.

    >>> kv_heads_of_rank(1, 4, 8), kv_heads_of_rank(1, 4, 2)
    ([2, 3], [0])

    Trap: the query heads decide which ranks hold copies of the same head: they are neighbours.
    """
    raise NotImplementedError("an equal share, or one head that the neighbours keep as well")


# ---- as a kernel, for Triton's interpreter ---------------------------------------------------------------------------
#
# The heads of a group are the rows of one matmul. A tensor core's tile has at least 16 rows, so
# ROWS is a power of two, 16 or more, and at least as large as the group; further rows are masked. `tl.dot(a,
# tl.trans(b), input_precision="ieee")` is a · bᵀ; tl.dot(a, b, c) adds c.


@triton.jit
def scores_kernel(
    scores, q, keys, tokens, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Step 1: store q · k of every head and token, not divided by anything. Grid: (kv_heads, ceil(tokens / TILE)).

    scores  [heads, tokens] float32, to be written; heads = kv_heads * GROUP
    q       [heads, HEAD_DIM] float32;  HEAD_DIM is a power of two, 16 or more
    keys    [tokens, kv_heads, HEAD_DIM] float32;  kv_heads is tl.num_programs(0)

    One program takes the GROUP heads of KV head `tl.program_id(0)` and TILE tokens. It loads its rows of q and its
    keys, each element once.

    Traps: rows GROUP and up belong to the next KV head's program, or do not exist. The last tile may be shorter.
    """
    raise NotImplementedError("rows of q, a tile of keys, one tl.dot, a store with both masks")


@triton.jit
def group_kernel(
    out, q, keys, values, tokens, scale,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Step 2: compute the attention of one request's last token. Grid: (kv_heads,).

    out           [heads, HEAD_DIM] float32, to be written
    keys, values  [tokens, kv_heads, HEAD_DIM] float32;  tokens is 1 or more;  scale: multiplies the scores

    Loop over tiles with lesson 03's running softmax, for ROWS rows at once: maximum and sum are [ROWS], the result is
    [ROWS, HEAD_DIM]. Read each key and value once.

    Trap: a masked token must count as -inf before the maximum is taken, for all rows.
    """
    raise NotImplementedError("step 1 in a loop, with the state that lesson 03 keeps from tile to tile")


@triton.jit
def decode_kernel(
    out, q, keys, values, lengths, slots, scale, HEADS: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Step 3: serve many requests, HEADS query heads a program. Grid: (requests, KV_HEADS * GROUP // HEADS).

    out, q        [requests, heads, HEAD_DIM]; any HEAD_DIM; BLOCK_D is the next power of two, HEAD_DIM or more
    keys, values  [requests, slots, KV_HEADS, HEAD_DIM]; slots after a request's tokens hold garbage
    lengths       [requests] int32: tokens of each request; a request without tokens gets zeros
    HEADS         divides GROUP. If one program takes the whole group, every key is read once; with a program for each
                  query head, HEADS = 1, it is read GROUP times

    Traps: several programs may belong to the same KV head, `tl.program_id(1) * HEADS // GROUP`. Do not divide by a sum
    without weights. ROWS may exceed HEADS. A cache may have more than 2**31 elements: make `tl.program_id(0)` an int64
    before you multiply. (No check tests that: it would take gigabytes.)
    """
    raise NotImplementedError("step 2, with the request's own start and length, and a mask over HEAD_DIM")
