"""Ranks in processes: however one of them or their parent ends, the end is reported and no process
is left behind.
"""

import gc
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import timeit
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import pytest
from executor.rank_double import double, leaving_double, refusing_double
from patience import PATIENCE, eventually
from refusals import assert_refused

from minivllm.errors import WorkerDiedError, WorkerFailedError
from minivllm.executor.rank_loop import serve
from minivllm.executor.rank_processes import END, RankProcesses


@pytest.fixture(scope="module")
def pairs():
    """Keep one pair of ranks at a time, started again where a test has ended it."""
    pairs: list[RankProcesses] = []
    yield pairs
    for ranks in pairs:
        ranks.shutdown()


@pytest.fixture
def ranks(pairs):
    if not pairs or pairs[-1]._dead is not None:
        pairs.append(RankProcesses(double, (), 2))
    pairs[-1].call("reset")
    return pairs[-1]


def pids_of(ranks: RankProcesses) -> list[int]:
    return [process.pid for process in ranks.processes]


def answer_of(ranks: RankProcesses, method: str, *arguments: object) -> Any:
    """Call a method, and wait only for the rank whose result counts."""
    return ranks.send(method, *arguments).result()


def have_ended(pids: Sequence[int], seconds: float = PATIENCE) -> bool:
    """Return whether these processes end within the time. Zombies count as ended, because none is
    reaped here.
    """
    import psutil  # not at the top: the image of `make gpu` does without

    def lives(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    return eventually(lambda: not any(map(lives, pids)), seconds, pause=0.01)


def test_calls_run_on_every_rank_in_order_whichever_answer_is_read_first(ranks):
    assert ranks.call("who") == [(0, 1), (1, 1)]
    futures = [ranks.send("who", number) for number in range(3)]
    assert ranks.call("who", "between", [2]) == [(0, 5, "between", [2]), (1, 5, "between", [2])]
    assert [future.done() for future in futures] == [True] * 3
    assert [future.result() for future in futures] == [(0, 2 + number, number) for number in range(3)]
    with pytest.raises((AttributeError, TypeError, pickle.PicklingError)):
        ranks.call("who", lambda: None)  # it is sent to no rank
    assert ranks.call("who") == [(0, 6), (1, 6)]


def test_a_future_waits_as_long_as_it_is_told(ranks):
    future = ranks.send("sleep", 0.2)
    assert not future.done()
    assert not future.cancel()
    with pytest.raises(TimeoutError):
        future.result(0.02)
    assert future.result() is None
    assert future.done()


def test_large_calls_in_flight_do_not_block_one_another(ranks):
    """Calls and replies are larger than sockets hold, and a rank that cannot send its reply does
    not read the next call.
    """
    size = 3_000_000
    futures = [ranks.send("zeros", size) for _ in range(3)]
    futures += [ranks.send("size_of", bytes(size)) for _ in range(3)]
    assert ranks.call("size_of", bytes(size)) == [size, size]
    assert [len(future.result()) for future in futures[:3]] == [size] * 3
    assert [future.result() for future in futures[3:]] == [size] * 3


@pytest.mark.parametrize("rank", [0, 1])
def test_when_one_rank_ends_the_run_ends_and_says_which_and_why(ranks, rank):
    pids = pids_of(ranks)
    with pytest.raises(WorkerDiedError, match=rf"rank {rank} of 2 \(process {pids[rank]}\).* killed by SIGKILL"):
        answer_of(ranks, "be_killed", rank)
    assert have_ended(pids, 0.0)
    with pytest.raises(WorkerDiedError, match="killed by SIGKILL"):
        ranks.call("who")
    ranks.shutdown()  # does nothing more


@pytest.mark.parametrize(("rank", "one_reply"), [(0, True), (1, True), (1, False)])
def test_after_an_exception_on_one_rank_they_do_nothing_until_they_are_reset(ranks, rank, one_reply):
    """The failing rank is named, though another has reported before it."""
    why = f"^rank {rank} of 2: KeyError: 'a bug'"
    with pytest.raises(WorkerFailedError, match=why) as caught:
        (answer_of if one_reply else RankProcesses.call)(ranks, "fail", rank)
    assert any("Traceback" in note for note in caught.value.__notes__)
    for _ in range(2):
        with pytest.raises(WorkerFailedError, match=why):
            ranks.call("who")
    assert ranks.call("reset") == [None, None]
    assert ranks.call("state") == [(0, False)] * 2
    assert ranks.call("who") == [(0, 1), (1, 1)]
    assert list(ranks._waiting) == [END]


def test_an_exception_behind_the_last_meeting_is_told_by_the_next_call(ranks):
    """Rank 0 has already replied, and no rank has missed rank 1."""
    with pytest.raises(WorkerFailedError, match="rank 1 of 2: KeyError"):
        (answer_of(ranks, "fail_alone", 1), ranks.call("who"))
    ranks.call("reset")
    require_right_answers(ranks, 0)


def test_all_calls_in_flight_fail_with_the_one_before_them(ranks):
    futures = [ranks.send("who"), ranks.send("fail", 1), *(ranks.send("who") for _ in range(3))]
    assert futures[0].result() == (0, 1)
    for future in futures[1:]:
        with pytest.raises(WorkerFailedError, match="rank 1 of 2: KeyError"):
            future.result()
    ranks.call("reset")
    assert ranks.call("who") == [(0, 1), (1, 1)]


def test_an_error_on_all_ranks_is_survived(ranks):
    with pytest.raises(WorkerFailedError, match=r"rank . of 2: AttributeError: .*no_such"):
        ranks.call("no_such")
    ranks.call("reset")
    assert_refused(r"a step ran out of memory .*: lower max_num_batched_tokens", ranks.call, "run_out_of_memory")
    ranks.call("reset")
    require_right_answers(ranks, 0)


def test_a_rank_that_does_not_answer_a_reset_is_not_waited_for_without_end(ranks, monkeypatch):
    monkeypatch.setattr("minivllm.executor.rank_processes.SECONDS_FOR_RESET", 0.3)
    with pytest.raises(WorkerFailedError, match="rank 1 of 2: KeyError"):
        answer_of(ranks, "fail_and_be_missed", 1)
    with pytest.raises(WorkerDiedError, match="have not answered a reset"):
        ranks.call("reset")
    assert have_ended(pids_of(ranks), 0.0)


def test_who_lost_a_peer_is_not_blamed(ranks):
    with pytest.raises(WorkerDiedError, match=r"rank 1 .* killed by SIGKILL"):
        ranks.call("be_killed_and_missed", 1, "somebody is gone")


@pytest.mark.parametrize("one_reply", [True, False])
def test_a_rank_that_came_through_has_nothing_to_say(ranks, one_reply):
    with pytest.raises(WorkerFailedError, match=r"rank 0 .* somebody is gone"):
        (answer_of if one_reply else RankProcesses.call)(ranks, "lose_a_peer", 0, "somebody is gone")
    ranks.call("reset")
    require_right_answers(ranks, 0)


def test_what_a_person_can_act_on_comes_as_it_is(ranks):
    assert_refused(r"^this cannot be$", ranks.call, "refuse", 1)
    ranks.call("reset")
    require_right_answers(ranks, 0)
    assert_refused(r"^no such model$", RankProcesses, refusing_double, (), 2)


def test_a_rank_that_leaves_before_it_is_ready():
    with pytest.raises(WorkerDiedError, match=r"rank 1 of 2 .* exit code 3$"):
        RankProcesses(leaving_double, (), 2)


def test_a_rank_whose_engine_has_ended_meanwhile_says_no_more():
    """A traceback would look like a failure of its own."""
    engines, own = socket.socketpair()
    with own:
        engines.sendall(pickle.dumps((double, (0,))))
        engines.close()
        serve(own)


def test_ranks_that_are_stuck_are_killed_at_shutdown(ranks, monkeypatch):
    monkeypatch.setattr("minivllm.executor.rank_processes.SECONDS_TO_LEAVE", 0.2)
    pids = pids_of(ranks)
    os.kill(pids[0], signal.SIGSTOP)
    ranks.shutdown()
    assert have_ended(pids, 0.0)
    with pytest.raises(WorkerDiedError, match="shut down"):
        ranks.call("who")


BEGINNING = """
import os, sys, time
sys.path.insert(0, {folder!r})
import ranks_module
from minivllm.executor.rank_processes import RankProcesses
ranks = RankProcesses(ranks_module.Worker, (), 2)
"""


def run_script(folder: Path, module: str, script: str) -> subprocess.Popen[str]:
    """Run a script on two ranks with a worker of this module; its output can be read."""
    (folder / "ranks_module.py").write_text(module)
    (folder / "script.py").write_text(BEGINNING.format(folder=str(folder)) + script)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-P", folder / "script.py"], **pipes, start_new_session=True)


SLOW_IN_RANKS = """
import os, sys, time
if sys.argv[0].endswith("child_main.py"):
    os.write(1, f"{os.getpid()}\\n".encode())
    time.sleep(20)
def Worker(rank): pass
"""
WORKS = """
import os, time
class Worker:
    def __init__(self, rank):
        pass
    def work(self):
        os.write(1, f"{os.getpid()}\\n".encode())
        time.sleep(60)
"""
WORKING = 'ranks.call("work")'
LEAVING = "print(*(process.pid for process in ranks.processes))"
FORKING = """
if os.fork() == 0:
    time.sleep(4)
    os._exit(0)
ranks.call("work")
"""
BOTH = pytest.mark.parametrize(
    ("module", "script"), [(SLOW_IN_RANKS, ""), (WORKS, WORKING)], ids=["while they start", "while they work"]
)


def pids_from(parent: subprocess.Popen[str]) -> list[int]:
    assert parent.stdout is not None
    return [int(parent.stdout.readline()) for _ in range(2)]


@BOTH
def test_they_end_with_a_parent_that_is_killed(tmp_path, module, script):
    """This holds even during a slow import. The script has no `if __name__ == "__main__"`, because
    ranks do not import it.
    """
    with run_script(tmp_path, module, script) as parent:
        pids = pids_from(parent)
        assert not have_ended(pids, 0.0)
        parent.kill()
        assert have_ended(pids)


def test_they_end_with_a_parent_that_leaves_in_order(tmp_path):
    with run_script(tmp_path, WORKS, LEAVING) as parent:
        pids, _ = parent.communicate(timeout=PATIENCE)
    assert parent.returncode == 0
    assert have_ended([*map(int, pids.split())])


def test_a_fork_of_their_parent_does_not_keep_them(tmp_path):
    with run_script(tmp_path, WORKS, FORKING) as parent:
        pids = pids_from(parent)
        parent.kill()
        assert have_ended(pids)


@BOTH
def test_an_interrupt_is_told_once(tmp_path, module, script):
    """A terminal sends Ctrl-C to all of its processes, but only the parent reports it."""
    with run_script(tmp_path, module, script) as parent:
        pids = pids_from(parent)
        os.killpg(parent.pid, signal.SIGINT)
        _, said = parent.communicate(timeout=PATIENCE)
    assert parent.returncode == -signal.SIGINT
    assert said.count("Traceback") == 1
    assert said.rstrip().endswith("KeyboardInterrupt")
    assert have_ended(pids)


def test_an_interrupt_is_not_the_ranks_to_answer(ranks):
    for pid in pids_of(ranks):
        assert os.getpgid(pid) != os.getpgid(0), "a terminal interrupts the group of the parent"
        os.kill(pid, signal.SIGINT)
    assert ranks.call("who") == [(0, 1), (1, 1)]


def test_when_a_rank_dies_every_call_in_flight_fails_at_once(ranks):
    done = ranks.send("sleep", 0.01)
    ranks.send("sleep", 0.5)  # the reply before it has long been read when a rank dies
    futures = [done, ranks.send("be_killed", 1), ranks.send("who")]
    with pytest.raises(WorkerDiedError, match=r"rank 1 .* killed by SIGKILL"):
        futures[2].result()
    assert futures[0].result() is None
    assert futures[1].done()
    assert have_ended(pids_of(ranks), 0.0)


# ---- interrupts ----------------------------------------------------------------------------------


class Interrupt(BaseException):
    """The exception that the Ctrl-C handler raises; only the test catches it."""


@contextmanager
def catching_interrupts() -> Iterator[list[bool]]:
    """Let Ctrl-C end the block; the yielded list says whether it did."""

    def handle(*_: object) -> None:
        raise Interrupt

    interrupted: list[bool] = []
    before = signal.signal(signal.SIGINT, handle)
    try:
        yield interrupted
    except Interrupt:
        interrupted.append(True)
    finally:
        signal.signal(signal.SIGINT, before)


def interrupted_at_line(number: int, function: Callable[[], object]) -> bool:
    """Call the function and send Ctrl-C at its `number`-th line; return whether it has that many."""
    lines = 0

    def trace(_: FrameType, event: str, __: object) -> Any:
        nonlocal lines
        if event == "line":
            lines += 1
            if lines == number:
                signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    with catching_interrupts():
        sys.settrace(trace)
        try:
            function()
        finally:
            sys.settrace(before)
    return lines >= number


def interrupted_after(seconds: float, function: Callable[[], object]) -> bool:
    """Call the function and send Ctrl-C after this many seconds; return whether that interrupted
    it.
    """
    before = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        with catching_interrupts() as interrupted:
            try:
                signal.setitimer(signal.ITIMER_REAL, seconds)
                function()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, before)
    return bool(interrupted)


