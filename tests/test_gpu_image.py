"""`make gpu` runs on an image with torch, triton, transformers, numpy, pytest and rich, without
our other packages.
"""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from make_gpu import ROOT, SCRIPTS_WITH_SERVERS, files_of_make_gpu, package_missing_for
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ON_THE_IMAGE = ("torch", "triton", "transformers", "numpy", "pytest", "rich")
NOT_WITH_THEM = {"pydantic", "typer"}
"""What versions here bring with them, and those of an image do not."""


def brought_by(names: tuple[str, ...]) -> set[str]:
    """Return these distributions and all that they require, as far as they are installed."""
    result, left = set(), list(names)
    while left:
        name = canonicalize_name(left.pop())
        if name in result or name in NOT_WITH_THEM:
            continue
        try:
            required = metadata.requires(name) or ()
        except metadata.PackageNotFoundError:
            continue
        result.add(name)
        parsed = map(Requirement, required)
        left += [each.name for each in parsed if each.marker is None or each.marker.evaluate({"extra": ""})]
    return result


def missing_there() -> list[str]:
    """Return every module that is installed here but not on the image, and this repository's
    `widgets`.
    """
    brought = brought_by(ON_THE_IMAGE)
    modules = metadata.packages_distributions().items()
    missing = {name for name, owners in modules if brought.isdisjoint(map(canonicalize_name, owners))}
    return sorted(
        (missing | {"widgets"}) - {"minivllm", "minivllm_lab", "minivllm_simulate"}
    )  # `make gpu` has vllm/ on its path, and not the root


def without_those_packages(*command: str) -> subprocess.CompletedProcess[str]:
    """Run Python as `make gpu` does, where importing any of the missing modules fails."""
    blocked = f"import sys; sys.modules.update(dict.fromkeys({missing_there()}))"
    code = f"{blocked}; import runpy; sys.argv = {list(command)}; "
    code += "runpy.run_module('pytest', run_name='__main__')" if command[0] == "pytest" else (
        f"runpy.run_path({command[0]!r}, run_name='__main__')"
    )  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": "vllm", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment["MINIVLLM_REQUIRE_BROWSER"] = "1"  # as `.ci/run` sets it: to collect must not need one
    process = [sys.executable, "-P", "-c", code]
    return subprocess.run(process, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)


def test_what_is_missing_there_is_what_the_project_installs_on_top():
    missing = missing_there()
    assert {"anywidget", "fastapi", "hypothesis", "llguidance", "msgspec", "numba", "widgets", "zmq"} <= {*missing}
    assert {"minivllm", "minivllm_lab", "numpy", "pytest", "rich", "tokenizers", "torch", "transformers"}.isdisjoint(
        missing
    )


def test_the_tests_that_need_a_gpu_are_all_collected():
    listed = [path.relative_to(ROOT).as_posix() for path in files_of_make_gpu()]
    done = without_those_packages("pytest", "--collect-only", "-p", "no:cacheprovider", *listed)
    assert done.returncode == 0, done.stdout[-3000:]
    collected = {line.partition("::")[0] for line in done.stdout.splitlines()}
    left_out = {path for path in listed if not any(name.startswith(path) for name in collected)}
    assert left_out == {*SCRIPTS_WITH_SERVERS}
    for path in left_out:
        assert f"left out: 1 file, {Path(path).name}, whose script needs the server's packages (aiohttp)" in done.stdout


def test_where_the_packages_are_no_file_is_left_out():
    assert not any(package_missing_for(path) for path in files_of_make_gpu())


def test_none_of_them_is_forgotten():
    """Every run refuses a GPU test in a file that `make gpu` does not run."""
    file = "tests/core/test_request_queue.py"
    plugin = "type('Marks', (), {'pytest_itemcollected': lambda self, item: item.add_marker('gpu')})()"
    code = f"import pytest, sys; sys.exit(pytest.main(['--collect-only', {file!r}], plugins=[{plugin}]))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"tests/gpu.txt does not have its file: {file}::" in done.stderr


def test_the_benchmark_starts():
    done = without_those_packages("benchmarks/kernels.py", "--help")
    assert done.returncode == 0, done.stderr[-3000:]
