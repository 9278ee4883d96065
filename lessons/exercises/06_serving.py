"""Exercise 06. Write what stands between engine and socket: a collector, stop strings, clients that leave; and a mask.

Fill in the functions that raise, then ask what is still missing:

    make check N=06

Needed: lesson 06 to the end of "The mechanism". No GPU and no network: the checks run an event loop whose clock is
virtual, and the kernels run in Triton's interpreter. As soon as the checks of the first three pass, the same command
runs a server with them, beside ours, with clients that read slowly and clients that leave.
"""

import asyncio  # asyncio.Event(), asyncio.ensure_future(...), asyncio.wait({...}, return_when=...), asyncio.gather

from minivllm.platforms.triton_utils import tl, triton

# ---- in the event loop -----------------------------------------------------------------------------------------------


class RequestOutputCollector:
    """Stands between the task that receives the engine's outputs and the reader of one request.

    The task must not wait for a slow reader, since it also serves all others. So the collector keeps what the reader
    has not read yet, as one output that grows. Everything runs in one event loop, in one thread: no locks.
    """

    def __init__(self) -> None:
        raise NotImplementedError("the unread output, an error, and something that a reader can wait for")

    def put(self, output) -> None:
        """Add an output, or an exception. Never wait.

        An output of the engine is a delta, which holds what is new since the one before:

        output.finished              True for the last one
        output.outputs               list of completions, each at most once; a request with n = 2 has two, and a delta
                                     may have either or both
        completion.index             which of them it is
        completion.text              str, the new text;  .token_ids: list[int], the new tokens
        completion.logprobs          list with an entry for each new token, or None if the request did not ask for them
        completion.finish_reason     None, or "stop", "length", ... in its last delta;  .stop_reason: what stopped it

        If an output is unread, join the new one to it, as if both had come at once: text, tokens and logprobs of each
        completion one after the other, `finished`, `finish_reason` and `stop_reason` of the later one. You may change
        the outputs. Keep an exception for the reader, and drop whatever comes after it.

        Traps: completion 1 need not be at index 1 of the list. A finished completion may be joined with another's
        delta.
        """
        raise NotImplementedError("join it to the unread output, and wake the reader")

    async def get(self):
        """Return everything unread as one output; wait if there is nothing. One reader calls it, again and again.

        Return what was put before an exception first. After that, raise the exception, in every later call.

        Example: put "a", put "b", get -> "ab"; get waits; put "c" -> the waiting get returns "c".

        Traps: a wake-up is lost if you clear an event after the output that it stood for has come. A reader may give
        up (`asyncio.wait_for` cancels a waiting `get`): nothing that comes then may be lost. Do not poll: wait until
        something has come.
        """
        raise NotImplementedError("wait until there is an unread output, and take it")


class StopStrings:
    """Finds stop strings in a text that comes in pieces. No character of a stop string is sent, nor anything after it.

    A stop string may begin in one piece and end three pieces later. So the end of the text that may begin one is held
    back until more has come; the rest is sent at once.

    Example, stop ["END"]: push("an EN") -> ("an ", None); push("t E") -> ("ENt ", None); push("ND of") -> ("", "END").
    """

    def __init__(self, stop: list[str]) -> None:
        """Take the stop strings. None of them is empty; the list may be."""
        raise NotImplementedError("the strings, and the text that is held back")

    def push(self, text_delta: str) -> tuple[str, str | None]:
        """Add a piece. Return the text that can be sent now, and the stop string that ended it, or None.

        The result is as if the text came character by character: the stop string whose last character comes first wins;
        if two end at once, the first in the list. Nothing is pushed after that.

        Traps: hold back as little as possible: the longest end of the text that begins any of the strings. With stop
        "aab", the first "a" of "aaa" can be sent. A false start ("EN" and then "t") is sent after all, and another may
        begin in it.
        """
        raise NotImplementedError("find the stop string that ends first, or hold back what may begin one")

    def flush(self) -> str:
        """Return the text that was held back, at the end of the text; nothing after a stop string."""
        raise NotImplementedError("the text that is held back belongs to the answer after all")


async def until_disconnected(work, disconnected):
    """Run `work`, and cancel it if the client leaves before it is done.

    work          a coroutine. Its own `finally` aborts the engine's request: that frees the request's blocks.
    disconnected  a coroutine that ends when the client has left, and not before; a socket that breaks ends it with an
                  exception, such as ConnectionResetError
    returns       what `work` returns (or raises what it raises); None if the client has left, in whichever way

    Whatever happens, neither of the two is still running when this returns: the other one was cancelled and has ended.

    Example: async def work(): try: await answer() finally: await abort()
    If the client leaves, abort() is under way as soon as `work` is cancelled, and must have ended when this returns.

    Traps: cancel() only requests: the `finally` of a cancelled task runs when the loop gets to it, and may take a
    while. A second cancel() interrupts that `finally`. If *you* are cancelled, because the server shuts down, `work`
    must end too, and your caller must learn of the cancellation: let CancelledError through. Do not poll for the end of
    one of the two: wait for it.
    """
    raise NotImplementedError("two tasks; wait for the first; cancel the other, and wait for its end")


# ---- the kernel, for Triton's interpreter ----------------------------------------------------------------------------
#
# A grammar allows some tokens at each position. It says so in a bitmask: token t is bit t % 32 (the lowest bit is 0) of
# word t // 32. The kernel sets the logits of all others to -inf, so that no sampler takes them.


@triton.jit
def mask_words_kernel(logits, bitmask):
    """Step 1: mask one row, one word a program. Grid: (words,), and the row has exactly 32 logits for each word.

    logits float32 [32 * words], changed in place; bitmask int32 [words].

    Read each word once; never read a logit, and write it only where its bit is 0.
    Useful: tl.arange(0, 32), >> on a word and a vector, tl.store(..., mask=...), float("-inf").

    Example: word 5 (binary ...101) allows tokens 0 and 2.
    Trap: a word whose bit 31 is set is negative.
    """
    raise NotImplementedError("load the word, look at its 32 bits, store -inf under a mask")


@triton.jit
def mask_rows_kernel(logits, bitmask, vocab_size):
    """Step 2: mask many rows, whose last word is not full. Grid: (rows, words), and tl.num_programs(1) is `words`.

    logits float32 [rows, vocab_size]; bitmask int32 [rows, words], words = ceil(vocab_size / 32). Ignore the
    bits of vocab_size and up: there, the next row's logits begin.
    """
    raise NotImplementedError("as before, in row tl.program_id(0), and no token beyond vocab_size - 1")


@triton.jit
def apply_grammar_bitmask_kernel(logits, bitmask, has_grammar, vocab_size, num_words, BLOCK: tl.constexpr):
    """Step 3: mask BLOCK words a program, and skip rows without a grammar. Grid: (rows, ceil(num_words / BLOCK)).

    has_grammar  int32 [rows]: 0 for a row whose request has no grammar, any other number for one that has one. Do not
                 read the words of a row without a grammar, nor write its logits.
    bitmask      int32 [rows, num_words]; the row of a request without a grammar may hold anything.
    BLOCK        words of a program, a power of two; the last program of a row has fewer.

    Shape [BLOCK, 32]: words as words[:, None], bits as tl.arange(0, 32)[None, :].
    """
    raise NotImplementedError("skip the row, or BLOCK words of it at once")
