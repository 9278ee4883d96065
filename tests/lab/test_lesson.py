"""Test the beginning and the end of a lesson's script."""

import json

import torch
from refusals import assert_refused

from minivllm.config import EMBEDDED_MODEL
from minivllm_lab.cli import lesson_parser
from minivllm_lab.lesson import begin, keep


def arguments(*flags):
    return lesson_parser("A lesson.").parse_args(["--device", "cpu", *flags])


def test_it_begins_with_its_title_and_a_seed(capsys):
    assert begin("Lesson 00", arguments("--seed", "3")) == torch.device("cpu")
    assert capsys.readouterr().out.startswith("Lesson 00, on CPU")
    drawn = torch.rand(3)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(3))


def test_a_device_that_is_not_there_is_no_lesson(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert_refused("no CUDA device", begin, "Lesson 00", arguments("--device", "cuda"))


def test_what_was_found_goes_where_the_command_line_says(tmp_path, capsys):
    numbers, drawn = tmp_path / "numbers.json", []

    def draw(actual, path):
        drawn.append((actual, path))

    keep("vllm/00_x.py", {"a": 1}, arguments(), draw)
    assert not drawn
    assert capsys.readouterr().out == ""
    keep("vllm/00_x.py", {"a": 1}, arguments("--json", str(numbers), "--plot", "x.svg"), draw, slots=5)
    assert drawn == [({"a": 1}, "x.svg")]
    assert capsys.readouterr().out.splitlines() == ["wrote x.svg", f"wrote {numbers}"]
    record = json.loads(numbers.read_text())
    assert (record["name"], record["figures"], record["slots"]) == ("00_x", {"a": 1}, 5)


def test_a_quick_run_says_that_its_figures_are_not_the_lessons(capsys):
    keep("vllm/00_x.py", {}, arguments("--quick"), lambda *_: None)
    assert "not those that the lesson quotes" in " ".join(capsys.readouterr().out.split())


def test_the_model_is_the_lessons_unless_another_is_named():
    assert arguments().model == str(EMBEDDED_MODEL)
    assert arguments("--model", "mine").model == "mine"
