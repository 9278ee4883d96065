"""Test the benchmark that runs beside busy processes: they end, and the table compares the engine
with both limits.
"""

import contextlib
import subprocess
import sys

from minivllm.platforms.spinning import CHOICES


def test_busy_processes_end_with_the_block_also_when_it_raises(bench, monkeypatch):
    started = []
    original = subprocess.Popen

    def popen(*arguments, **named):
        started.append(original(*arguments, **named))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", popen)
    with contextlib.suppress(KeyboardInterrupt), bench.busy_processes(2):
        assert [process.poll() for process in started] == [None, None]
        raise KeyboardInterrupt
    assert all(process.poll() is not None for process in started)


def test_a_busy_process_that_nobody_ends_ends_itself(load_benchmark):
    spin = load_benchmark("peer_process").SPIN
    subprocess.run([sys.executable, "-S", "-c", spin, "0.01"], timeout=60, check=True)


def test_every_way_but_the_engines_own_is_a_persons_choice(bench):
    for way, environment in bench.WAYS.items():
        assert bool(set(environment) & set(CHOICES)) == (way != bench.OURS)


def test_the_engine_is_held_against_spinning_alone_and_against_sleeping_beside_others(bench):
    rates = {
        bench.OURS: {"0": {"rate": 95.0}, "4": {"rate": 40.0}},
        bench.SPINNING: {"0": {"rate": 100.0}, "4": {"rate": 10.0}},
        bench.PASSIVE: {"0": {"rate": 80.0}, "4": {"rate": 50.0}},
    }
    assert bench.against(rates) == {"0": 0.95, "4": 0.8}
