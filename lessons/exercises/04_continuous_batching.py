"""Exercise 04. Predict what the scheduler does, then write it, memory included, and the kernel that runs its steps.

Fill in the functions, then ask what is still missing:

    make check N=04

Needed: lesson 04 to the end of "The mechanism". As soon as the checks of your `schedule` pass, the same command runs
the engine with it.
"""

from minivllm_lab.key_walk import attend_keys
from minivllm.platforms.triton_utils import tl, triton

# ---- on paper --------------------------------------------------------------------------------------------------------


def first_steps():
    """Work out on paper how many tokens each request gets in steps 1 to 4, and write the answer down.

    A step may have 12 tokens (`max_num_batched_tokens`), and 3 requests may run at once (`max_num_seqs`). Memory is
    ample. Four requests wait when the first step is put together, in this order:

        A: prompt 10, generates 3      C: prompt 12, generates 4
        B: prompt  4, generates 2      D: prompt  3, generates 2

    returns: a list of four dicts, one for each step, from the request's name to its tokens, in the order in which the
    scheduler gives them out; requests that get none are left out. The form, with wrong numbers:

        [{"A": 1, "B": 1}, {"C": 5}, {"B": 2, "C": 1}, {"D": 7}]

    The check asks the engine's own scheduler.

    Traps: the step that computes a prompt's last token also samples the first new one, so a request that generates 3
    is in 3 steps if its prompt took one. A prompt may be cut anywhere. With three seats taken, D waits until one is free.
    """
    raise NotImplementedError("write down four dicts: the tokens of A, B, C and D in each step")


# ---- the scheduler ---------------------------------------------------------------------------------------------------


def blocks_missing(request, num_tokens, block_size):
    """Count the blocks that a request must get so that its table holds `num_tokens` tokens.

    request.num_blocks  how many it holds
    num_tokens          all tokens that its blocks must hold, including those computed before
    returns             an int, 0 if it holds enough

    Example: with blocks of 4, a request that holds 2 and is to have 9 tokens in them lacks 1.
    Trap: 8 tokens fill 2 blocks, and a third is not needed yet.
    """
    raise NotImplementedError("count whole blocks, less those that it holds")


def preempt_last(running, waiting, pool):
    """Free the memory of the request that was admitted last, and put it at the head of the queue.

    running               list of requests in the order of admission; the last one leaves it
    waiting               deque of requests, the next to be admitted at its left end
    pool.num_free_blocks  an int; the blocks of the request come back to it

    The request keeps its tokens (num_tokens). Its keys and values are gone: it holds no block, and none of its tokens
    is computed.
    """
    raise NotImplementedError("its blocks, its computed tokens, its seat")


def schedule(running, waiting, pool, token_budget, chunk_limit, max_num_seqs):
    """Decide how many tokens each request gets in the next step.

    running       list of requests, in the order in which they were admitted
    waiting       deque of requests, the next to be admitted at its left end
    pool          has num_free_blocks, which you count down, and block_size
    token_budget  tokens that the step may have, all requests together
    chunk_limit   tokens that one request may have in a step (`long_prefill_token_threshold`, which vLLM does not
                  apply to a request that is alone: lesson 10)
    max_num_seqs  how many requests may run at once
    returns       dict from request_id to tokens, in the order in which they were given out; without zeros

    A request has a request_id, num_tokens (known tokens: its prompt and what it has sampled), num_computed_tokens
    (those whose keys and values are in the cache) and num_blocks. It wants the difference of the first two numbers, at
    most chunk_limit and at most the rest of the budget.

    1. Go through `running` in order, while budget is left. A request must get blocks for its computed tokens and the
       new ones. While too few are free, `preempt_last`. If that was the request itself, it gets nothing.
    2. If no request was preempted, admit from the left of `waiting`, while budget is left and fewer than max_num_seqs
       run: move the request to the end of `running` and give it what it wants. If *all* its known tokens do not fit
       into the free blocks, stop: no request overtakes it. But it takes only the blocks of the tokens that it gets now.
    3. Count at once what you give: num_computed_tokens, num_blocks, pool.num_free_blocks.

    Example, blocks of 4, none free, budget 12: A has computed 12 of 13 tokens in 3 blocks, B 6 of 7 in 2 blocks. A
    needs a fourth block, so B is preempted, and its 2 blocks come free. The step is {"A": 1}; 1 block stays free.

    Traps: `running` shrinks while you go through it. A long prompt is cut, not postponed. No request is admitted
    without getting tokens. Running requests go in the order of their admission, decodes or not. A preempted request
    wants its sampled tokens computed again too.
    """
    raise NotImplementedError("running requests first, then admit, under one budget and one pool")


