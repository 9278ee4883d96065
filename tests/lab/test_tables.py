"""Tables in Markdown, and the lines at a script's end."""

import pytest
from rich.console import Console

from minivllm_lab import tables
from minivllm_lab.tables import closing, markdown_table, table

COLUMNS = ("engine", "tokens/s", "alone")


def test_numbers_are_aligned_to_the_right_and_words_to_the_left():
    rows = [("ours", 5823, "419"), ("theirs", 5147, "534")]
    lines = ["| ours | 5823 | 419 |", "| theirs | 5147 | 534 |"]
    head = "| engine | tokens/s | alone |"
    assert markdown_table(COLUMNS, rows).split("\n") == [head, "| --- | ---: | ---: |", *lines]
    assert markdown_table(COLUMNS, iter(rows), words=True).split("\n") == [head, "| --- | --- | --- |", *lines]


def test_a_narrow_terminal_cuts_no_word(monkeypatch, capsys):
    monkeypatch.setattr(tables, "console", Console(width=28, highlight=False))
    table("Load", ["clients", "requests/s", "tokens/s"], [("1", "8.5", "545")])
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert "8.5" in shown


@pytest.mark.parametrize(("terminal", "longest"), [(60, 60), (80, 80), (200, 80)])
def test_what_you_saw_breaks_between_words(monkeypatch, capsys, terminal, longest):
    monkeypatch.setattr(tables, "console", Console(width=terminal, highlight=False))
    sentences = [" ".join(f"word{n}" for n in range(40)), "a tag [/red] is text here"]
    closing(*sentences)
    _, title, *lines = capsys.readouterr().out.splitlines()
    assert title == "What you saw"
    assert longest - 8 < max(map(len, lines)) <= longest
    assert all(line.startswith(("  • ", "    ")) for line in lines)
    assert " ".join(" ".join(lines).split()) == f"• {sentences[0]} • {sentences[1]}"
