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


def cleaned_up(done: list[str], interrupts: int) -> None:
    with InterruptsHeld():
        try:
            for _ in range(interrupts):
                interrupt()
            raise ValueError("another reason to clean up")
        finally:
            with InterruptsHeld(clean_up=True):
                interrupt()
                interrupt()
                done.append("the clean-up")
            interrupt()
            interrupt()
            done.append("the rest of it")


@pytest.mark.parametrize("interrupts", [2, 3])
def test_after_the_second_all_are_held_until_the_end(interrupts):
    done = []
    with pytest.raises(KeyboardInterrupt):
        cleaned_up(done, interrupts)
    assert done == ["the clean-up", "the rest of it"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_clean_up_holds_the_second_too():
    done = []
    with pytest.raises(KeyboardInterrupt):
        cleaned_up(done, 0)
    assert done == ["the clean-up"], "behind it, a second one comes through at once"


def test_a_delivered_one_is_not_delivered_again():
    done = []

    def loop() -> None:
        with InterruptsHeld() as interrupts:
            interrupt()
            try:
                interrupts.deliver()
            finally:
                interrupt()
                interrupt()
                done.append("cleaned up")

    with pytest.raises(KeyboardInterrupt):
        loop()
    assert done == ["cleaned up"]


def test_a_program_that_only_counts_them_counts_each_pair_once_and_the_block_goes_on():
    counted = []
    before = signal.signal(signal.SIGINT, lambda number, _: counted.append(number))
    try:
        with InterruptsHeld() as interrupts:
            for _ in range(4):
                interrupt()
            assert len(counted) == 2
            interrupt()
            interrupts.deliver()
            assert len(counted) == 3
        assert len(counted) == 3
    finally:
        signal.signal(signal.SIGINT, before)


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
