"""The engine beside busy processes: the processes end, and the table says how far off both limits it is."""

import contextlib
import subprocess
import sys

import pytest

from minivllm.platforms.spinning import CHOICES


@pytest.fixture(scope="module")
def busy(load_benchmark):
    return load_benchmark("busy")


def test_busy_processes_end_with_the_block_also_when_it_raises(busy, monkeypatch):
    started = []
    original = subprocess.Popen

    def popen(*arguments, **named):
        started.append(original(*arguments, **named))
        return started[-1]

    monkeypatch.setattr(busy.subprocess, "Popen", popen)
    with contextlib.suppress(KeyboardInterrupt), busy.busy_processes(2):
        assert [one.poll() for one in started] == [None, None]
        raise KeyboardInterrupt
    assert all(one.poll() is not None for one in started)


def test_a_busy_process_that_nobody_ends_ends_itself(busy):
    subprocess.run([sys.executable, "-S", "-c", busy.SPIN, "0.01"], timeout=60, check=True)


def test_every_way_but_the_engines_own_is_a_persons_choice(busy):
    for way, environment in busy.WAYS.items():
        assert bool(set(environment) & set(CHOICES)) == (way != busy.OURS)


def test_the_engine_is_held_against_spinning_alone_and_against_sleeping_beside_others(busy):
    rates = {
        busy.OURS: {"0": {"rate": 95.0}, "4": {"rate": 40.0}},
        busy.SPINNING: {"0": {"rate": 100.0}, "4": {"rate": 10.0}},
        busy.PASSIVE: {"0": {"rate": 80.0}, "4": {"rate": 50.0}},
    }
    assert busy.against(rates) == {"0": 0.95, "4": 0.8}
