"""Long work shows a sign of life on a terminal and in a notebook, leaves nothing behind, and is
silent in a file.
"""

import io

import pytest
from rich.console import Console

from minivllm_lab import progress


def of_kind(monkeypatch, kind):
    """Replace the console by one of this kind; return the buffer that it writes to."""
    written = io.StringIO()
    console = Console(file=written, force_terminal=kind == "terminal", force_jupyter=kind == "notebook", width=80)
    monkeypatch.setattr(progress, "console", console)
    return written


@pytest.fixture
def outputs(monkeypatch):
    """Return the outputs of a notebook's cell, one entry for each change."""
    shown = []

    class Handle:
        def update(self, data, raw):
            assert raw
            shown.append(data["text/plain"])

    def display(data, raw, display_id):
        assert raw
        assert display_id
        shown.append(data["text/plain"])
        return Handle()

    monkeypatch.setattr("IPython.display.display", display)
    return shown


def test_nothing_is_written_into_a_file(monkeypatch):
    written = of_kind(monkeypatch, "file")
    with progress.working("waiting"):
        assert list(progress.track([1, 2], "counting")) == [1, 2]
    assert written.getvalue().strip() == ""


def test_a_terminal_says_what_is_being_done(monkeypatch):
    written = of_kind(monkeypatch, "terminal")
    with progress.working("waiting"):
        pass
    assert list(progress.track([1, 2], "counting")) == [1, 2]
    assert "waiting …" in written.getvalue()
    assert "counting" in written.getvalue()


def test_a_cell_counts_and_is_empty_at_the_end(monkeypatch, outputs):
    of_kind(monkeypatch, "notebook")
    assert list(progress.track(iter("ab"), "counting")) == ["a", "b"]
    assert outputs == ["", "counting … 0 done", "counting … 1 done", ""]
    outputs.clear()
    assert list(progress.track({"a": 1}.items(), "counting")) == [("a", 1)]
    assert outputs == ["", "counting … 0 of 1 done", ""]


def test_a_cell_is_emptied_where_the_work_fails(monkeypatch, outputs):
    of_kind(monkeypatch, "notebook")
    with pytest.raises(ZeroDivisionError), progress.working("dividing"):
        raise ZeroDivisionError
    assert outputs == ["", "dividing …", ""]
