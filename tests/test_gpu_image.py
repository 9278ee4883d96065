"""`make gpu` runs on an image with torch, triton, transformers, numpy, pytest and rich, without our other packages."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
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


def test_the_tests_of_kernels_lessons_and_engine_are_collected():
    (names,) = re.findall(r"^GPU_ENGINE_TESTS := .*,([\w ]+)\)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    engine = [f"tests/engine/test_{name}.py" for name in names.split()]
    done = without_those_packages(
        "pytest", "--collect-only", "-p", "no:cacheprovider", "tests/kernels", "tests/lessons", *engine
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert all(path in done.stdout for path in engine)
    assert "tests/kernels/test_unified_attention.py" in done.stdout
    assert "tests/lessons/test_04_continuous_batching.py" in done.stdout


def test_the_benchmark_starts():
    done = without_those_packages("benchmarks/kernels.py", "--help")
    assert done.returncode == 0, done.stderr[-3000:]
