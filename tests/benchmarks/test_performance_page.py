"""Test that pages show what was measured."""

from pathlib import Path

import pytest

from minivllm_lab.marks import put_between_marks
from minivllm_lab.results import read_record

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_the_table_is_that_of_the_results(load_benchmark):
    page = (BENCHMARKS / "PERFORMANCE.md").read_text()
    record = read_record(BENCHMARKS / "results/peers.cpu.json", "peers")
    assert put_between_marks(page, "peers", load_benchmark("peers").markdown(record)) == page


@pytest.mark.parametrize(
    ("name", "mark", "part"),
    [
        ("chunked_prefill", "servers", None),
        ("preemption", "cliff", "cliff"),
        ("speculation", "speculation", None),
    ],
)
def test_the_notes_have_the_results(name, mark, part, load_benchmark):
    benchmark = load_benchmark(name)
    figures = read_record(BENCHMARKS / f"results/{name}.cpu.json", name)["figures"]
    page = benchmark.NOTES.read_text()
    assert put_between_marks(page, mark, benchmark.page_table(figures[part] if part else figures)) == page


def test_the_tables_of_a_gpu_are_those_of_the_results(load_benchmark):
    page = (BENCHMARKS / "PERFORMANCE.md").read_text()
    result, kernels = (
        read_record(BENCHMARKS / f"results/{name}.nvidia-h200.json", name) for name in ("gpu_engine", "kernels")
    )
    assert put_between_marks(page, "gpu", load_benchmark("gpu_engine").markdown(result, kernels)) == page
    assert not result["figures"]["compiled_later"]
