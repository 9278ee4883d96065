"""What numba compiles is compiled once: another process finds it on disk. Where nothing can be kept, it still runs."""

import os
import resource
import shutil
import subprocess
import sys

import pytest

COMPILE = """
import numpy as np
from minivllm.kernels.cpu import attention_loops, cache_loops, elementwise_loops, panel_linear_loops
cache_loops.quantizations(), panel_linear_loops.programs_for(np.float32)
elementwise_loops.norms_of(np.float32), elementwise_loops.norms_of(np.uint16), elementwise_loops.gates_of(np.float32)
elementwise_loops.rotations_of(np.float32), attention_loops.programs_for(np.float32)
"""

NORMALISE = """
import torch
from minivllm.kernels.elementwise import add_rms_norm, rotate_heads
x = torch.full((3, 64), 2.0)
rotate_heads(torch.ones(3, 2, 32), torch.arange(3), torch.ones(3, 32))
print(add_rms_norm(x, torch.zeros_like(x), torch.ones(64), 0.0)[1, 5].item())
"""


def run(code, cache, **options):
    pytest.importorskip("numba")
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache)}
    command = [sys.executable, "-P", "-c", code]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True, **options)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The folder in which a process has left what it compiled."""
    folder = tmp_path_factory.mktemp("numba")
    run(COMPILE, folder)
    return folder


def test_a_second_process_compiles_nothing(compiled):
    def files():
        return {path.name: path.stat().st_mtime_ns for path in compiled.rglob("*.nb?")}

    before = files()
    assert len(before) == 6 + 7, "an index for each of six functions, the code of each of their seven forms"
    run(COMPILE, compiled)
    assert files() == before


def assert_runs_and_warns_once(done):
    assert done.stdout.split() == ["1.0"]
    assert done.stderr.count("NUMBA_CACHE_DIR") == 1
    assert "Traceback" not in done.stderr


def test_a_full_disk_does_not_stop_it(tmp_path):
    def allow_only_empty_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    assert_runs_and_warns_once(run(NORMALISE, tmp_path, preexec_fn=allow_only_empty_files))


def test_a_cache_that_was_cut_short_does_not_stop_it(compiled, tmp_path):
    cut = shutil.copytree(compiled, tmp_path / "cut")
    for index in cut.rglob("*.nbi"):
        os.truncate(index, 3)
    assert_runs_and_warns_once(run(NORMALISE, cut))
