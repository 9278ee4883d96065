"""Exercise 06. What stands between the engine and a socket: a collector, stop strings, clients that leave; and a mask.

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
    """Between the task that receives the engine's outputs and the reader of one request.

    The task must not wait for a slow reader: it also serves all others. So what the reader has not read yet is kept
    here as one output, and grows. Everything runs in one event loop, in one thread: no locks.
    """

    def __init__(self) -> None:
        raise NotImplementedError("what is unread, an error, and something that a reader can wait for")

    def put(self, output) -> None:
        """Add an output, or an exception. Never waits.

        An output of the engine is what is new since the one before (a delta):

        output.finished              True for the last one
        output.outputs               list of completions, each at most once; a request with n = 2 has two, and a delta
                                     may have either or both
        completion.index             which of them it is
        completion.text              str, the new text;  .token_ids: list[int], the new tokens
        completion.logprobs          list with an entry for each new token, or None if nobody asked for them
        completion.finish_reason     None, or "stop", "length", ... in its last delta;  .stop_reason: what stopped it

        If an output is unread, join the new one to it, as if both had come at once: text, tokens and logprobs of each
        completion one after the other, `finished`, `finish_reason` and `stop_reason` of the later one. You may change
        the outputs. An exception is kept for the reader; what comes after it is dropped.

        Traps: completion 1 need not be at place 1. A finished completion may be joined with another's delta.
        """
        raise NotImplementedError("join it to what is unread, and wake the reader")

    async def get(self):
        """Return what is unread, as one output; wait if there is nothing. One reader calls it, again and again.

        Whatever was put before an exception is returned first. After that, raise the exception, in every later call.

        Example: put "a", put "b", get -> "ab"; get waits; put "c" -> the waiting get returns "c".

        Traps: a wake-up is lost if you clear an event after the output that it stood for has come. A reader may give
        up (`asyncio.wait_for` cancels a `get` that waits): nothing that comes then may be lost. Do not look again and
        again whether something has come: wait until it has.
        """
        raise NotImplementedError("wait until something is unread, take it")


class StopStrings:
    """Stop strings in a text that comes in pieces. No character of one is sent, nor anything after it.

    One may begin in one piece and end in the third one after it. So the end of the text that may begin a stop string is
    held back until more has come; the rest is sent at once.

    Example, stop ["END"]: push("an EN") -> ("an ", None); push("t E") -> ("ENt ", None); push("ND of") -> ("", "END").
    """

    def __init__(self, stop: list[str]) -> None:
        """`stop`: the strings, none of them empty; the list may be."""
        raise NotImplementedError("the strings, and the text that is held back")

    def push(self, text_delta: str) -> tuple[str, str | None]:
        """Add a piece. Return the text that can be sent now, and the stop string that ended it, or None.

        The result is that of a text that comes character by character: the stop string whose last character comes
        first wins; if two end at once, the one that stands first in the list. Nothing is pushed after that.

        Traps: hold back as little as possible, the longest end of the text that begins any of the strings. With stop
        "aab", of "aaa" the first "a" can be sent. A false start ("EN" and then "t") is sent after all, and another may
        begin in it.
        """
        raise NotImplementedError("find the stop string that ends first, or hold back what may begin one")

    def flush(self) -> str:
        """The text has ended without a stop string: return what was held back. After a stop string that is nothing."""
        raise NotImplementedError("what is held back belongs to the text after all")


async def until_disconnected(work, disconnected):
    """Run `work`, unless the client leaves before it is done; then cancel it.

    work          a coroutine. Its own `finally` aborts the engine's request: that frees the request's blocks.
    disconnected  a coroutine that ends when the client has left, and not before; a socket that breaks ends it with an
                  exception, such as ConnectionResetError
    returns       what `work` returns (or raises what it raises); None if the client has left, however

    Whatever happens, when this returns neither of the two runs any more: the other one was cancelled, and has ended.

    Example: async def work(): try: await answer() finally: await abort()
    If the client leaves, abort() is under way as soon as `work` is cancelled, and must have ended when this returns.

    Traps: cancel() only asks: the `finally` of a cancelled task runs when the loop comes to it, and may take a while.
    A second cancel() reaches into that `finally`, and cuts it off. If *you* are cancelled, since the server ends,
    `work` must end too, and whoever cancelled you must learn that you were: let CancelledError through. Do not look
    from time to time whether one of the two has ended: wait until it has.
    """
    raise NotImplementedError("two tasks; wait for the first; cancel the other, and wait for its end")


# ---- the kernel, for Triton's interpreter ----------------------------------------------------------------------------
#
# A grammar allows some tokens at each place. It says so in a bitmask: token t is bit t % 32 (the lowest bit is 0) of
# word t // 32. The kernel makes the logits of all others -inf, so that no sampler takes them.


@triton.jit
def mask_words_kernel(logits, bitmask):
    """Step 1: one row, one word a program. Grid: (words,), and the row has exactly 32 logits for each word.

    logits float32 [32 * words], changed in place; bitmask int32 [words].

    A word is read once; a logit is never read, and written only where its bit is 0.
    Useful: tl.arange(0, 32), >> on a word and a vector, tl.store(..., mask=...), float("-inf").

    Example: word 5 (binary ...101) leaves tokens 0 and 2.
    Trap: a word whose bit 31 is set is negative.
    """
    raise NotImplementedError("load the word, look at its 32 bits, store -inf under a mask")


@triton.jit
def mask_rows_kernel(logits, bitmask, vocab_size):
    """Step 2: many rows, and a last word that is not full. Grid: (rows, words), and tl.num_programs(1) is `words`.

    logits float32 [rows, vocab_size]; bitmask int32 [rows, words], words = ceil(vocab_size / 32). The bits from
    vocab_size on mean nothing: there, the next row's logits begin.
    """
    raise NotImplementedError("as before, in row tl.program_id(0), and no token from vocab_size on")


@triton.jit
def apply_grammar_bitmask_kernel(logits, bitmask, has_grammar, vocab_size, num_words, BLOCK: tl.constexpr):
    """Step 3: BLOCK words a program, and rows without a grammar. Grid: (rows, ceil(num_words / BLOCK)).

    has_grammar  int32 [rows]: 0 for a row whose request has no grammar, any other number for one that has one. Words of
                 a row without a grammar are not read, its logits not written.
    bitmask      int32 [rows, num_words]; of a row without a grammar it holds anything.
    BLOCK        words of a program, a power of two; the last program of a row has fewer.

    Shape [BLOCK, 32]: words as words[:, None], bits as tl.arange(0, 32)[None, :].
    """
    raise NotImplementedError("skip the row, or BLOCK words of it at once")
