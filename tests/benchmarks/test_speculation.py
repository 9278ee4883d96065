"""The benchmark of speculation: its ways are settings that the engine takes, and the lesson shows what was measured."""

from pathlib import Path

from minivllm.config import SpeculativeConfig
from minivllm.lab.marks import put_between_marks
from minivllm.lab.results import read_record

ROOT = Path(__file__).resolve().parents[2]


def test_the_lesson_shows_the_results(load_benchmark):
    page = (ROOT / "lessons" / "07_speculative_decoding.md").read_text()
    found = read_record(ROOT / "benchmarks/results/speculation.cpu.json", "speculation")
    figures = found["figures"]["ways"]
    assert put_between_marks(page, "speculation", load_benchmark("speculation").page_table(figures)) == page


def test_what_is_available_is_a_setting(load_benchmark):
    ways = load_benchmark("speculation").available()
    assert "n-gram" in ways
    for way in ways.values():
        assert SpeculativeConfig.of(way)


def test_docstrings_of_a_file(load_benchmark):
    source = '"""One."""\ndef two():\n    """Two."""\nx = "three"\n'
    assert load_benchmark("speculation").docstrings(source) == "One.\n\nTwo."
