"""Check the part of exercise 06 that needs nothing but Python: a page runs these checks, too."""

import asyncio
import random
import weakref
from dataclasses import dataclass, field

from minivllm_lab.checks.virtual_loop import run_virtual, turns

# ---- the collector ---------------------------------------------------------------------------------------------------


@dataclass
class Completion:
    """Holds the delta of one completion, as the engine sends it."""

    index: int
    text: str
    token_ids: list
    logprobs: list | None = None
    finish_reason: str | None = None
    stop_reason: str | None = None


@dataclass
class Output:
    """Holds the delta of a request, as the engine sends it; nothing here joins two of them."""

    outputs: list
    finished: bool = False
    request_id: str = "r"
    num_cached_tokens: int = 0


class EngineDead(Exception):
    """Stands for an exception whose class no collector knows by name."""


def delta(*tokens, index=0, logprobs=False, finish_reason=None, finished=None):
    """Make an output with one completion, whose text is a letter for each token: a for 0, b for 1."""
    text = "".join(chr(ord("a") + token % 26) for token in tokens)
    entries = [{token: -float(token)} for token in tokens] if logprobs else None
    stop_reason = "the stop string" if finish_reason == "stop" else None
    one = Completion(index, text, list(tokens), entries, finish_reason, stop_reason)
    return Output([one], finished=finish_reason is not None if finished is None else finished)


def with_collector(module, work):
    """Return the result of `work(collector)` in an event loop without a clock."""

    async def run():
        return await work(module.RequestOutputCollector())

    return run_virtual(run, "your get")


def text_of(output):
    """Return the text of the first completion; report an output that is not one."""
    assert output is not None, "get returns None: does it return before something is there?"
    assert not isinstance(output, Exception), f"get returns the exception {output!r} in place of raising it"
    assert not isinstance(output, list | tuple), f"get returns a {type(output).__name__}, not one output"
    return output.outputs[0].text


def check_what_is_put_can_be_read(module):
    """An output that was put before the reader asks is returned at once."""

    async def work(collector):
        said = collector.put(delta(0))
        assert not asyncio.iscoroutine(said), "put must not be a coroutine: the task that calls it does not wait"
        return text_of(await collector.get())

    found = with_collector(module, work)
    assert found == "a", f"put a, get: {found!r}"


def check_a_reader_waits_and_is_woken(module):
    """A reader that comes first waits without polling, and the next output wakes it."""

    async def work(collector):
        for token in range(3):
            reading = asyncio.ensure_future(collector.get())
            before = turns()
            await asyncio.sleep(1.3)
            assert not reading.done(), "get returned though nothing was put"
            asked = turns() - before
            assert asked < 20, f"the loop turned {asked} times in the 1.3 s in which get waited: does it ask in a loop?"
            put_at = asyncio.get_running_loop().time()
            collector.put(delta(token))
            found = text_of(await reading)
            assert found == "abc"[token], f"put {'abc'[token]!r} while get waits: it returns {found!r}"
            late = asyncio.get_running_loop().time() - put_at
            assert not late, f"get returned {late:g} s after the put: put must wake it; do not look from time to time"

    with_collector(module, work)


def check_unread_deltas_are_joined(module):
    """Three unread outputs become one: text, tokens, logprobs, and how it ended."""

    async def work(collector):
        for output in (
            delta(0, logprobs=True),
            delta(1, 2, logprobs=True),
            delta(3, logprobs=True, finish_reason="stop"),
        ):
            collector.put(output)
        return await collector.get()

    found = with_collector(module, work)
    text, (one, *more) = text_of(found), found.outputs
    hint = {"d": ": only the last one is left", "a": ": only the first one is left"}.get(text, "")
    hint = ": the order is lost" if sorted(text) == list("abcd") and text != "abcd" else hint
    assert text == "abcd", f"a, bc and d were put, and get returns {text!r}{hint}"
    assert not more, f"{1 + len(more)} completions, and all deltas were of completion 0: join them by their index"
    assert one.token_ids == [0, 1, 2, 3], f"the text is joined, and the tokens are {one.token_ids}"
    logprobs = [next(iter(entry)) for entry in one.logprobs or []]
    assert logprobs == [0, 1, 2, 3], f"four tokens, and log probabilities of {logprobs}"
    assert one.finish_reason == "stop", f"the last delta said stop, and finish_reason is {one.finish_reason!r}"
    assert one.stop_reason == "the stop string", f"stop_reason is {one.stop_reason!r}: what stopped it is lost"
    assert found.finished, "the last delta was the request's last, and `finished` is lost"


