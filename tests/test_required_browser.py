"""MINIVLLM_REQUIRE_BROWSER: a test run in which no browser test finished fails, and says why."""

from pathlib import Path
from types import SimpleNamespace

import pytest


class Session:
    """A finished run, as the hooks of conftest.py see it, whose tests have these keywords."""

    def __init__(self, stash: pytest.Stash, *keywords: str, collectonly: bool = False) -> None:
        self.exitstatus = pytest.ExitCode.OK
        self.lines: list[str] = []
        self.stats = {"passed": [SimpleNamespace(keywords={word}, user_properties=[]) for word in keywords]}
        plugins = SimpleNamespace(get_plugin=lambda name: self if name == "terminalreporter" else None)
        options = SimpleNamespace(collectonly=collectonly)
        self.config = SimpleNamespace(pluginmanager=plugins, option=options, stash=stash)

    def write_line(self, line: str, **_colour: bool) -> None:
        self.lines.append(line)


@pytest.mark.parametrize(
    ("required", "keywords", "collectonly", "fails"),
    [
        (True, ["plain"], False, True),
        (True, ["plain", "browser"], False, False),
        (True, ["plain"], True, False),
        (False, ["plain"], False, False),
    ],
)
def test_a_run_without_a_browser_test_fails_where_one_is_required(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, required, keywords, collectonly, fails
):
    conftest = request.config.pluginmanager.get_plugin(str(Path(__file__).with_name("conftest.py")))
    monkeypatch.setattr(conftest, "BROWSER_REQUIRED", required)
    session = Session(request.config.stash, *keywords, collectonly=collectonly)
    conftest.pytest_sessionfinish(session)
    conftest.pytest_terminal_summary(session, session.config)
    assert (session.exitstatus == pytest.ExitCode.TESTS_FAILED) == fails
    assert ("MINIVLLM_REQUIRE_BROWSER is set, and no browser test ran" in session.lines) == fails
