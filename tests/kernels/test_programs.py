"""Test that numba compiles a loop once: another process finds it on disk, and without a disk cache
it still runs.
"""

import os
import resource
import subprocess
import sys

import pytest

FIND = """
import numpy as np
from minivllm.kernels.cpu import programs

hits, cfunc = [], programs.cfunc

def watched(*signature, **options):
    def compiled(function):
        found = cfunc(*signature, **options)(function)
        hits.append(found.cache_hits)
        return found
    return compiled

programs.cfunc = watched
from minivllm.kernels.cpu import (
    attention_loops, block_copy_loops, cache_loops, elementwise_loops, gumbel_loops, lora_loops, panel_linear_loops,
    quantized_linear_loops, rejection_loops, replay_loops,
)
block_copy_loops.programs_for(), rejection_loops.programs_for(), gumbel_loops.compiled_programs()
cache_loops.copies_of(np.float32), cache_loops.quantizer(), replay_loops.programs_for()
attention_loops.programs_for(np.float32, np.float32), lora_loops.programs_for(np.float32)
panel_linear_loops.programs_for(np.float32), quantized_linear_loops.programs_for(np.int8, np.float32)
elementwise_loops.norms_of(np.float32), elementwise_loops.norms_of(np.uint16)
elementwise_loops.gates_of(np.float32), elementwise_loops.rotations_of(np.float32)
print(*hits)
"""

SET_TO_FIVE = """
import numpy as np
from minivllm.kernels.cpu.programs import array_at, compile_programs

def set_to_five(address):
    array_at(address, 1, np.float64)[0] = 5.0

number = np.zeros(1)
compile_programs(set_to_five)(number.ctypes.data)
print(number[0])
"""


def run(*arguments, **options):
    pytest.importorskip("numba")
    return subprocess.run([sys.executable, "-P", *arguments], check=True, capture_output=True, text=True, **options)


def test_a_second_process_compiles_nothing():
    """The first process compiles only what no earlier run of the tests has needed.

    If two processes write an index at the same time, as workers do, one write is lost; then a third
    process runs.
    """
    for _ in range(4):
        hits = run("-c", FIND).stdout.split()
        if "0" not in hits:
            break
    assert hits == ["1"] * 14


@pytest.fixture
def run_loop(tmp_path):
    """Return a function that runs a small loop in a fresh process, with a cache of its own."""
    script = tmp_path / "loop.py"
    script.write_text(SET_TO_FIVE)
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    return lambda **options: run(script, env=environment, **options)


def assert_runs_and_warns_once(done):
    assert done.stdout == "5.0\n"
    assert done.stderr.count("NUMBA_CACHE_DIR") == 1
    assert "Traceback" not in done.stderr


def test_a_full_disk_does_not_stop_it(run_loop):
    def allow_only_empty_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    assert_runs_and_warns_once(run_loop(preexec_fn=allow_only_empty_files))


def test_a_cache_that_was_cut_short_does_not_stop_it(run_loop, tmp_path):
    assert not run_loop().stderr
    (index,) = tmp_path.rglob("*.nbi")
    os.truncate(index, 3)
    assert_runs_and_warns_once(run_loop())