# ---- the kernel, for Triton's interpreter ----------------------------------------------------------------------------


@triton.jit
def visible_kernel(visible, query_start_loc, seq_lens, BLOCK: tl.constexpr):
    """Step 1: write how many keys each row sees. One program for each request: grid (requests,).

    visible          int32 [rows], to be written: position + 1
    query_start_loc  int32 [requests + 1]: request i owns the rows from entry i up to entry i + 1
    seq_lens         int32 [requests]: its keys, including those of the new rows, which are the last of them
    BLOCK            at least the rows of the longest request; `tl.arange(0, BLOCK)`

    Example: query_start_loc [0, 1, 6], seq_lens [10, 5] -> [10, 1, 2, 3, 4, 5].
    Trap: BLOCK is larger than most requests. Without a mask, a program writes into its neighbours' rows.
    """
    raise NotImplementedError("the rows of request tl.program_id(0)")


@triton.jit
def find_sequence(query_start_loc, tile, num_seqs, BLOCK_Q: tl.constexpr):
    """Step 2: find the request that a tile of BLOCK_Q rows belongs to. Kernels call it; it returns the request's index.

    Request i begins at tile query_start_loc[i] // BLOCK_Q + i. A tile belongs to the last request that does not begin
    after it. Halve the range until one is left (a `while` loop, as in Python): with n requests you may read at most
    log2(n) + 1 entries.

    Example: query_start_loc [0, 1, 6, 12], BLOCK_Q 4: tiles 0 to 5 belong to requests 0, 1, 1, 2, 2, 2.
    """
    raise NotImplementedError("bisection in query_start_loc")


@triton.jit
def ragged_kernel(
    out, q, keys, values, query_start_loc, key_start_loc, num_seqs, scale,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Step 3: compute the attention of all requests in one launch. Grid (rows // BLOCK_Q + requests, heads).

    out, q         [rows, heads, HEAD_DIM]; heads = GROUP * KV_HEADS, head h reads the keys of KV head h // GROUP
    keys, values   [all keys, KV_HEADS, HEAD_DIM]; request i owns keys key_start_loc[i] up to key_start_loc[i + 1]
    BLOCK_D        HEAD_DIM rounded up to a power of two: columns HEAD_DIM and up do not exist
    BLOCK_Q        rows of a tile;  BLOCK_T keys at a time

    Find the tile's request, load its rows, compute how many keys each sees, and let lesson 03's walk do the attention:

        attend_keys(query, keys, values, first_key, kv_head, end, visible, scale, KV_HEADS, HEAD_DIM, BLOCK_D, BLOCK_T)

    query [BLOCK_Q, BLOCK_D]; the request's keys are first_key up to first_key + end, and only those are read; row i
    sees the first visible[i] of them; float32 [BLOCK_Q, BLOCK_D] comes back. Store it with `.to(out.dtype.element_ty)`.

    Traps: the last tile of a request may have fewer rows than BLOCK_Q, and a tile may have none at all. Do not read
    keys that no row of the tile sees.
    """
    raise NotImplementedError("find the request, load its rows, attend_keys, store")
