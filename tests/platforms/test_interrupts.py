import os
import signal
import threading
from collections.abc import Callable

import pytest

from minivllm.platforms.interrupts import InterruptsHeld


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def held(then: Callable[[], object], *, nested: bool = False) -> None:
    with InterruptsHeld():
        if nested:
            held(lambda: None)
        interrupt()
        then()


def test_delivered_at_the_end():
    done = []
    with pytest.raises(KeyboardInterrupt):
        held(lambda: done.append("the rest"))
    assert done == ["the rest"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_delivered_where_the_block_raises_too():
    with pytest.raises(KeyboardInterrupt):
        held(lambda: int("no number"))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_second_comes_through_at_once_also_when_nested():
    done = []
    with pytest.raises(KeyboardInterrupt):
        held(lambda: done.append("never"), nested=True)
    assert done == []


def test_other_threads_and_other_handlers_are_left_alone():
    with InterruptsHeld():
        inner = threading.Thread(target=lambda: InterruptsHeld().__enter__())
        inner.start()
        inner.join()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with InterruptsHeld():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
