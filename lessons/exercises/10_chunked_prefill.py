"""Exercise 10. Cut a prompt into chunks, count what that costs, and run chunks and decodes in one launch.

Fill in the functions, then ask what is still missing:

    make check N=10

Needed: lesson 10 to the end of "The mechanism". As soon as the checks of your caps pass, the same command runs the
engine with them, in both loops of its scheduler.
"""

from minivllm_lab.key_walk import attend_blocks
from minivllm.platforms.triton_utils import tl, triton

# ---- on paper --------------------------------------------------------------------------------------------------------


def first_steps():
    """Work out on paper how many tokens each request gets in steps 1 to 4, and write the answer down.

    A step may have 10 tokens (`max_num_batched_tokens`), and no request more than 5 of them
    (`long_prefill_token_threshold`, not adaptive). Memory is ample.

        arrives before step 1   A: prompt 14, generates 3
        arrive before step 2    B: prompt  9, generates 2
                                C: prompt  2, generates 4

    returns: a list of four dicts, one for each step, from the request's name to its tokens, in the order in which the
    scheduler gives them out; requests that get none are left out. The form, with wrong numbers:

        [{"A": 1, "B": 1}, {"C": 5}, {"B": 2, "C": 1}, {"A": 7}]

    Traps: the threshold has an exception. Decodes do not go first: the request that was admitted first does.
    """
    raise NotImplementedError("write down four dicts: the tokens of A, B and C in each step")


# ---- the caps, for both loops of the scheduler -----------------------------------------------------------------------


def chunk_limit(token_budget, threshold, num_requests, adaptive=False):
    """Return the most tokens that one request may get in a step.

    token_budget  tokens that the step may have, all requests together
    threshold     `long_prefill_token_threshold`; 0 means that there is none
    num_requests  how many requests run or wait in all; at least 1
    adaptive      `long_prefill_token_threshold_adaptive`: the limit is never below an equal share of the budget,
                  token_budget // num_requests
    returns       an int

    The threshold makes a long prompt leave something to others. Where there are no others, it is off.

    Examples: (8192, 512, 3) -> 512. (8192, 512, 1) -> 8192. (8192, 512, 4, adaptive=True) -> 2048.
    Traps: a waiting request counts as another request, too. Without a threshold, `adaptive` changes nothing.
    """
    raise NotImplementedError("the budget, the threshold, or a fair share")


def running_tokens(missing, limit, budget_left):
    """Return the tokens that a running request gets in this step. It is called for each, in the order of admission.

    missing       tokens that it knows and has not computed: the rest of its prompt, or 1 if it decodes
    limit         what `chunk_limit` returned
    budget_left   what the requests before it have left of the step's budget
    returns       an int; 0 if nothing is left

    Example: 1,000 tokens are missing, the limit is 512, 300 are left: 300.
    """
    raise NotImplementedError("one line")


def admitted_tokens(missing, limit, budget_left, may_be_cut=True):
    """Return the tokens that the head of the queue gets, or 0: then it and the rest of the queue go on waiting.

    may_be_cut    `enable_chunked_prefill`. If False, the budget may not cut it: it waits for a step that has room. The
                  limit may: a request that wants more than the limit gets the limit, cut or not.

    Examples: 1,000 missing, limit 512, 300 left: 300; if it may not be cut: 0. With 512 left: 512, in both cases.
    """
    raise NotImplementedError("what it wants under the limit; then the budget, which may cut it or not")


# ---- what it costs, and how much of it is free -----------------------------------------------------------------------


def steps_of_a_prompt(prompt_tokens, token_budget, num_decodes):
    """Count the steps that compute a prompt, while `num_decodes` requests take one token each out of every step.

    returns  an int, or `math.inf` if it is never computed

    Example: 1,000 tokens, a budget of 256, 56 decodes: 5 steps.
    """
    raise NotImplementedError("what is left of a step, and how often the prompt needs it")


def keys_read_again(prompt_tokens, chunk):
    """Count the keys that each layer reads a second time (a third, ...) because a prompt comes in chunks.

    A chunk's tokens see all keys before it, so it reads those of all earlier chunks. The reads of a prompt in one piece
    do not count. Only the last chunk may be smaller.

    Examples: (8, 8) -> 0. (8, 4) -> 4. (10, 4) -> 4 + 8 = 12.
    """
    raise NotImplementedError("add up the keys before each chunk")


