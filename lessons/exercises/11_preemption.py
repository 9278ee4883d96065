"""Exercise 11. Memory has run out: which request gives everything back, what it keeps, and from where it goes on.

Fill in the functions, then ask what is still missing:

    make check N=11

Needed: lesson 11 to the end of "The mechanism". As soon as the checks of your loop over those that run, and of
`resume_at`, pass, the same command runs the engine with both, on a pool that is far too small.
"""

from minivllm.platforms.triton_utils import tl, triton

# ---- on paper --------------------------------------------------------------------------------------------------------


def first_steps():
    """Who is preempted in which step, and how many tokens are computed twice? Work it out on paper.

    5 blocks of 2 slots, 8 tokens a step, first come, first served; no block is found again. Before step 1 come, in this
    order:
        A: prompt 3, generates 5
        B: prompt 3, generates 4

    returns: (steps, again). `steps` has one list for each step until both have ended: the names of those who are
    preempted in it. `again` is how many tokens are computed a second time. Its form, with wrong values:

        ([[], ["A"], []], 7)

    Traps: a token takes a slot in the step in which it is computed, that is the step after it was sampled. Who is
    preempted is not admitted in the same step.
    """
    raise NotImplementedError("write down a list of lists, and a number")


# ---- the victim, and what becomes of it ------------------------------------------------------------------------------


def victim(running, policy):
    """Who of those that run is preempted? Returns the request; `running` stays as it is.

    running  requests in the order of their admission; each has `priority` and `arrival_time`
    policy   "fcfs": whoever was admitted last. "priority": the one with the greatest priority number (it is the least
             urgent); of equals, the one that arrived last; of those, any

    Trap: the last one in the list need not be the one that arrived last.
    """
    raise NotImplementedError("one rule for each policy")


def preempt(request, waiting, memory):
    """Preempt by recompute.

    request  has `request_id`, `status`, `num_computed_tokens`, `spec_token_ids` (drafts, a list) and `num_preemptions`;
             its tokens, those that it has generated among them, stay
    waiting  the queue of those that wait: `waiting.prepend_requests([request, ...])` puts requests before all others,
             as far as the policy allows it
    memory   `memory.free(request_id)` takes all its blocks away

    Afterwards it is as if nothing of it had been computed; its drafts are gone, and it counts one preemption more. The
    status is RequestStatus.PREEMPTED (`minivllm.core.request`).
    """
    raise NotImplementedError("free, reset, count, and put it back")


def schedule_running(running, waiting, memory, token_budget, policy="fcfs"):
    """Tokens for those that run, in the order of `running`; when no block is free, somebody is preempted.

    running       a list of requests; those that are preempted leave it
    memory        `memory.wanted(request)`: tokens that it would compute in this step
                  `memory.allocate(request, num_tokens)`: takes the blocks for them; False if there are too few, and then
                  nothing has changed
    token_budget  tokens that the step may have
    returns       (scheduled, preempted): tokens by request id, in the order of scheduling, without zeros; and
                  the requests that were preempted, in order

    For each request: as many tokens as it wants and as the budget has left. None wanted: it is skipped. No blocks:
    preempt the `victim`, and try again with the same number of tokens, until they fit or the request itself was the
    victim. Then go on with the next one, as long as the budget has anything left.

    Example: A and B want 1 token each, and no block is free. `victim` says B: B is preempted, A gets its token.
    Traps, by priority: the victim may stand before the request, so that all behind it move up by one. It may have got
    tokens in this very step: they go back to the budget, and it is not in `scheduled`.
    """
    raise NotImplementedError("a loop over positions, and in it a loop until there are blocks")


def resume_at(num_tokens, num_hit_blocks, block_size):
    """From which token on is a request computed when it is admitted, for the first time or again?

    num_tokens      all that it knows, prompt and output
    num_hit_blocks  so many of its first blocks were found in the prefix cache
    returns         a multiple of block_size

    Its last token is computed in any case: the logits after it are needed.

    Examples: (10, 2, 4) -> 8. (8, 2, 4) -> 4. (9, 0, 4) -> 0.
    """
    raise NotImplementedError("whole blocks, and never all of it")


# ---- what it costs ---------------------------------------------------------------------------------------------------


def recompute_seconds(num_tokens, parameters, flops):
    """How long does it take to compute so many tokens again, at `flops` operations a second?

    A token costs 2 operations for each parameter. Example: (10, 50, 1000) -> 1.0.
    """
    raise NotImplementedError("operations over operations a second")


def swap_seconds(num_tokens, bytes_per_token, bandwidth, directions=2):
    """How long does it take to copy their keys and values, at `bandwidth` bytes a second?

    directions  2: out to the host and back. 1: only back, where the host has them already

    Example: (10, 50, 1000) -> 1.0, and 0.5 in one direction.
    """
    raise NotImplementedError("bytes over bytes a second, once or twice")


def break_even_bandwidth(bytes_per_token, parameters, flops, directions=2):
    """At which bandwidth do both take the same time? Set the two formulas equal.

    The number of tokens cancels, since both leave attention out.

    Example: (50, 50, 1000) -> 1000.0.
    """
    raise NotImplementedError("bytes of a token in the time in which it is computed")


def effective_bandwidth(piece_bytes, bandwidth, seconds_per_copy):
    """Bytes a second of many copies in a row, each of `piece_bytes`, if each takes `seconds_per_copy` to begin.

    Example: (100, 1000, 0.1) -> 500.0.
    """
    raise NotImplementedError("the bytes of a copy over the time of a copy")


# ---- the kernel, for Triton's interpreter ----------------------------------------------------------------------------


@triton.jit
def block_of(addresses, tensor, block, words):
    """Step 1: a pointer to the first word of a block in one tensor of the cache.

    addresses  int64 [tensors]: where each tensor begins in memory, in bytes. Turn such a number into a pointer to
               32-bit words with `.to(tl.pointer_type(tl.int32))`
    tensor     which of them; block: which block; words: 32-bit words of a block in one tensor

    Trap: `block * words` can be too large for 32 bits: `block.to(tl.int64)`.
    """
    raise NotImplementedError("load an address, make it a pointer, and add")


@triton.jit
def record_of(staging, slot, tensor, num_tensors, words):
    """Step 2: a pointer to where that piece lies in the staging buffer.

    staging  a pointer to int32 [slots, tensors, words]: a slot has the pieces of all tensors, one after another
    """
    raise NotImplementedError("row-major")


@triton.jit
def swap_kernel(addresses, blocks, slots, staging, words, TO_STAGING: tl.constexpr, BLOCK: tl.constexpr):
    """Step 3: blocks of all tensors to slots of the staging buffer, or back. Grid (moves, tensors, ceil(words / BLOCK)).

    blocks, slots  int32 [moves]: block blocks[i] belongs to slot slots[i]; where blocks[i] is -1, nothing moves
    words          of a block in one tensor; program (i, t, p) moves words p * BLOCK up to (p + 1) * BLOCK of tensor t
    TO_STAGING     from the cache to the staging buffer, or else back

    `tl.num_programs(1)` is the number of tensors. Trap: the last program's words that are no longer the block's.
    """
    raise NotImplementedError("two pointers, a mask, a load and a store")
