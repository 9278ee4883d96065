"""Test that the page of others' reports quotes what our engine does."""

import re

import pytest
import reports
from refusals import assert_refused
from repository import ROOT

PAGE = reports.PAGE.read_text()
QUOTED = {quote["name"]: quote["said"] for quote in reports.QUOTE.finditer(PAGE)}


def test_each_report_is_on_the_page_with_a_link_and_a_lesson():
    assert [*QUOTED] == [*reports.REPORTS]
    for part in PAGE.split("\n### ")[1:]:
        part = part.split("\n## ")[0]
        before, mark, _ = part.partition("<!-- report:")
        assert mark
        assert re.search(r"\]\(https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+\)", before)
        assert re.search(r"\]\(\.\./\d\d_\w+\.md\)", before)


@pytest.mark.parametrize("name", reports.REPORTS)
def test_the_page_quotes_what_the_command_prints(name: str):
    assert "\n".join(reports.REPORTS[name]()) == QUOTED[name]


def test_tests_that_the_page_names_are_there():
    for name in re.findall(r"\| `(tests/[\w/]+\.py)(?: -k \w+)?` \|", PAGE):
        assert (ROOT / name).is_file()


def test_an_unknown_name_is_refused():
    arguments = reports.parser().parse_args(["no-such"])
    assert_refused("there is no report 'no-such'; there are: too-long", reports.main, arguments)