def check_no_more_is_kept_than_one_output(module):
    """However many outputs are unread, they are one output, after each one that comes."""

    async def work(collector):
        kept = []
        for token in range(100):
            output = delta(token, 0, index=token % 3, finished=False)
            kept.append(weakref.ref(output))
            collector.put(output)
            del output
            number = sum(one() is not None for one in kept)
            assert number <= 2, f"{number} outputs are kept after {token + 1} puts: join each when it comes"
        return await collector.get()

    found = with_collector(module, work)
    text_of(found)
    indices = sorted(one.index for one in found.outputs)
    assert indices == [0, 1, 2], f"completions 0, 1 and 2 were put, and {indices} came"
    for one in found.outputs:
        expected = [number for token in range(one.index, 100, 3) for number in (token, 0)]
        where = f"100 unread outputs, completion {one.index}"
        assert len(one.text) == len(expected), f"{where}: {len(expected)} letters were put, and {len(one.text)} came"
        assert len(one.token_ids) == len(expected), f"{where}: of {len(expected)} tokens {len(one.token_ids)} came"
        assert one.token_ids == expected, f"{where}: its tokens came in another order"


def check_completions_are_joined_by_their_index(module):
    """With n = 2, each completion of a request grows by its own deltas, wherever they are in an output."""

    async def work(collector):
        both = Output([delta(1, index=1).outputs[0], delta(0, index=0).outputs[0]])
        only, rest = delta(2, index=0, finish_reason="length", finished=False), delta(3, index=1)
        for output in (delta(25, index=1), both, only, rest):
            collector.put(output)
        return await collector.get()

    found = with_collector(module, work)
    assert found is not None, "get returns None: does it return before something is there?"
    texts = {}
    for one in found.outputs:
        assert one.index not in texts, f"completion {one.index} is in the output twice"
        texts[one.index] = one.text
    expected = {0: "ac", 1: "zbd"}
    hint = " Are they joined by their place in the list?" if sorted("".join(texts.values())) == sorted("aczbd") else ""
    assert texts == expected, f"the texts by completion are {texts}, and {expected} is right.{hint}"
    reasons = {one.index: one.finish_reason for one in found.outputs}
    lost = "its end is lost when the other one goes on"
    assert reasons[0] == "length", f"completion 0 ended by its length, and has {reasons[0]!r}: {lost}"
    assert reasons[1] is None, f"completion 1 has not ended, and has {reasons[1]!r}"
    assert not found.finished, "one completion of two has ended, so the request is not finished"


def check_nothing_is_read_twice(module):
    """An output that was read is gone and no longer grows, and log probabilities that were not requested stay None."""

    async def work(collector):
        collector.put(delta(0))
        first = await collector.get()
        collector.put(delta(1))
        assert text_of(first) == "a", (
            f"an output that was read has grown to {text_of(first)!r}: it still is the unread one"
        )
        second = text_of(await collector.get())
        assert second == "b", f"a was read, then b was put: get returns {second!r}"
        collector.put(delta(2))
        collector.put(delta(3))
        joined = await collector.get()
        assert joined.outputs[0].logprobs is None, f"nobody asked for logprobs: {joined.outputs[0].logprobs}"
        reading = asyncio.ensure_future(collector.get())
        await asyncio.sleep(1)
        assert not reading.done(), "everything was read, and get does not wait: the event was not cleared"

    with_collector(module, work)


def check_no_wake_up_is_lost(module):
    """However the engine and a reader take turns, each token comes once, in order, and the reader ends."""

    async def work(collector, seed):
        draw, seen = random.Random(seed), []

        async def engine():
            for token in range(12):
                collector.put(delta(token, finish_reason="length" if token == 11 else None))
                if draw.random() < 0.6:
                    await asyncio.sleep(draw.choice((0, 0, 1)))

        running, finished = asyncio.ensure_future(engine()), False
        while not finished:
            if draw.random() < 0.6:
                await asyncio.sleep(draw.choice((0, 0, 1, 2)))
            output = await collector.get()
            text_of(output)
            seen += output.outputs[0].token_ids
            finished = output.finished
            assert finished or not running.done() or seen[-1] < 11, "the last token has come, and finished is lost"
        await running
        assert seen == list(range(12)), f"tokens 0 to 11 were put, and {seen} came"

    for seed in range(40):
        with_collector(module, lambda collector, seed=seed: work(collector, seed))


