"""Check refusals, each of which is one line that says what is wrong."""

import io
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from types import ModuleType
from unittest import mock

import pytest

from minivllm.errors import MinivllmError
from minivllm_lab.cli import run


def assert_refused(words: str, function: Callable, *arguments: object, **settings: object) -> None:
    """Call `function`, which must raise a `MinivllmError` of one line that matches `words`, if there are any."""
    with pytest.raises(MinivllmError, match=words or None) as refusal:
        function(*arguments, **settings)
    assert "\n" not in str(refusal.value)


def assert_refuses(program: ModuleType, *arguments: str, about: str) -> str:
    """Expect bad input to give exit code 2 and one line on stderr that says `about`, before any
    work is shown. Return the line.
    """
    said, shown = io.StringIO(), io.StringIO()
    with (
        mock.patch("sys.argv", ["program", *arguments]),
        redirect_stderr(said),
        redirect_stdout(shown),
        pytest.raises(SystemExit) as end,
    ):
        run(program.main, program.parser())
    assert end.value.code == 2
    (line,) = said.getvalue().strip().splitlines()
    assert about in line
    assert len(shown.getvalue().splitlines()) <= 1, shown.getvalue()
    return line
