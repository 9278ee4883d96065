"""Test that a results file holds what its script writes and nothing left from an older script."""

import json
from collections.abc import Collection, Iterable
from pathlib import Path

import pytest
from repository import ROOT

RESULTS = sorted((ROOT / "benchmarks/results").glob("*.json"))
SCRIPTS = {
    path: script
    for path in RESULTS
    for script in (ROOT / folder / f"{path.name.split('.')[0]}.py" for folder in ("benchmarks", "vllm"))
    if script.exists()
}


def rows_of(name: str, load_benchmark) -> Collection[str]:
    """Return the row keys of a table whose rows are not named in the script's own text."""
    rows = {
        "ablation": lambda: [work.name for work in load_benchmark("levers").works(quick=True, seed=0)],
        "same_tokens": lambda: load_benchmark("same_tokens").WAYS,
    }
    return rows[name]() if name in rows else ()


def lab_of(stem: str) -> Iterable[Path]:
    """Return the files of a lesson's folder in the lab; a benchmark has none."""
    return (ROOT / "vllm/minivllm_lab" / stem.partition("_")[2]).glob("*.py") if stem[:2].isdigit() else ()


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_each_figure_is_one_that_the_script_writes(path, load_benchmark):
    text = "".join(part.read_text() for part in [SCRIPTS[path], *lab_of(SCRIPTS[path].stem)])
    rows = rows_of(SCRIPTS[path].stem, load_benchmark)
    figures = json.loads(path.read_text())["figures"]
    unknown = [key for key in figures if not (key.isdigit() or key in rows or f'"{key}"' in text or f"{key}=" in text)]
    assert not unknown, f"{SCRIPTS[path].name} writes none of these"
    assert len(SCRIPTS) > 30