def check_a_reader_that_gives_up_loses_nothing(module):
    """A `get` that is cancelled while it waits, or just when something comes, loses no output."""

    async def work(collector):
        try:
            await asyncio.wait_for(collector.get(), 1)
            raise AssertionError("get returned though nothing was put")
        except asyncio.TimeoutError:
            pass
        collector.put(delta(0))
        found = text_of(await collector.get())
        assert found == "a", f"a reader gave up, then a was put: the next get returns {found!r}"
        reading = asyncio.ensure_future(collector.get())
        await asyncio.sleep(0)
        collector.put(delta(1))
        reading.cancel()
        came = (await asyncio.gather(reading, return_exceptions=True))[0]
        assert isinstance(came, asyncio.CancelledError), f"get was cancelled, and ended with {came!r}: let it through"
        collector.put(delta(2))
        found = text_of(await collector.get())
        assert found == "bc", f"a reader was cancelled as b came, then c came: get returns {found!r}, not 'bc'"

    with_collector(module, work)


def check_an_error_comes_last(module):
    """Outputs before an exception are read first; then every get raises it, and nothing comes after it."""

    async def caught(collector):
        try:
            found = await collector.get()
        except ConnectionError as error:
            return error
        return text_of(found)

    async def work(collector):
        collector.put(delta(0))
        died = ConnectionError("it has died")
        collector.put(died)
        collector.put(delta(1))
        first = await caught(collector)
        assert first != "ab", "what came after the exception was joined to what came before it"
        overtaken = "a was put, then an exception: the exception overtook a, and a is lost"
        assert not isinstance(first, Exception), overtaken
        assert first == "a", f"a was put, then an exception: get returns {first!r}"
        for which in ("second", "third"):
            found = await caught(collector)
            assert found is died, f"after the exception, the {which} get gives {found!r}, not the one that was put"

    async def waiting(collector):
        reading = asyncio.ensure_future(collector.get())
        await asyncio.sleep(1)
        collector.put(EngineDead("it has died"))
        await asyncio.wait({reading})
        told = not reading.cancelled() and isinstance(reading.exception(), EngineDead)
        assert told, f"an exception was put while get waits, and get does not raise it: {reading}"

    with_collector(module, work)
    with_collector(module, waiting)


# ---- stop strings ----------------------------------------------------------------------------------------------------


def played(module, stop, pieces):
    """Return what was sent after each piece, the stop string found, and what flush returned."""
    stops, sent, stopped = module.StopStrings(list(stop)), [], None
    for piece in pieces:
        answer = stops.push(piece)
        assert isinstance(answer, tuple) and len(answer) == 2, (
            f"push returns {answer!r}, not (text, stop string or None)"
        )
        text, stopped = answer
        assert isinstance(text, str), f"the text to send is {text!r}"
        sent.append(text)
        if stopped is not None:
            break
    rest = stops.flush()
    assert isinstance(rest, str), f"flush returns {rest!r}"
    return sent, stopped, rest


def by_character(stop, text):
    """Return what may be sent of a text, and the stop string that ends it: character by character, the slow way."""
    for end in range(1, len(text) + 1):
        for one in stop:
            if text[:end].endswith(one):
                return text[: end - len(one)], one
    return text, None


def assert_played(module, stop, pieces, expected, hint=""):
    """Check that the pieces give this text in all, flush included, and this stop string."""
    sent, stopped, rest = played(module, stop, pieces)
    where = f"stop {stop}, pieces {pieces}"
    assert stopped == expected[1], f"{where}: stopped by {stopped!r}, and {expected[1]!r} is right. {hint}"
    text = "".join(sent)
    shown = text + rest
    if stopped is not None:
        assert not rest, f"{where}: flush gives {rest!r} after a stop string; nothing may follow"
        more = "something of the stop string was sent before it was complete" if len(text) > len(expected[0]) else hint
        assert text == expected[0], f"{where}: sent {text!r}, and {expected[0]!r} is right. {more}"
        return
    forgotten = "What is held back at the end belongs to the text: is it forgotten?" if shown != expected[0] else ""
    assert shown == expected[0], f"{where}: {shown!r} in all, and {expected[0]!r} is right. {forgotten} {hint}"


