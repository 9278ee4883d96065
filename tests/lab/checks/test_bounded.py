"""Code that never returns is stopped; code that returns is left alone."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from refusals import assert_refused

from minivllm_lab.checks.bounded import bounded


def test_what_returns_in_time_is_left_alone_and_so_is_what_comes_after():
    with bounded(0.05, "your function"):
        pass
    start = time.process_time()
    while time.process_time() - start < 0.1:
        pass


def endless() -> None:
    with bounded(0.1, "your function"):
        while True:
            with suppress(Exception):  # the end must not be caught by what is to end
                sum(range(100))


def test_an_endless_loop_that_catches_every_error_is_stopped_and_named():
    start = time.process_time()
    assert_refused(r"your function did not return within 0\.1 s", endless)
    assert time.process_time() - start < 2


def test_a_loop_in_another_thread_is_stopped_and_the_thread_lives_on():
    with ThreadPoolExecutor(1) as thread:
        for _ in range(3):
            assert_refused("your function did not return", thread.submit(endless).result, timeout=60)
            assert thread.submit(sum, [1, 2]).result() == 3


def test_what_returns_in_time_in_another_thread_is_left_alone():
    def quick() -> int:
        with bounded(0.05, "your function"):
            pass
        end = time.thread_time() + 0.2
        while time.thread_time() < end:
            pass
        return 1

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(quick).result() == 1


AFTERWARDS = """
import sys
from concurrent.futures import ThreadPoolExecutor
from minivllm.errors import MinivllmError
from minivllm_lab.checks.bounded import bounded

def endless():
    with bounded(0.1, "your function"):
        while True:
            pass

with ThreadPoolExecutor(1) as thread:
    assert isinstance(thread.submit(endless).exception(), MinivllmError)
    sys.settrace(lambda *_: None)
    (lambda: None)()
    sys.settrace(None)
"""


def test_nothing_stays_behind_in_the_interpreter():
    """A pending exception would make Python 3.11 hang at the first call that is traced."""
    subprocess.run([sys.executable, "-c", AFTERWARDS], check=True, timeout=60)
