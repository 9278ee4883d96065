"""PERFORMANCE.md shows what was measured."""

from pathlib import Path

import pytest

from minivllm_lab.marks import put_between_marks
from minivllm_lab.results import read_record

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.parametrize("name", ["peers"])
def test_the_table_is_that_of_the_results(name, load_benchmark):
    page = (BENCHMARKS / "PERFORMANCE.md").read_text()
    found = read_record(BENCHMARKS / f"results/{name}.cpu.json", name)
    assert put_between_marks(page, name, load_benchmark(name).markdown(found)) == page


def test_the_tables_of_a_gpu_are_those_of_the_results(load_benchmark):
    page = (BENCHMARKS / "PERFORMANCE.md").read_text()
    found, kernels = (
        read_record(BENCHMARKS / f"results/{name}.nvidia-h200.json", name) for name in ("gpu_engine", "kernels")
    )
    assert put_between_marks(page, "gpu", load_benchmark("gpu_engine").markdown(found, kernels)) == page
    assert not found["figures"]["compiled_later"]