def check_text_without_a_stop_string_is_sent_at_once(module):
    """A piece that cannot begin a stop string is sent as it comes."""
    for stop in ([], ["END"]):
        sent, stopped, rest = played(module, stop, ["one ", "", "two", " three"])
        assert stopped is None, f"stop {stop}: stopped by {stopped!r}"
        assert sent == ["one ", "", "two", " three"], f"stop {stop}: 'one ', '', 'two', ' three' are sent as {sent}"
        assert rest == "", f"stop {stop}: flush gives {rest!r}, and everything was sent"


def check_a_stop_string_ends_the_text(module):
    """The text before a stop string is sent; the stop string is not, nor what follows it in the same piece."""
    assert_played(module, ["END"], ["an END of it"], ("an ", "END"))
    assert_played(module, ["END"], ["END"], ("", "END"))
    assert_played(module, ["END", "\n"], ["a\nb END"], ("a", "\n"), "The one that comes first in the text wins.")
    as_it_is = "It is that string and no pattern: dots, brackets, blanks and capitals are what they are."
    for stop in ("END", "E.D", "(a", " b", "$"):
        assert_played(module, [stop], ["an end, ENDO", f"; a\n\nb{stop}c"], _first_of(stop), as_it_is)
    many = [*"abcdefgh"]
    assert_played(module, many, ["xyzh"], ("xyz", "h"), "Each of the strings counts, however many there are.")
    blank = "\r\n\t x\0\u2028"
    assert_played(module, ["END"], [f"{blank}END"], (blank, "END"), "What cannot be seen is text, too.")
    long = "x" * 5000
    assert_played(module, ["END"], [f"{long}END"], (long, "END"), "A piece may be long.")


def _first_of(stop):
    """Return what becomes of the text above if `stop` is the only stop string."""
    return by_character([stop], f"an end, ENDO; a\n\nb{stop}c")


def check_a_stop_string_may_come_in_pieces(module):
    """Cut anywhere, into two, three or single characters: the same text, the same stop string."""
    text, hint = "an END of it", "It may begin in one piece and end in the third one after it."
    for first in range(1, len(text)):
        for second in range(first, len(text)):
            pieces = [text[:first], text[first:second], text[second:]]
            assert_played(module, ["END"], [piece for piece in pieces if piece], ("an ", "END"), hint)
    assert_played(module, ["END"], list(text), ("an ", "END"), hint)
    long = "a long stop string, of many words"
    assert_played(module, [long], ["x", long[:20], long[20:]], ("x", long), "It may be long.")


def check_no_more_is_held_back_than_may_begin_one(module):
    """The part that is held back is the longest end of the text that begins a stop string, and no more."""
    cases = (
        (["END"], ["an E"], ["an "]), (["END"], ["an EN", "T"], ["an ", "ENT"]), (["aab"], ["aaa"], ["a"]),
        (["aab"], ["a", "a", "a", "a"], ["", "", "a", "a"]), (["\n\n", "END"], ["x\n", "y"], ["x", "\ny"]),
        (["abcd", "cd"], ["ab", "cx"], ["", "abcx"]), (["long stop string"], ["text"], ["text"]),
        (["abab!"], ["abab", "ab"], ["", "ab"]),
    )  # fmt: skip
    for stop, pieces, expected in cases:
        sent, stopped, rest = played(module, stop, pieces)
        where = f"stop {stop}, pieces {pieces}"
        assert stopped is None, f"{where}: stopped by {stopped!r}"
        assert "".join(sent) + rest == "".join(pieces), f"{where}: {''.join(sent) + rest!r} in all: text was lost"
        longest = max(len(one) for one in stop) - 1
        all_but = "".join(pieces)[: max(0, len("".join(pieces)) - longest)]
        hint = ": you always keep the length of the longest one" if "".join(sent) == all_but else ""
        late = len("".join(sent)) < len("".join(expected))
        why = f"more is held back than may begin one{hint}" if late else "what may begin one was sent"
        assert sent == expected, f"{where}: sent {sent}, and {expected} is right: {why}"


