"""`make gpu` runs on an image with torch, triton, transformers, numpy, pytest and rich, without
our other packages.
"""

import os
import subprocess
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from make_gpu import ROOT, SCRIPTS_WITH_SERVERS, files_of_make_gpu, package_missing_for
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ON_THE_IMAGE = ("torch", "triton", "transformers", "numpy", "pytest", "rich")
NOT_WITH_THEM = {"pydantic", "typer"}
"""What versions here bring with them, and those of an image do not."""
LISTED = [path.relative_to(ROOT).as_posix() for path in files_of_make_gpu()]


def brought_by(names: tuple[str, ...]) -> set[str]:
    """Return these distributions and all that they require, as far as they are installed."""
    result, left = set(), [*map(canonicalize_name, names)]
    while left:
        if (name := left.pop()) in result | NOT_WITH_THEM:
            continue
        with suppress(metadata.PackageNotFoundError):
            required = map(Requirement, metadata.requires(name) or ())
            result.add(name)
            needed = (each for each in required if each.marker is None or each.marker.evaluate({"extra": ""}))
            left += [canonicalize_name(each.name) for each in needed]
    return result


def missing_there() -> list[str]:
    """Return every module that is installed here but not on the image, and this repository's
    `widgets`.
    """
    brought = brought_by(ON_THE_IMAGE)
    modules = metadata.packages_distributions().items()
    missing = {name for name, owners in modules if brought.isdisjoint(map(canonicalize_name, owners))}
    ours = {"minivllm", "minivllm_lab", "minivllm_simulate"}  # `make gpu` has vllm/ on its path, and not the root
    return sorted((missing | {"widgets"}) - ours)


@pytest.fixture(scope="module")
def on_the_image() -> subprocess.CompletedProcess[str]:
    """Collect the tests of `make gpu` and ask the benchmark for its flags, as `make gpu` does, where
    importing any of the missing modules fails.
    """
    code = (
        "import runpy, sys\n"
        f"sys.modules.update(dict.fromkeys({missing_there()}))\n"
        "import pytest\n"
        f"assert pytest.main(['--collect-only', '-p', 'no:cacheprovider', *{LISTED}]) == 0\n"
        "sys.argv = ['kernels.py', '--help']\n"
        "runpy.run_path('benchmarks/kernels.py', run_name='__main__')\n"
    )
    environment = {**os.environ, "PYTHONPATH": "vllm", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment["MINIVLLM_REQUIRE_BROWSER"] = "1"  # as `.ci/run` sets it: to collect must not need one
    command = [sys.executable, "-P", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)


def test_what_is_missing_there_is_what_the_project_installs_on_top():
    missing = {*missing_there()}
    assert missing >= {"anywidget", "fastapi", "hypothesis", "llguidance", "msgspec", "numba", "widgets", "zmq"}
    assert missing.isdisjoint({*ON_THE_IMAGE, "minivllm", "minivllm_lab", "tokenizers"})


def test_the_tests_that_need_a_gpu_are_all_collected_there_and_the_benchmark_starts(on_the_image):
    shown = on_the_image.stdout
    assert on_the_image.returncode == 0, shown[-3000:] + on_the_image.stderr[-3000:]
    assert "usage: kernels.py" in shown
    collected = {line.partition("::")[0] for line in shown.splitlines()}
    left_out = {path for path in LISTED if not any(name.startswith(path) for name in collected)}
    assert left_out == {*SCRIPTS_WITH_SERVERS}
    for path in left_out:
        assert f"left out: 1 file, {Path(path).name}, whose script needs the server's packages (aiohttp)" in shown


def test_where_the_packages_are_no_file_is_left_out():
    assert not any(package_missing_for(path) for path in files_of_make_gpu())


def test_a_gpu_test_in_a_file_that_make_gpu_does_not_run_is_refused(request: pytest.FixtureRequest):
    """Every run looks at what it has collected."""
    conftest = request.config.pluginmanager.get_plugin(str(ROOT / "tests" / "conftest.py"))
    listed, unlisted = (
        SimpleNamespace(nodeid=name, path=ROOT / name, get_closest_marker=lambda mark: mark == "gpu")
        for name in (LISTED[0], "tests/core/test_request_queue.py")
    )
    conftest.refuse_what_make_gpu_forgets([listed])
    with pytest.raises(pytest.UsageError, match=r"tests/gpu.txt does not have its file: tests/core/test_request_queue"):
        conftest.refuse_what_make_gpu_forgets([listed, unlisted])
