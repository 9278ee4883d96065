"""Ranks in processes: whichever way one of them or their parent ends, it is said, and nobody is left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing import connection
from pathlib import Path

import pytest
from engine.rank_double import double, leaving_double, refusing_double

from minivllm.errors import MinivllmError, WorkerDiedError
from minivllm.executor.rank_processes import RankProcesses


@pytest.fixture
def ranks():
    ranks = RankProcesses(double, (), 2)
    yield ranks
    ranks.shutdown()


def pids_of(ranks: RankProcesses) -> list[int]:
    return [process.pid for process in ranks.processes]


def have_ended(pids: Sequence[int], seconds: float = 5.0) -> bool:
    """Whether these processes, of whosever children, are gone within the time. Zombies are; none is reaped."""
    import psutil  # not at the top: the image of `make gpu` does without

    def lives(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    deadline = time.monotonic() + seconds
    while any(map(lives, pids)):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.01)
    return True


def test_every_rank_does_what_is_said_in_order(ranks):
    assert ranks.call("who") == [(0, 1), (1, 1)]
    assert ranks.call_for_one("who", "a") == (0, 2, "a")
    assert ranks.call_for_one("who") == (0, 3)
    assert ranks.call("who", 1, [2]) == [(0, 4, 1, [2]), (1, 4, 1, [2])]
    assert not have_ended(pids_of(ranks), 0.0)


@pytest.mark.parametrize(
    ("method", "why"), [("fail", "KeyError: 'a bug'"), ("be_killed", "killed by SIGKILL"), ("no_such", "no_such")]
)
@pytest.mark.parametrize("rank", [0, 1])
def test_when_one_rank_ends_the_run_ends_and_says_which_and_why(ranks, method, why, rank):
    pids, start = pids_of(ranks), time.monotonic()
    arguments = () if method == "no_such" else (rank,)
    with pytest.raises(WorkerDiedError, match=f"(?s)rank . of 2 .process.*{why}") as caught:
        ranks.call_for_one(method, *arguments)
    assert time.monotonic() - start < 5.0
    if arguments:
        assert f"rank {rank} of 2 (process {pids[rank]})" in str(caught.value)
    assert have_ended(pids, 0.0)
    with pytest.raises(WorkerDiedError, match=why):
        ranks.call("who")


def test_a_rank_that_dies_between_calls(ranks):
    os.kill(pids_of(ranks)[1], signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match=r"rank 1 .* killed by SIGKILL"):
        ranks.call("who")
    assert have_ended(pids_of(ranks), 0.0)


def test_who_lost_a_peer_is_not_blamed(ranks):
    with pytest.raises(WorkerDiedError, match=r"rank 1 .* killed by SIGKILL"):
        ranks.call("be_killed_and_missed", 1, "somebody is gone")


def test_a_rank_that_came_through_has_nothing_to_say(ranks):
    start = time.monotonic()
    with pytest.raises(WorkerDiedError, match=r"(?s)rank 0 .* somebody is gone"):
        ranks.call("lose_a_peer", 0, "somebody is gone")
    assert time.monotonic() - start < 5.0


def test_where_all_lost_a_peer_one_of_them_says_so(ranks):
    with pytest.raises(WorkerDiedError, match="somebody is gone"):
        ranks.call("be_killed_and_missed", 2, "somebody is gone")


def test_what_a_person_can_act_on_comes_as_it_is(ranks):
    with pytest.raises(MinivllmError, match=r"^this cannot be$"):
        ranks.call("refuse", 1)
    assert have_ended(pids_of(ranks), 0.0)
    with pytest.raises(MinivllmError, match=r"^no such model$"):
        RankProcesses(refusing_double, (), 2)


def test_a_rank_that_leaves_before_it_is_ready():
    with pytest.raises(WorkerDiedError, match=r"rank 1 of 2 .* exit code 3; a script must .*__main__"):
        RankProcesses(leaving_double, (), 2)


def test_they_end_with_the_object_and_with_shutdown():
    ranks = RankProcesses(double, (), 2)
    pids = pids_of(ranks)
    del ranks
    assert have_ended(pids, 0.0)
    ranks = RankProcesses(double, (), 2)
    ranks.shutdown()
    ranks.shutdown()
    assert have_ended(pids_of(ranks), 0.0)
    with pytest.raises(WorkerDiedError, match="shut down"):
        ranks.call("who")


def test_ranks_that_are_stuck_are_killed_at_shutdown(ranks):
    pids = pids_of(ranks)
    os.kill(pids[0], signal.SIGSTOP)
    ranks.shutdown()
    assert have_ended(pids, 0.0)


def test_an_interrupted_call_leaves_no_reply_behind(ranks, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(connection, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ranks.call("who", "interrupted")
    for pid in pids_of(ranks):
        os.kill(pid, signal.SIGINT)  # Ctrl-C reaches them too
    assert ranks.call("who", "next") == [(0, 2, "next"), (1, 2, "next")]


@pytest.mark.parametrize(("stuck", "leave"), [(True, False), (False, False), (False, True)])
def test_they_end_with_their_parent(stuck, leave):
    words = ["yes" if word else "no" for word in (stuck, leave)]
    script = Path(__file__).with_name("rank_double.py")
    parent = subprocess.Popen(
        [sys.executable, "-P", script, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 2
    assert not have_ended(pids, 0.0)
    if leave:
        parent.communicate("x", timeout=10)
        assert parent.returncode == 0
    else:
        parent.kill()
        parent.communicate(timeout=10)
    assert have_ended(pids)


STARTING = """
import os, time
from minivllm.executor.rank_processes import RankProcesses
if __name__ == "__mp_main__":  # what a rank imports first
    os.write(1, b"here\\n")
    time.sleep(60)
if __name__ == "__main__":
    RankProcesses(time.sleep, (), 2)
"""
WORKING = """
import os, time
from minivllm.executor.rank_processes import RankProcesses
class Worker:
    def __init__(self, rank):
        pass
    def work(self):
        os.write(1, b"here\\n")
        time.sleep(60)
if __name__ == "__main__":
    RankProcesses(Worker, (), 2).call("work")
"""


@pytest.mark.parametrize("script", [STARTING, WORKING], ids=["while they start", "while they work"])
def test_an_interrupt_is_told_once(tmp_path, script):
    """A terminal sends Ctrl-C to all of them; it is the parent's to answer."""
    path = tmp_path / "interrupted.py"
    path.write_text(script)
    command = [sys.executable, "-P", str(path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["here\n"] * 2
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=20)
    assert process.returncode == -signal.SIGINT
    assert said.count("Traceback") == 1
    assert said.rstrip().endswith("KeyboardInterrupt")