def require_right_answers(ranks: RankProcesses, number: int) -> None:
    """Expect both ranks to have run the same calls, and to answer this one."""
    (rank_0, done_by_0, heard_by_0), (rank_1, done_by_1, heard_by_1) = ranks.call("who", number)
    assert (rank_0, rank_1) == (0, 1)
    assert heard_by_0 == heard_by_1 == number
    assert done_by_0 == done_by_1


@pytest.mark.parametrize("call", ["for all", "for one", "in flight", "large"])
def test_an_interrupt_at_any_line_of_a_call_leaves_the_ranks_usable(ranks, call):
    calls: dict[str, Callable[[], object]] = {
        "for all": lambda: ranks.call("who", "interrupted"),
        "for one": lambda: answer_of(ranks, "who", "interrupted"),
        "in flight": lambda: [future.result() for future in [ranks.send("who", n) for n in range(3)]],
        "large": lambda: ranks.call("who", bytes(400_000)),
    }
    number = 1
    while interrupted_at_line(number, calls[call]):
        require_right_answers(ranks, number)
        number += 1
    assert number > 30
    assert list(ranks._waiting) == [END]


def test_signals_at_any_moment_leave_the_ranks_usable(ranks):
    random, interrupted = Random(1), 0
    for number in range(150):
        size = random.choice([0, 10, 500_000])
        interrupted += interrupted_after(random.uniform(1e-6, 1.5e-3), lambda: ranks.call("who", bytes(size)))  # noqa: B023
        require_right_answers(ranks, number)
    assert interrupted > 20


