"""Threads that wait spin on a quiet machine and sleep on a busy one."""

import json
import os
import subprocess
import sys
import time

import pytest
import torch

from minivllm import LLM
from minivllm.config import EMBEDDED_MODEL
from minivllm.platforms import spinning
from minivllm.platforms.cpu_time import CpuTimes
from minivllm.platforms.spinning import SECONDS, Watcher, limit_spinning
from minivllm.worker import worker
from minivllm_lab.cli import lesson_parser
from minivllm_lab.lesson import begin


class FakeTeam:
    def __init__(self) -> None:
        self.held, self.calls = False, []

    def hold(self) -> None:
        self.held = True
        self.calls.append("hold")

    def let_go(self) -> None:
        self.held = False
        self.calls.append("let go")


def readings(*shares: float) -> list[bool]:
    """Return the verdict on the machine after each of these shares of waiting, in readings of a
    tenth of a second on two threads.
    """
    watcher = Watcher(FakeTeam(), dict)  # type: ignore[arg-type]
    return [watcher.take(CpuTimes(0.2 * (1 - share), 0.2 * share)) for share in shares]


QUIET_AND_BUSY = {
    "a quiet machine": ([0.0, 0.04, 0.08, 0.15] * 20, False),
    "a hiccup": ([0.02, 0.6, 0.02, 0.02], False),
    "neighbours, after five readings": ([0.3] * 5, True),
    "one quiet reading among busy ones": ([0.6] * 10 + [0.05] + [0.6] * 3, True),
    "the neighbours have gone": ([0.6] * 10 + [0.03] * 10, False),
    "between the limits, quiet before": ([0.15] * 50, False),
    "between the limits, busy before": ([0.6] * 10 + [0.15] * 50, True),
}


@pytest.mark.parametrize("name", QUIET_AND_BUSY)
def test_the_machine_is_busy_after(name):
    shares, busy = QUIET_AND_BUSY[name]
    assert readings(*shares)[-1] == busy
    assert busy or "gone" in name or not any(readings(*shares))


def test_a_process_that_does_nothing_learns_nothing():
    watcher = Watcher(FakeTeam(), dict)  # type: ignore[arg-type]
    assert not watcher.take(CpuTimes(0.001, 0.01))
    for _ in range(10):
        watcher.take(CpuTimes(0.05, 0.05))
    assert watcher.take(CpuTimes(0.001, 0.0))


def test_the_watcher_holds_the_team_while_others_want_the_cores():
    now, team = {1: CpuTimes(0.0, 0.0)}, FakeTeam()
    watcher = Watcher(team, lambda: dict(now))  # type: ignore[arg-type]

    def look(ran: float, waited: float) -> float:
        now[1] = CpuTimes(now[1].ran + ran, now[1].waited + waited)
        return watcher.look()

    for _ in range(5):
        assert look(0.1, 0.0) == pytest.approx(SECONDS)
    for _ in range(5):
        look(0.05, 0.05)
    assert team.calls == ["hold"]
    assert look(0.0, 0.0) == pytest.approx(SECONDS)
    for _ in range(10):
        look(0.1, 0.0)
    assert team.calls == ["hold", "let go"]


def test_where_reading_takes_long_it_is_done_less_often_unless_others_held_it_up():
    def slow():
        end = time.thread_time() + 0.01
        while time.thread_time() < end:
            pass
        return {1: CpuTimes(time.monotonic(), 0.0)}

    def held_up():
        time.sleep(0.05)
        return {1: CpuTimes(time.monotonic(), 0.0)}

    assert Watcher(FakeTeam(), slow).look() >= 1.0  # type: ignore[arg-type]
    assert Watcher(FakeTeam(), held_up).look() < 2 * SECONDS  # type: ignore[arg-type]


