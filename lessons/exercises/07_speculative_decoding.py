"""Exercise 07. Guess tokens, keep the guesses that the model would have made, and lose nothing of its distribution.

Fill in the functions, then ask what is still missing:

    make check N=07

Needed: lesson 07 to the end of "The mechanism". As soon as the checks of your `propose_ngram` and `verify` pass, the
same command runs the engine with them.
"""

import numpy as np  # np.maximum, np.argmax

from minivllm.platforms.triton_utils import tl, triton

# ---- a guess ---------------------------------------------------------------------------------------------------------


def propose_ngram(token_ids, min_n, max_n, k):
    """Take drafts from the request's own text: what followed the last tokens when they first occurred.

    token_ids     list of ints, the prompt and all that was generated; not to be changed
    min_n, max_n  shortest and longest suffix to look up, 1 <= min_n <= max_n
    k             the most drafts to return, 1 or more
    returns       a list of at most k ints, empty if no suffix of these lengths occurs earlier

    Take the longest suffix of at most max_n tokens that also occurs earlier, at its first occurrence, and return up to
    k tokens that follow there.

    Example: [1, 2, 3, 1, 2, 4, 1, 2], lengths 1 to 2: the suffix [1, 2] first occurs at index 0; k = 2 gives [3, 1].
    [5, 6, 7, 6], lengths 1 to 3: neither [6, 7, 6] nor [7, 6] occurs earlier, [6] does: k = 4 gives [7, 6].

    Traps: the suffix itself, at the end of the text, is not an earlier occurrence; but an earlier one may overlap it:
    in [8, 8, 8], [8, 8] occurs at index 0. A text may be shorter than max_n.
    """
    raise NotImplementedError("the longest suffix first, its first occurrence, what follows there")


# ---- exact, though guessed -------------------------------------------------------------------------------------------


def accept(p, q, drafts, uniforms):
    """Count the drafts that are accepted.

    p         [k + 1, vocab], a numpy array: row i is the model's distribution at draft i's position; the last row is
              that of the token after all drafts; not to be changed
    q         [k, vocab]: row i is the distribution from which draft i was drawn; 1 at one token where the drafter is
              certain, as for n-grams; not to be changed either
    drafts    list of k token ids; -1: there is no draft at this position, and none is accepted from here on
    uniforms  [k], random numbers from 0 up to, not including, 1
    returns   an int from 0 to k

    Draft x at position i is accepted with probability min(1, p[i, x] / q[i, x]): if its random number is smaller than
    that. The first rejected draft ends it.

    Example: p(x) = 0.3 and q(x) = 0.6: accepted if the random number is below 0.5.

    Traps: p[i, -1] is the last token. A token that the model never generates, p(x) = 0, is never accepted, not even if
    the random number is 0.
    """
    raise NotImplementedError("compare each random number with p / q, and stop at the first draft that fails")


def recovered(p, q, noise):
    """Draw the recovered token, which replaces a rejected draft, from the normalised max(p - q, 0).

    p, q     [vocab], numpy arrays: the two distributions at the draft's position; not to be changed
    noise    [vocab], random numbers with the density e^-x, one for each token
    returns  a token id, as an int

    With weights w, the token with the largest w / noise is drawn with probability w / sum(w): an exponential race,
    which the token with the shortest time, noise / w, wins. So there is no need to add anything up.

    Example: p = [0.5, 0.5], q = [0.8, 0.2]: only token 1 is left, whatever the noise.
    Trap: p itself is the wrong distribution. Tokens of which q has too much were proposed, and accepted, often enough.
    """
    raise NotImplementedError("where p exceeds q, divide the excess by the noise, and take the largest")


def verify(p, q, drafts, uniforms, noise):
    """Return the tokens of one step: the accepted drafts, and one more. They are distributed as the model's own.

    p, q, drafts, uniforms  as for `accept`; where drafts[i] is -1, q[i] is 0 for all tokens
    noise                   [k + 1, vocab], as for `recovered`
    returns                 a list of 1 to k + 1 ints

    If a draft was rejected, the last token is recovered from that draft's rows. If all were accepted, it is a bonus
    token: drawn from the last row of p.

    Trap: after two accepted drafts, row 2 decides what comes next.
    """
    raise NotImplementedError("accept, then one more token from the right row")


# ---- the kernel, for Triton's interpreter ----------------------------------------------------------------------------
#
# After the model's forward pass, all requests are verified in one launch. The host need not know which
# drafts are kept.


@triton.jit
def greedy_kernel(output, drafts, target, num_drafts, BLOCK: tl.constexpr):
    """Step 1: verify one request without randomness. Grid (1,).

    output      int32 [num_drafts + 1], to be written: the tokens of the step, then -1 up to its end
    drafts      int32 [num_drafts]; -1: no draft here, and none is accepted from here on
    target      int32 [num_drafts + 1]: the model's likeliest token at each position
    num_drafts  may be 0;  BLOCK: a power of two, more than num_drafts; `tl.arange(0, BLOCK)`

    A draft is accepted if it is the likeliest token, and all before it were accepted. After them comes the target at
    the next position, a bonus token or not.

    The count of accepted drafts is the first wrong position: `tl.min(tl.where(...), axis=0)`.

    Example: drafts [4, 7, 9], target [4, 8, 9, 5] -> [4, 8, -1, -1].
    Traps: the 9 is right, and too late. BLOCK is larger than the arrays.
    """
    raise NotImplementedError("load with masks, find the first wrong position, store")


@triton.jit
def ragged_kernel(output, drafts, target, draft_start, width, BLOCK: tl.constexpr):
    """Step 2: verify many requests, one a program, each with its own number of drafts. Grid (requests,).

    output       int32 [requests, width]; each row as in step 1, -1 up to its end
    drafts       int32 [all drafts]: those of request i begin at draft_start[i] and end before draft_start[i + 1]
    target       int32 [all drafts + requests]: each request has one more than it has drafts
    draft_start  int32 [requests + 1], starting at 0
    width        at most BLOCK; at least one more than the drafts of any request

    Example: draft_start [0, 2, 2, 3]: the targets of request 2 begin at 4, since each request before it has one more.
    """
    raise NotImplementedError("where do the drafts and the targets of request tl.program_id(0) begin?")


@triton.jit
def rejection_kernel(
    output, drafts, instead, p, q, uniforms, draft_start, width, vocab_size, BLOCK: tl.constexpr
):  # fmt: skip
    """Step 3: do step 2, but accept a draft if its random number is smaller than p / q. Grid (requests,).

    instead     int32 [all drafts + requests]: the token that follows if the drafts before it are accepted and no more
                are: the recovered token at each draft's position, and the bonus token at the last
    p           float32 [all drafts + requests, vocab_size];  q: float32 [all drafts, vocab_size]
    uniforms    float32 [all drafts]

    Read one element of p and one of q for each draft, not more: the vocabulary may have 200,000 tokens.

    Traps: p has more rows than q. At a position with -1, read nothing from p and q.
    """
    raise NotImplementedError("p and q at the drafts, then as before, with the token of `instead` after the drafts")