def check_what_was_held_back_comes_at_the_end(module):
    """A text that ends in half a stop string has that half, once."""
    assert_played(module, ["END"], ["an EN"], ("an EN", None))
    stops = module.StopStrings(["END"])
    stops.push("an EN")
    stops.flush()
    again = stops.flush()
    assert again == "", f"a second flush gives {again!r} again"


def check_of_several_the_first_to_end_wins(module):
    """The overlapping stop string whose last character comes first wins; at a tie, the first listed."""
    earliest = (
        "The one whose last character comes first wins, not the one that begins first, nor the first of the list."
    )
    for pieces in (["xabcde"], list("xabcde"), ["xab", "cde"]):
        assert_played(module, ["abcde", "bc"], pieces, ("xa", "bc"), earliest)
        assert_played(module, ["bc", "abcde"], pieces, ("xa", "bc"), earliest)
        assert_played(module, ["d", "abcd"], pieces, ("xabc", "d"), "Both end at once: the first of the list wins.")
        assert_played(module, ["abcd", "d"], pieces, ("x", "abcd"), "Both end at once: the first of the list wins.")


def check_any_text_in_any_pieces(module):
    """On 400 random texts, stop strings and cuts, the text sent is that of a text character by character."""
    draw = random.Random(0)
    for _ in range(400):
        stop = ["".join(draw.choices("ab", k=draw.randint(1, 4))) for _ in range(draw.randint(1, 3))]
        text = "".join(draw.choices("abc", k=draw.randint(0, 14)))
        cuts = sorted(draw.choices(range(len(text) + 1), k=draw.randint(0, 6)))
        pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert_played(module, stop, pieces, by_character(stop, text))


def check_two_requests_share_nothing(module):
    """Unread outputs and held-back text of one request do not appear in another."""
    one, other = module.StopStrings(["END"]), module.StopStrings(["D"])
    sent = one.push("an EN")[0], other.push("x")[0], one.push("ough")[0]
    right = "an ", "x", "ENough"
    assert sent == right, f"two texts in turn, 'an EN' + 'ough' and 'x': sent {sent}, and {right} is right"

    async def work(collector):
        another = module.RequestOutputCollector()
        collector.put(delta(0))
        another.put(delta(1))
        return text_of(await another.get()), text_of(await collector.get())

    found = with_collector(module, work)
    assert found == ("b", "a"), f"a was put into one collector, b into another: they give {found[::-1]}"


# ---- clients that leave ----------------------------------------------------------------------------------------------


LONG = 20.0
"""Seconds of work, virtual ones, that nobody waits for."""


@dataclass
class Request:
    """Takes `seconds` for its work, then `cleaning` more for its abort, which must run once and finish.

    `watchers_cleaning`: what the watcher takes to end when it is cancelled.
    """

    seconds: float
    cleaning: float = 0.5
    watchers_cleaning: float = 0.75
    fails: bool = False
    answer: object = "the answer"
    begun: list = field(default_factory=list)
    ended: list = field(default_factory=list)
    watching: bool = False
    took: float = 0.0
    breaks: bool = False
    """Whether the client's socket breaks when it leaves, so that reading raises."""

    async def work(self):
        """Answer, and abort in any case."""
        try:
            await asyncio.sleep(self.seconds)
            if self.fails:
                raise ValueError("no such model")
            return self.answer
        finally:
            self.begun.append(True)
            await asyncio.sleep(self.cleaning)
            self.ended.append(True)

    async def client_leaves(self, after):
        """Return when the client has left."""
        self.watching = True
        try:
            await asyncio.sleep(after)
            if self.breaks:
                raise ConnectionResetError("the client's socket broke")
        except asyncio.CancelledError:
            await asyncio.sleep(self.watchers_cleaning)
            raise
        finally:
            self.watching = False

    def assert_over(self, when):
        """Check that the abort has run once and finished, and that no task watches the client any more."""
        assert self.begun, f"{when}, and the request was never aborted: its blocks stay taken. Was `work` cancelled?"
        late = "it is still under way when until_disconnected returns, or a second cancel() has cut it off"
        assert self.ended, f"{when}: the abort was begun, and had not ended: {late}"
        went_on = self.seconds >= LONG and self.took >= self.seconds
        assert not went_on, f"{when}, and the work went on for its {self.seconds:g} s. Was `work` cancelled?"
        assert not self.watching, f"{when}, and `disconnected` still runs: cancel it too, and wait for its end"


