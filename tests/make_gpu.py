"""Run the files of `gpu.txt` for `make gpu`, on machines that need not have all of the project's
packages.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS_WITH_SERVERS = ("tests/lessons/06_serving/test_06_serving.py",)
"""Files whose script imports the server, and so cannot be imported without the server's
packages.
"""


class NothingOf(pytest.Module):
    """A file from which no test is collected, so that it is not imported."""

    def collect(self) -> list[pytest.Item]:
        return []


def files_of_make_gpu() -> list[Path]:
    """Return the files and folders that `make gpu` hands to pytest."""
    return [path for pattern in (ROOT / "tests" / "gpu.txt").read_text().split() for path in ROOT.glob(pattern)]


def forgotten(items: Iterable[pytest.Item]) -> pytest.Item | None:
    """Return a GPU test in a file that `make gpu` does not run, or None."""
    listed = {*files_of_make_gpu()}
    marked = (item for item in items if item.get_closest_marker("gpu"))
    return next((item for item in marked if listed.isdisjoint((item.path, *item.path.parents))), None)


def package_missing_for(path: Path) -> str:
    """Return a package that this test file's script needs and that is not installed, or an empty
    string.
    """
    from minivllm_lab.disaggregation.server_pair import missing_package

    return missing_package() if path in [ROOT / name for name in SCRIPTS_WITH_SERVERS] else ""
