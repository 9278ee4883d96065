"""Load benchmarks as modules."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from minivllm_lab.exercise import load

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def load_benchmark() -> Iterator[Callable[[str], ModuleType]]:
    """Load a benchmark by name; it can import its neighbours, as a script can."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield lambda name: load(BENCHMARKS / f"{name}.py")
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def bench(load_benchmark: Callable[[str], ModuleType], request: pytest.FixtureRequest) -> ModuleType:
    """Load the benchmark that the test file is named after."""
    return load_benchmark(request.path.stem.removeprefix("test_"))
