"""Exercise 11. Memory has run out: choose which request gives everything back, what it keeps, and where it resumes.

Fill in the functions, then ask what is still missing:

    make check N=11

Needed: lesson 11 to the end of "The mechanism". As soon as the checks of your loop over the running requests,
and of `resume_at`, pass, the same command runs the engine with both, on a pool that is far too small.
"""

from minivllm.platforms.triton_utils import tl, triton

# ---- on paper --------------------------------------------------------------------------------------------------------


def first_steps():
    """Work out on paper which request is preempted in which step, and how many tokens are computed twice.

    5 blocks of 2 slots, 8 tokens a step, first come, first served; no prefix cache. Before step 1 two requests arrive,
    in this order:
        A: prompt 3, generates 5
        B: prompt 3, generates 4

    returns: (steps, again). `steps` has one list for each step until both have ended: the names of the requests
    preempted in it. `again` is how many tokens are computed a second time. The form, with wrong values:

        ([[], ["A"], []], 7)

    Traps: a token takes a slot in the step in which it is computed, the step after it was sampled. A preempted request
    is not admitted in the same step.
    """
    raise NotImplementedError("write down a list of lists, and a number")


# ---- the victim, and what becomes of it ------------------------------------------------------------------------------


def victim(running, policy):
    """Return the running request to preempt; leave `running` unchanged.

    running  requests in the order of their admission; each has `priority` and `arrival_time`
    policy   "fcfs": the one that was admitted last. "priority": the one with the greatest priority number (it is the
             least urgent); of equals, the one that arrived last; of those, any

    Trap: the last one in the list need not be the one that arrived last.
    """
    raise NotImplementedError("one rule for each policy")


def preempt(request, waiting, memory):
    """Preempt a request by recompute: free its blocks and put it back into the queue.

    request  has `request_id`, `status`, `num_computed_tokens`, `spec_token_ids` (drafts: guessed next tokens) and
             `num_preemptions`; its tokens, those that it has generated among them, stay
    waiting  the waiting queue: `waiting.prepend_requests([request, ...])` puts requests before all others, as far as
             the policy allows it
    memory   `memory.free(request_id)` frees all its blocks

    Afterwards none of its tokens counts as computed; its drafts are gone, and it counts one more preemption. The
    status is RequestStatus.PREEMPTED (`minivllm.core.request`).
    """
    raise NotImplementedError("free, reset, count, and put it back")


def schedule_running(running, waiting, memory, token_budget, policy="fcfs"):
    """Give tokens to the running requests, in the order of `running`; when no block is free, preempt one.

    running       a list of requests; a preempted one leaves it
    memory        `memory.wanted(request)`: tokens that it would compute in this step
                  `memory.allocate(request, num_tokens)`: takes the blocks for them; returns False if there are too few,
                  and then changes nothing
    token_budget  tokens that the step may have
    returns       (scheduled, preempted): tokens by request id, in the order of scheduling, without zeros; and
                  the requests that were preempted, in order

    Give each request as many tokens as it wants, or what the budget has left. Skip a request that wants none. If there
    are no blocks, preempt the `victim`, and try again with the same number of tokens, until they fit or the request
    itself was the victim. Then go on with the next one, as long as the budget has anything left.

    Example: A and B want 1 token each, and no block is free. `victim` returns B: B is preempted, A gets its token.
    Traps, by priority: the victim may come before the request in the list, so that all after it move up by one. It may
    have got tokens in this very step: they go back to the budget, and it is not in `scheduled`.
    """
    raise NotImplementedError("a loop over positions, and inside it a loop until there are blocks")


def resume_at(num_tokens, num_hit_blocks, block_size):
    """Return the first token to compute when a request is admitted, for the first time or again.

    num_tokens      all known tokens, prompt and output
    num_hit_blocks  how many of its first blocks were found in the prefix cache
    returns         a multiple of block_size

    Its last token is computed in any case: the logits after it are needed.

    Examples: (10, 2, 4) -> 8. (8, 2, 4) -> 4. (9, 0, 4) -> 0.
    """
    raise NotImplementedError("whole blocks, and never all of it")


# ---- what it costs ---------------------------------------------------------------------------------------------------


def recompute_seconds(num_tokens, parameters, flops):
    """Return the seconds that it takes to compute `num_tokens` tokens again, at `flops` operations a second.

    A token costs 2 operations for each parameter. Example: (10, 50, 1000) -> 1.0.
    """
    raise NotImplementedError("operations over operations a second")


def swap_seconds(num_tokens, bytes_per_token, bandwidth, directions=2):
    """Return the seconds that it takes to copy their keys and values, at `bandwidth` bytes a second.

    directions  2: out to the host and back. 1: only back, where the host has them already

    Example: (10, 50, 1000) -> 1.0, and 0.5 in one direction.
    """
    raise NotImplementedError("bytes over bytes a second, once or twice")


def break_even_bandwidth(bytes_per_token, parameters, flops, directions=2):
    """Return the bandwidth at which recompute and swap take the same time. Set the two formulas equal.

    The number of tokens cancels, since both leave attention out.

    Example: (50, 50, 1000) -> 1000.0.
    """
    raise NotImplementedError("bytes of a token in the time in which it is computed")


def effective_bandwidth(piece_bytes, bandwidth, seconds_per_copy):
    """Return the bytes a second of a row of copies of `piece_bytes` each, if each takes `seconds_per_copy` to start.

    Example: (100, 1000, 0.1) -> 500.0.
    """
    raise NotImplementedError("the bytes of a copy over the time of a copy")


# ---- the kernel, for Triton's interpreter ----------------------------------------------------------------------------


@triton.jit
def block_of(addresses, tensor, block, words):
    """Step 1: return a pointer to the first word of a block in one tensor of the cache.

    addresses  int64 [tensors]: where each tensor begins in memory, in bytes. Turn such a number into a pointer to
               32-bit words with `.to(tl.pointer_type(tl.int32))`
    tensor     which of them; block: which block; words: 32-bit words of a block in one tensor

    Trap: `block * words` can be too large for 32 bits: `block.to(tl.int64)`.
    """
    raise NotImplementedError("load an address, make it a pointer, and add")


@triton.jit
def record_of(staging, slot, tensor, num_tensors, words):
    """Step 2: return a pointer to where that piece of a block is in the staging buffer.

    staging  a pointer to int32 [slots, tensors, words]: a slot has the pieces of all tensors, one after another
    """
    raise NotImplementedError("row-major")


@triton.jit
def swap_kernel(addresses, blocks, slots, staging, words, TO_STAGING: tl.constexpr, BLOCK: tl.constexpr):
    """Step 3: copy blocks of all tensors to slots of `staging`, or back. Grid (moves, tensors, ceil(words / BLOCK)).

    blocks, slots  int32 [moves]: block blocks[i] belongs to slot slots[i]; where blocks[i] is -1, nothing moves
    words          of a block in one tensor; program (i, t, p) moves words p * BLOCK up to (p + 1) * BLOCK of tensor t
    TO_STAGING     from the cache to the staging buffer, or else back

    `tl.num_programs(1)` is the number of tensors. Trap: the last program has words beyond the block's end.
    """
    raise NotImplementedError("two pointers, a mask, a load and a store")
