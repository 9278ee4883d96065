"""Distribute the tests over xdist's workers as whole files, longest first, so that what tests share
is made once.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import PurePosixPath

import pytest
from xdist.scheduler import LoadScopeScheduling

BROWSED = (
    "tests/e2e/test_notebooks.py", "tests/e2e/test_shell.py", "tests/e2e/test_xray.py",
    "tests/notebooks/test_executed_page.py",
)  # fmt: skip
TOGETHER = {
    **dict.fromkeys(BROWSED, "tests/e2e/test_widgets.py"),  # one browser, and one JupyterLab
    **{
        f"tests/site/test_{name}.py": "tests/site/test_exercises.py"  # one served site, one profile of Chromium
        for name in ("firefox", "live", "own_request")
    },
    **{
        f"tests/server/test_{name}.py": "tests/server/test_conformance.py"  # the servers of tests/server/conftest.py
        for name in ("clients", "constraints", "transfer_params", "xray")
    },
}
"""Files -> the file with which they share a fixture of the whole session: one worker runs both."""

LONGEST = (
    "tests/e2e", "tests/site/test_exercises.py", "tests/notebooks/test_notebooks.py", "tests/server", "tests/site",
    "tests/lessons", "tests/lesson_widgets", "tests/lab/test_museum.py", "tests/test_gpu_image.py", "tests/proxy",
    "tests/engine", "tests/kernels", "tests/executor", "tests/workshop", "tests/lab", "tests/test_structure.py",
)  # fmt: skip
"""Files and folders that come first, since who began one of them last would keep all others
waiting. One file builds the site; the others of its folder come when it is built.
"""


class ByFile(LoadScopeScheduling):
    """A scheduler that hands out files in the order of the tests; xdist's own order, by number of
    tests, has the longest last.
    """

    def __init__(self, config: pytest.Config, log: object) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return unit(nodeid)


def unit(nodeid: str) -> str:
    """Return the unit that one worker runs as a whole: a file, or files that share something
    costly.
    """
    file = nodeid.partition("::")[0]
    return TOGETHER.get(file, file)


def place(nodeid: str) -> int:
    """Return the position of a test's file in the order."""
    path = PurePosixPath(unit(nodeid))
    return next((index for index, first in enumerate(LONGEST) if path.is_relative_to(first)), len(LONGEST))


def longest_first(items: list[pytest.Item]) -> None:
    """Sort the tests: the parts of a unit side by side, and the slowest units first."""
    items.sort(key=lambda item: (place(item.nodeid), unit(item.nodeid)))


def shuffle(items: list[pytest.Item], seed: int) -> None:
    """Shuffle the files, and the tests in each: no test may depend on what ran before it."""
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.nodeid.partition("::")[0], []).append(item)
    items[:] = [item for tests in _shuffled([*files.values()], seed) for item in _shuffled(tests, seed)]


def _shuffled(those: Sequence, seed: int) -> list:
    return random.Random(seed).sample(those, len(those))
