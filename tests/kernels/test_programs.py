"""Test that numba compiles a loop once: another process finds it on disk, and without a disk cache
it still runs.
"""

import math
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
cache_loops.copies_of(np.float32), cache_loops.quantizer(), replay_loops.programs()
attention_loops.programs_for(np.float32, np.float32), lora_loops.programs_for(np.float32)
panel_linear_loops.programs_for(np.float32), quantized_linear_loops.programs_for(np.int8, np.float32)
elementwise_loops.norms_of(np.float32), elementwise_loops.norms_of(np.uint16)
elementwise_loops.gates_of(np.float32), elementwise_loops.rotations_of(np.float32)
print(*hits)
"""

NORMALISE = """
import numpy as np
from minivllm.kernels.cpu import elementwise_loops

x, residual, weight = np.full(64, 2.0, "f"), np.zeros(64, "f"), np.ones(64, "f")
out = np.empty(64, "f")
cells = np.array([0, 1, 64, 0, *(array.ctypes.data for array in (out, residual, x, weight))])
elementwise_loops.norms_of(np.float32)(cells.ctypes.data)
print(out[5])
"""
FP32_ULP = 2.0**-23
"""Of 1.0. Processors differ in the last place: some refine an estimate of 1 / √x, others divide."""


def run(code, **options):
    pytest.importorskip("numba")
    return subprocess.run([sys.executable, "-P", "-c", code], check=True, capture_output=True, text=True, **options)


def test_a_second_process_compiles_nothing():
    """The first process compiles only what no earlier run of the tests has needed.

    If two processes write an index at the same time, as workers do, one write is lost; then a third
    process runs.
    """
    for _ in range(4):
        hits = run(FIND).stdout.split()
        if "0" not in hits:
            break
    assert hits == ["1"] * 14


def assert_runs_and_warns_once(done):
    assert math.isclose(float(done.stdout), 1.0, rel_tol=4 * FP32_ULP)
    assert done.stderr.count("NUMBA_CACHE_DIR") == 1
    assert "Traceback" not in done.stderr


def test_a_full_disk_does_not_stop_it(tmp_path):
    def allow_only_empty_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    assert_runs_and_warns_once(run(NORMALISE, env=environment, preexec_fn=allow_only_empty_files))


def test_a_cache_that_was_cut_short_does_not_stop_it(tmp_path):
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    assert not run(NORMALISE, env=environment).stderr
    indices = [*tmp_path.rglob("*.nbi")]
    assert len(indices) == 1
    for index in indices:
        os.truncate(index, 3)
    assert_runs_and_warns_once(run(NORMALISE, env=environment))