def test_an_interrupt_that_another_thread_took_is_noticed(ranks, tmp_path):
    """The kernel may deliver a signal to any thread; then it does not wake the one that waits."""
    start, let_go = time.monotonic(), tmp_path / "let go"
    other = threading.Thread(
        target=lambda: (time.sleep(0.2), signal.pthread_kill(threading.get_ident(), signal.SIGINT))
    )
    other.start()
    with pytest.raises(KeyboardInterrupt):
        ranks.call("wait_for", str(let_go), 2 * PATIENCE)
    assert time.monotonic() - start < PATIENCE
    let_go.touch()
    other.join()
    require_right_answers(ranks, 0)


def ranks_here() -> set[Any]:
    """Return the rank processes below this one, but not the children of a browser that other tests
    use.
    """
    import psutil

    result = set()
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if any("minivllm.executor.rank_loop" in part for part in child.cmdline()):
                result.add(child)
    return result


def test_interrupted_starts_leave_nobody():
    """Interrupts come at moments all through a start of about 0.2 s, and at some of its lines."""
    others, random, interrupted = ranks_here(), Random(2), 0
    seconds = min(timeit.repeat(lambda: RankProcesses(double, (), 2).shutdown(), repeat=3, number=1))
    for part in range(6):
        moment = (part + random.uniform(0.1, 1.0)) / 6 * seconds
        interrupted += interrupted_after(moment, lambda: RankProcesses(double, (), 2).shutdown())
    assert interrupted > 1
    for number in range(1, 1200, 240):
        interrupted_at_line(number, lambda: RankProcesses(double, (), 2).shutdown())
    gc.collect()
    assert eventually(lambda: not ranks_here() - others)