def knee(flops, bandwidth, bytes_per_parameter):
    """Return the number of tokens at which a step's arithmetic takes as long as reading the weights.

    flops                operations a second;  bandwidth  bytes a second
    bytes_per_parameter  2 for bfloat16, 0.5 for 4 bits; arithmetic runs at `flops` in any case

    A token costs 2 operations for each parameter; every parameter is read once in a step, whatever its tokens.

    Example: 1,000 operations and 10 bytes a second, 2 bytes a parameter: 100 tokens.
    """
    raise NotImplementedError("set the two times equal")


def budget_for(gap, parameters, bytes_per_parameter, flops, bandwidth):
    """Return the largest budget whose steps end within `gap` seconds, an int; 0 if reading the weights takes longer.

    Example: 10 parameters of 2 bytes, 1,000 operations and 100 bytes a second, a gap of 0.5 s: 25 tokens (the weights
    take 0.2 s). A gap of 0.1 s: 0.
    """
    raise NotImplementedError("read the weights and do 2 * parameters operations a token, both at once")


# ---- the kernel, for Triton's interpreter ----------------------------------------------------------------------------


@triton.jit
def find_tile(query_start_loc, tile, num_decodes, num_seqs, BLOCK_Q: tl.constexpr):
    """Step 1: find a tile's request, and which of the request's tokens is the tile's first. Return two numbers.

    The first `num_decodes` requests decode, with one token each: tile i is request i's, and begins at 0. After them
    come the chunks' tiles, of BLOCK_Q tokens each. Lesson 04's rule, for the chunks alone:

        chunk i begins at tile (query_start_loc[i] - num_decodes) // BLOCK_Q + i,   for i >= num_decodes

    and a tile belongs to the last chunk that does not begin after it. A tile may begin after the chunk's last token.
    Halve the range (a `while` loop, as in Python).

    Example: query_start_loc [0, 1, 2, 9, 12], 2 decodes, BLOCK_Q 4. Chunk 2 begins at tile 2, chunk 3 at tile 4:
    tiles 0 to 5 are (0, 0), (1, 0), (2, 0), (2, 4), (3, 0), (3, 4); the last one has no token.
    """
    raise NotImplementedError("a decode's tile; else bisection among the chunks")


@triton.jit
def attend_tile(
    out, q, k_cache, v_cache, query_start_loc, seq_lens, block_table, request, first, kv_head, table_width, scale,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Step 2: compute a tile of a request, starting at its token `first`, for all heads of one group. Kernels call it.

    out, q           [tokens, GROUP * KV_HEADS, HEAD_DIM]; head h reads the keys of KV head h // GROUP
    k_cache, v_cache [blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM]
    query_start_loc  int32 [requests + 1]: request i owns the tokens from entry i up to entry i + 1
    seq_lens         int32 [requests]: its keys; its new tokens are the last of them
    block_table      int32 [requests, table_width]: its blocks
    BLOCK_M          rows of the tile: row i is token first + i // GROUP, head i % GROUP of the group. So a tile has
                     BLOCK_M // GROUP tokens, and up to GROUP - 1 rows may be left over
    BLOCK_D          HEAD_DIM rounded up to a power of two: columns HEAD_DIM and up do not exist

    Load the rows, and let the walk through the blocks do the attention:

        attend_blocks(query, k_cache, v_cache, table, kv_head, end, visible, scale,
                      BLOCK_SIZE, KV_HEADS, HEAD_DIM, BLOCK_D, BLOCK_T)

    query [BLOCK_M, BLOCK_D]; `table` points at the request's row of block_table; row i sees its first visible[i] keys,
    and keys `end` and up are not read; float32 [BLOCK_M, BLOCK_D] comes back. Store it with
    `.to(out.dtype.element_ty)`.

    Traps: tokens of other requests, and rows that are left over. A tile without a token must do nothing. Do not read
    keys that no row of the tile sees.
    """
    raise NotImplementedError("rows, mask, attend_blocks, store")


@triton.jit
def mixed_kernel(
    out, q, k_cache, v_cache, query_start_loc, seq_lens, block_table, num_decodes, num_seqs, table_width, scale,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, DECODE_M: tl.constexpr, CHUNK_M: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Step 3: compute a whole step in one launch. Grid (decodes + chunk rows // BLOCK_Q + chunks, KV heads).

    A decode's tile has DECODE_M rows, and a chunk's CHUNK_M, so BLOCK_Q is CHUNK_M // GROUP. Both sizes are constants
    of the kernel: call `attend_tile` in two places.
    """
    raise NotImplementedError("find the tile, and attend with its size")
