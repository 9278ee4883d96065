"""What numba compiles is compiled once: another process finds it on disk."""

import os
import subprocess
import sys

import pytest

COMPILE = """
import numpy as np
from minivllm.kernels.cpu import attention_loops, cache_loops, elementwise_loops, panel_linear_loops
cache_loops.programs(), panel_linear_loops.programs_for(np.float32)
elementwise_loops.programs_for(np.float32), elementwise_loops.programs_for(np.uint16)
attention_loops.programs_for(np.float32)
"""


def test_a_second_process_compiles_nothing(tmp_path):
    pytest.importorskip("numba")
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    found = []
    for _ in range(2):
        subprocess.run([sys.executable, "-P", "-c", COMPILE], env=environment, check=True)
        found.append({path.name: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nb?")})
    assert len(found[0]) == 4 + 5, "an index for each of four files and the code of each of five functions"
    assert found[1] == found[0]
