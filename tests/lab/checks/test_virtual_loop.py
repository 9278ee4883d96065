"""Other people's coroutines in a loop without a clock: time costs nothing, and one that never ends
is reported.
"""

import asyncio
import time
from contextlib import suppress

import pytest

from minivllm_lab.checks.virtual_loop import run_virtual, turns


def test_a_day_is_over_at_once_and_in_order():
    async def work():
        seen = []

        async def after(hours):
            await asyncio.sleep(3600 * hours)
            seen.append(hours)

        await asyncio.gather(*map(after, (24, 1, 12)))
        return seen, asyncio.get_running_loop().time(), turns()

    seen, now, turned = run_virtual(work, "it")
    assert seen == [1, 12, 24]
    assert now == 24 * 3600
    assert turned < 20


async def waits_for_ever():
    await asyncio.Event().wait()


async def asks_for_ever():
    while True:
        await asyncio.sleep(0)


async def computes_for_ever():
    while True:
        pass


async def sleeps():
    time.sleep(0.001)


async def refuses_to_end():
    while True:
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("work", "says"),
    [
        (waits_for_ever, "your get waits, and nothing will ever wake it"),
        (asks_for_ever, "your get does not end: does it check again and again"),
        (computes_for_ever, "your get did not return within 0.5 s"),
        (sleeps, "time.sleep in your get blocks the event loop"),
        (refuses_to_end, "your get waits, and nothing will ever wake it"),
    ],
)
def test_what_never_ends_is_told(work, says):
    with pytest.raises(AssertionError, match=says):
        run_virtual(work, "your get")