THREADS_THAT_WAIT = """
import json, os, time
import torch
from minivllm.platforms.spinning import ExtraTeam

x = torch.ones(1 << 20)

def seconds_of_waiting():
    x.add_(1)
    time.sleep(0.05)
    start = time.process_time()
    for _ in range(20):
        x[: 1 << 16].add_(1)  # threads share it
        time.sleep(0.02)
    return time.process_time() - start

def threads():
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(2)
team, record = ExtraTeam(), {}
record["before"], record["threads"] = seconds_of_waiting(), threads()
team.hold()
team.hold()
record["held"], record["more"] = seconds_of_waiting(), threads() - record["threads"]
team.let_go()
team.let_go()
time.sleep(0.5)
record["after"], record["left"] = seconds_of_waiting(), threads() - record["threads"]
print(json.dumps(record))
"""


@pytest.fixture
def started(monkeypatch) -> list[str]:
    """Return the names of threads whose start was requested, without starting them."""
    names: list[str] = []

    class Thread:
        def __init__(self, name: str, **_) -> None:
            self.name = name

        def start(self) -> None:
            names.append(self.name)

    monkeypatch.setattr(spinning.threading, "Thread", Thread)
    monkeypatch.setattr(spinning, "_watched", set())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(spinning, "parallel_region", lambda: print)
    monkeypatch.setattr(spinning, "thread_times", lambda: {1: CpuTimes(1.0, 0.0)})
    monkeypatch.setattr(spinning.sys, "platform", "linux")
    for name in (*spinning.CHOICES, "KMP_BLOCKTIME"):
        monkeypatch.setenv(name, "")  # so that it is taken back where it was not set, whatever sets it meanwhile
        monkeypatch.delenv(name)
    return names


def test_a_process_has_one_watcher_and_a_child_that_was_forked_one_of_its_own(started, monkeypatch):
    assert limit_spinning()
    assert limit_spinning()
    assert started == ["minivllm-watcher"]
    monkeypatch.setattr(os, "getpid", lambda: 1)
    limit_spinning()
    assert len(started) == 2


@pytest.mark.parametrize("name", spinning.CHOICES)
def test_what_a_person_has_set_stands(started, monkeypatch, name):
    monkeypatch.setenv(name, "1000")
    assert not limit_spinning()
    assert not started
    assert "KMP_BLOCKTIME" not in os.environ


def test_the_other_libraries_are_told_before_they_start(started, monkeypatch):
    monkeypatch.setattr(spinning, "parallel_region", lambda: None)
    assert not limit_spinning()
    assert not started
    assert os.environ["KMP_BLOCKTIME"] == "1"


@pytest.mark.parametrize("missing", ["run queue", "threads"])
def test_where_there_is_nothing_to_watch_nobody_watches(started, monkeypatch, missing):
    if missing == "run queue":
        monkeypatch.setattr(spinning, "thread_times", dict)
    else:
        monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert not limit_spinning()
    assert not started


def test_lessons_and_engines_are_watched(monkeypatch):
    watched = []
    monkeypatch.setattr(spinning, "limit_spinning", lambda: watched.append("a lesson"))
    monkeypatch.setattr(worker, "limit_spinning", lambda: watched.append("an engine"))
    begin("", lesson_parser("").parse_args(["--device", "cpu"]))
    LLM(EMBEDDED_MODEL, device="cpu", max_model_len=64)
    assert watched == ["a lesson", "an engine"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="GNU's OpenMP library")
def test_with_more_threads_than_cores_threads_sleep_soon():
    """Threads spin if the extra team is missing."""
    environment = {name: value for name, value in os.environ.items() if name not in spinning.CHOICES}
    environment["OMP_NUM_THREADS"] = "2"
    command = [sys.executable, "-P", "-c", THREADS_THAT_WAIT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    record = json.loads(done.stdout)
    assert record["held"] < record["before"] / 3, record
    assert record["after"] > record["held"] * 3, record
    assert record["more"] == len(os.sched_getaffinity(0)) + 1
    assert record["left"] == 0