def with_client(module, request, leaves_after, cancelled_after=None):
    """Return what until_disconnected returns, or the exception that ends it; the request must be over by then."""

    async def run():
        work, leaving = request.work(), request.client_leaves(leaves_after)
        running = asyncio.ensure_future(module.until_disconnected(work, leaving))
        if cancelled_after is not None:
            await asyncio.sleep(cancelled_after)
            running.cancel()
        (found,) = await asyncio.gather(running, return_exceptions=True)
        state = len(request.begun), len(request.ended), request.watching, asyncio.get_running_loop().time()
        await asyncio.sleep(100)
        work.close()  # if it was never run
        leaving.close()
        return found, state

    found, state = run_virtual(run, "your until_disconnected")
    if isinstance(found, NotImplementedError):
        raise found
    request.begun, request.ended = [True] * state[0], [True] * state[1]
    request.watching, request.took = state[2:]
    return found


def check_the_works_result_is_returned(module):
    """A client that stays gets its answer, or the error; the task that watched it has ended."""
    request = Request(seconds=2)
    found = with_client(module, request, leaves_after=50)
    assert found == "the answer", f"the client stayed, and until_disconnected gives {found!r}"
    request.assert_over("the work is done")
    request = Request(seconds=2, answer="")
    found = with_client(module, request, leaves_after=50)
    assert found == "" and found is not None, f"the answer is '', and until_disconnected gives {found!r}"
    request = Request(seconds=3_000)
    found = with_client(module, request, leaves_after=4_000)
    assert found == "the answer", f"the work took 3,000 s, the client stayed, and until_disconnected gives {found!r}"
    request = Request(seconds=2, fails=True)
    found = with_client(module, request, leaves_after=50)
    assert isinstance(found, ValueError), f"the work raised a ValueError, and until_disconnected gives {found!r}"
    request.assert_over("the work has failed")


def check_a_client_that_leaves_ends_the_work(module):
    """When the client leaves, the work is cancelled; its abort has run once and finished; None is returned."""
    for leaves_after, cleaning in ((0, 0.5), (1.03, 0.5), (1.03, 15)):
        request = Request(seconds=LONG, cleaning=cleaning)
        found = with_client(module, request, leaves_after)
        waited = " Was the work awaited to its end?" if found == "the answer" else ""
        assert found is None, f"the client left, and until_disconnected gives {found!r}.{waited}"
        request.assert_over("the client has left")
        late = request.took - leaves_after - cleaning
        slow = "wait for the two; do not look from time to time"
        assert late < 0.01, f"the client has left, the abort took {cleaning:g} s, and {late:.2g} s more passed: {slow}"


def check_a_socket_that_breaks_is_a_client_that_leaves(module):
    """If `disconnected` ends with an exception, the client has left: the work is cancelled, and None is returned."""
    request = Request(seconds=LONG, breaks=True)
    found = with_client(module, request, leaves_after=1)
    assert found is None, f"reading raised ConnectionResetError, so the client left; until_disconnected gives {found!r}"
    request.assert_over("the client's socket broke")


def check_who_cancels_is_told(module):
    """If until_disconnected is cancelled, the work ends with its abort, and CancelledError is raised."""
    request = Request(seconds=LONG)
    found = with_client(module, request, leaves_after=50, cancelled_after=1)
    swallowed = "its caller believes that it goes on. Is CancelledError caught?"
    assert isinstance(found, asyncio.CancelledError), f"it was cancelled, and gives {found!r}: {swallowed}"
    request.assert_over("it was cancelled")
    request = Request(seconds=LONG, cleaning=15)
    found = with_client(module, request, leaves_after=1, cancelled_after=5)
    where = "the client has left, the abort is under way, and until_disconnected is cancelled"
    assert isinstance(found, asyncio.CancelledError), f"{where}: it gives {found!r}. Is CancelledError caught?"
