"""Test the handouts: the mail shows what `make doctor` prints, and the index names all that there is."""

import io
import re
from contextlib import redirect_stdout

import doctor
import pytest
import site_pages
from repository import LESSONS, ROOT, minutes

KIT = ROOT / "workshop"


def test_the_mail_shows_what_the_doctor_prints(monkeypatch: pytest.MonkeyPatch):
    """The doctor prints the block of the mail, if it finds what the block says."""
    block = re.search(r"```text\n(.*?)```", (KIT / "handouts" / "mail.md").read_text(), re.DOTALL)
    assert block
    lines = block[1].splitlines()
    marks, found = {"ok": True, "--": None, "NO": False}, []
    for line in lines[1:-1]:
        if finding := re.fullmatch(r"  (ok|--|NO)  (.{15}) (.*)", line):
            found.append(doctor.Finding(finding[2].strip(), marks[finding[1]], finding[3]))
        else:
            found[-1] = doctor.Finding(found[-1].subject, found[-1].ok, found[-1].found, line.split("→ ")[1])
    source = (ROOT / "tools" / "doctor.py").read_text()
    assert [one.subject for one in found] == list(dict.fromkeys(re.findall(r'Finding\(\s*"([^"]+)"', source)))
    assert all(one.advice in source for one in found)
    monkeypatch.setattr(doctor, "CHECKS", [lambda one=one: one for one in found])
    shown = io.StringIO()
    with redirect_stdout(shown):
        assert doctor.main() == 0
    assert shown.getvalue().splitlines()[1:] == lines[1:]


def test_every_row_of_the_mails_table_is_what_the_doctor_may_print():
    source = (ROOT / "tools" / "doctor.py").read_text()
    for mark, subject in re.findall(r"^\| `(NO|--)  (\w+)", (KIT / "handouts" / "mail.md").read_text(), re.MULTILINE):
        assert mark in source
        assert f'"{subject}' in source


def test_the_index_names_each_guide_with_the_lessons_minutes():
    text = (KIT / "README.md").read_text()
    for stem in LESSONS:
        row = r"^\| {} \| \[.*\]\(guides/{}\.md\) \| {} \+ {} \|$".format(stem[:2], stem, *minutes(stem))
        assert re.search(row, text, re.MULTILINE), stem


def test_the_cheat_sheets_are_those_of_all_lessons():
    name = "workshop/handouts/cheat_sheets.md"
    page = (ROOT / name).read_text()
    assert site_pages.CHEAT_SHEETS in page.splitlines()
    assert [stem for stem in LESSONS if f"](../../lessons/{stem}.md#cheat-sheet)" not in page] == []
    lines = site_pages.cheat_sheets(site_pages.pages_of(ROOT, "https://example.org"), name)
    headings = [line for line in lines if line.startswith("## ")]
    assert [heading[3:5] for heading in headings] == [stem[:2] for stem in LESSONS]
    assert any("](../../lessons/notes/03_flash_attention.md#claims)" in line for line in lines), "links lead on"
    assert sum(line.startswith("| **") for line in lines) > 70
