"""Loops are compiled before the first request: by two processes where the cache is empty."""

import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("numba", reason="the loops are numba's; a GPU's image has none")

from minivllm.kernels.cpu import compile_ahead as module
from minivllm.kernels.cpu.compile_ahead import BY_THE_SECOND, LOOPS, compile_ahead
from minivllm.worker.worker import compile_loops


@pytest.fixture
def done(monkeypatch):
    """Record what is compiled here and what is started elsewhere, in order, as if nothing took time."""
    events = []

    class Second:
        def __init__(self, command, **options):
            events.append(("started", *command[-len(BY_THE_SECOND) :]))

        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

        def wait(self):
            events.append(("waited",))

    monkeypatch.setattr(subprocess, "Popen", Second)
    monkeypatch.setattr(module, "compile_modules", lambda names, *types: events.append(("compiled", *names)))
    return events


def found_in_the_cache(monkeypatch, was_cached) -> None:
    loops = SimpleNamespace(norms_of=lambda number: SimpleNamespace(was_cached=was_cached))
    monkeypatch.setattr(module, "import_module", lambda name: loops)


def test_the_second_process_compiles_half_and_this_one_reads_it_afterwards(monkeypatch, done):
    found_in_the_cache(monkeypatch, False)
    compile_ahead(np.float32, np.float32)
    here = [name for name in LOOPS if name not in BY_THE_SECOND]
    assert done == [("started", *BY_THE_SECOND), ("compiled", *here), ("waited",), ("compiled", *BY_THE_SECOND)]


@pytest.mark.parametrize("was_cached", [True, None], ids=["all is cached", "nothing can be cached"])
def test_no_second_process_where_it_would_not_help(monkeypatch, done, was_cached):
    found_in_the_cache(monkeypatch, was_cached)
    compile_ahead(np.float32, np.float32)
    assert done == [("compiled", *LOOPS)]


def test_a_process_compiles_once_for_all_its_engines(monkeypatch):
    calls = []
    monkeypatch.setattr(module, "compile_ahead", lambda *types: calls.append(types))
    compile_loops.cache_clear()
    for dtype in ("auto", "auto", "int8"):
        compile_loops(torch.float32, dtype)
    compile_loops.cache_clear()
    assert calls == [(np.float32, np.float32), (np.float32, np.int8)]


def test_the_second_process_needs_no_torch_and_leaves_its_loops_in_the_cache(tmp_path):
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-P", "-X", "importtime", "-m", module.__name__, "float32", "float32", "replay_loops"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert not [line for line in ran.stderr.splitlines() if line.split()[-1:] == ["torch"]]
    look = "from minivllm.kernels.cpu import replay_loops; print(replay_loops.programs().was_cached)"
    command = [sys.executable, "-P", "-c", look]
    assert subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout == "True\n"
