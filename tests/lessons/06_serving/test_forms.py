"""Lesson 06's collector and stop strings do what the engine's do, whatever pieces the output comes
in.
"""

import asyncio
from copy import deepcopy

from hypothesis import given, settings
from hypothesis import strategies as st
from lessons.harness import script_path

from minivllm.engine.async_llm import RequestOutputCollector
from minivllm.engine.detokenizer import find_stop_string
from minivllm.outputs import CompletionOutput, RequestOutput
from minivllm.sampling_params import RequestOutputKind
from minivllm_lab.exercise import load

lesson = load(script_path("06"))
LETTERS = st.text("ab\n", max_size=5)
DELTAS = st.lists(st.tuples(st.integers(0, 1), LETTERS, st.booleans()), min_size=1, max_size=8)


@given(st.lists(LETTERS, max_size=8), st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3))
@settings(max_examples=150, deadline=None)
def test_the_same_text_is_sent(pieces, stops):
    """Text is sent up to the stop string that the engine finds when it arrives letter by letter."""
    text, ours, sent, stopped = "".join(pieces), lesson.StopStrings(stops), "", None
    for piece in pieces:
        more, stopped = ours.push(piece)
        sent += more
        if stopped is not None:
            break
    result = next(filter(None, (find_stop_string(text[:end], stops, end - 1) for end in range(1, len(text) + 1))), None)
    stop, end = result or (None, len(text))
    assert stopped == stop
    assert sent + ours.flush() == text[: end - len(stop or "")]


@given(DELTAS)
@settings(max_examples=100, deadline=None)
def test_the_same_outputs_are_read(deltas):
    """Deltas of two completions arrive, and the reader comes after some of them."""
    asyncio.run(read_both(deltas))


async def read_both(deltas):
    ours, engines = lesson.RequestOutputCollector(), RequestOutputCollector(RequestOutputKind.DELTA)
    for number, (index, text, reads) in enumerate(deltas):
        last = number == len(deltas) - 1
        completion = CompletionOutput(index, text, [number], finish_reason="length" if last else None)
        output = RequestOutput("r", None, [1], None, [completion], finished=last)
        ours.put(deepcopy(output))
        engines.put(deepcopy(output))
        if reads or last:
            assert await ours.get() == await engines.get()
