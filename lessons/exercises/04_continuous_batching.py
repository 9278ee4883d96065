"""Exercise 04. Predict what the scheduler does, then write it.

Fill in the two functions, then ask what is still missing:

    make check N=04

Needed: lesson 04 up to "The mechanism". The solution is in vllm/04_continuous_batching.py; try first.
"""


def first_steps():
    """How many tokens does each request get in steps 1 to 4? Work it out on paper, and write the answer down.

    A step may have 12 tokens (`max_num_batched_tokens`), and 3 requests may run at once (`max_num_seqs`). Memory is
    ample. Four requests wait when the first step is put together, in this order:

        A: prompt 10, generates 3      C: prompt 12, generates 4
        B: prompt  4, generates 2      D: prompt  3, generates 2

    returns: a list of four dicts, one for each step, from the request's name to its tokens, in the order in which the
    scheduler gives them out; requests that get none are left out. Its form, with wrong numbers:

        [{"A": 1, "B": 1}, {"C": 5}, {"B": 2, "C": 1}, {"D": 7}]

    The check asks the engine's own scheduler.

    Traps: the step that computes a prompt's last token also samples the first new one, so a request that generates 3
    is in 3 steps if its prompt took one. A prompt may be cut anywhere. Nobody gets a place before somebody has left.
    """
    raise NotImplementedError("write down four dicts: the tokens of A, B, C and D in each step")


def schedule(running, waiting, token_budget, max_num_seqs):
    """Who gets how many tokens in the next step?

    running       list of requests, in the order in which they were admitted
    waiting       deque of requests, the first to be admitted at its left end
    token_budget  tokens that the step may have, all requests together
    max_num_seqs  how many requests may run at once
    returns       dict from request_id to tokens, in the order in which they were given out; nobody has 0 in it

    A request has a request_id, num_tokens (known tokens: its prompt and what it has sampled) and num_computed_tokens
    (those whose keys and values are in the cache). It wants the difference: a new request its whole prompt, a decoding
    one a single token. There are no phases, only this difference.

    1. Go through `running` in order. Give each what it wants, or what is left of the budget if that is less.
    2. Then admit from `waiting`, from the left, while there is budget left and fewer than max_num_seqs run: move the
       request to the end of `running` and give it what it wants, or the rest of the budget.
    3. Count what you give as computed at once: add it to num_computed_tokens.

    Traps: a long prompt is cut, not postponed. A request that would get nothing is not admitted. Running requests go
    first even if an old prompt waits; a budget below the batch leaves the last ones with nothing. Whoever was admitted
    in this step counts towards max_num_seqs.
    """
    raise NotImplementedError("running requests first, then admit, under one budget")
