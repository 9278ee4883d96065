"""Code that never returns is stopped; code that does is left alone."""

import signal
import time

import pytest

from minivllm.errors import MinivllmError
from minivllm.lab.bounded import bounded


def test_an_endless_loop_is_stopped_and_named():
    start = time.process_time()
    says = r"your function did not return within 0\.1 s"
    with pytest.raises(MinivllmError, match=says), bounded(0.1, "your function"):  # noqa: PT012 a loop is no call
        while True:
            pass
    assert time.process_time() - start < 2


def test_what_returns_in_time_is_left_alone_and_so_is_what_comes_after():
    before = signal.getsignal(signal.SIGVTALRM)
    with bounded(0.05, "your function"):
        pass
    assert signal.getsignal(signal.SIGVTALRM) == before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
    start = time.process_time()
    while time.process_time() - start < 0.1:
        pass
