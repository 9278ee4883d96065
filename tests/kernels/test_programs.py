"""What numba compiles is compiled once: another process finds it on disk."""

import os
import subprocess
import sys

import pytest

COMPILE = """
from minivllm.kernels import cpu_elementwise, numba_cache
cpu_elementwise._programs(), numba_cache.programs()
"""


def test_a_second_process_compiles_nothing(tmp_path):
    pytest.importorskip("numba")
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    found = []
    for _ in range(2):
        subprocess.run([sys.executable, "-P", "-c", COMPILE], env=environment, check=True)
        found.append({path.name: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nb?")})
    assert len(found[0]) == 4, "an index and the code of each of the two"
    assert found[1] == found[0]
