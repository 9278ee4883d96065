"""Test a script's two servers and proxy, bound to cores and ended in any case, and lesson 08's
table of them.
"""

import os
import signal
from argparse import Namespace

import psutil
import pytest

from minivllm.config import EMBEDDED_MODEL
from minivllm.errors import MinivllmError
from minivllm_lab.disaggregation import interference, server_pair

BINDS = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="processes cannot be bound to cores here")


@pytest.fixture
def nothing_stays():
    """Expect every minivllm process that the test started to have ended; a server that others share
    may run on.
    """
    before = _running()
    yield
    assert _running() <= before


def _running() -> set[tuple[int, str]]:
    below = psutil.Process().children(recursive=True)
    return {(process.pid, " ".join(process.cmdline())) for process in below if _serves(process)}


def _serves(process: psutil.Process) -> bool:
    return process.status() != psutil.STATUS_ZOMBIE and "minivllm" in process.cmdline()


@BINDS
@pytest.mark.parametrize(("allowed", "cores"), [({3}, ()), ({1, 5, 2}, (1, 5))], ids=["one", "three"])
def test_each_server_has_a_core_if_there_are_two(monkeypatch, allowed, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: allowed)
    assert server_pair._two_cores() == cores


def test_ports_differ():
    assert len(set(server_pair.free_ports(20))) == 20


def test_sigterm_ends_the_block_and_the_old_handler_comes_back():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as error, server_pair._sigterm_raises():
        signal.raise_signal(signal.SIGTERM)
    assert error.value.code == 143
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.usefixtures("nothing_stays")
def test_a_server_that_does_not_start_is_told_and_the_others_end(monkeypatch):
    monkeypatch.setattr(server_pair, "_serve", lambda *_: ("serve", "nowhere-at-all"))
    told = pytest.raises(MinivllmError, match=r"minivllm serve does not start.*nowhere-at-all")
    with told, server_pair.server_pair("nowhere-at-all", 128):
        pytest.fail("it cannot be ready")


def test_what_the_servers_need_and_is_not_there_is_said(monkeypatch, capsys):
    monkeypatch.setattr(server_pair, "find_spec", lambda name: None if name == "uvicorn" else object())
    assert interference.measure_two_servers(Namespace(quick=False)) == {}
    assert "left out, they need uvicorn" in capsys.readouterr().out


def two_servers() -> dict:
    """Measure once more, up to three times, if a busy client has let the chats end too early."""
    for is_last in (False, False, True):
        try:
            return interference.measure_two_servers(Namespace(model=str(EMBEDDED_MODEL), prompt=100, quick=False))
        except MinivllmError as error:
            if is_last or "the chat ended before the load did" not in str(error):
                raise
    raise AssertionError("unreachable")


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_stays", "warm_processes")
def test_one_server_and_two_say_the_same(monkeypatch, capsys):
    """All prompts' keys and values move, none is computed again, and nothing runs afterwards."""
    monkeypatch.setattr(interference, "SERVED_PROMPTS", 2)
    result = two_servers()
    assert (result["answers"], result["same_answers"]) == (6, 6)
    assert result["tokens_received"] == 2 * 100 + interference.CHATS * interference.CHAT_PROMPT
    assert all(
        result[name][column] > 0
        for name in interference.SERVERS
        for column in ("itl_p50_ms", "itl_p99_ms", "itl_max_ms", "ttft_ms")
    )
    assert "6 of 6 answers are the same" in " ".join(capsys.readouterr().out.split())
