"""`make gpu` runs on an image with torch, triton, transformers, numpy, pytest and rich, without our other packages."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GPU_TESTS = (ROOT / "tests" / "gpu.txt").read_text().split()
"""What `make gpu` hands to pytest. Other tests cannot even be imported there."""
MISSING = ("hypothesis", "ipywidgets", "matplotlib", "nbformat", "numba", "playwright", "typer")


def without_those_packages(*command: str) -> subprocess.CompletedProcess[str]:
    """Run Python where importing one of MISSING fails, as `make gpu` calls it."""
    blocked = f"import sys; sys.modules.update(dict.fromkeys({MISSING}))"
    code = f"{blocked}; import runpy; sys.argv = {list(command)}; "
    code += "runpy.run_module('pytest', run_name='__main__')" if command[0] == "pytest" else (
        f"runpy.run_path({command[0]!r}, run_name='__main__')"
    )  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": "vllm", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment["MINIVLLM_REQUIRE_BROWSER"] = "1"  # as `.ci/run` sets it: to collect must not need one
    process = [sys.executable, "-P", "-c", code]
    return subprocess.run(process, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)


def test_the_tests_that_need_a_gpu_are_all_collected():
    done = without_those_packages("pytest", "--collect-only", "-p", "no:cacheprovider", *GPU_TESTS)
    assert done.returncode == 0, done.stdout[-3000:]
    marked = [path for path in (ROOT / "tests").rglob("test_*.py") if re.search(r"\bmark\.gpu\b", path.read_text())]
    collected = {line.partition("::")[0] for line in done.stdout.splitlines()}
    for path in (*GPU_TESTS, *(path.relative_to(ROOT).as_posix() for path in marked)):
        assert any(name.startswith(path) for name in collected), path


def test_the_benchmark_starts():
    done = without_those_packages("benchmarks/kernels.py", "--help")
    assert done.returncode == 0, done.stderr[-3000:]
