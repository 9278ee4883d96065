"""The notebooks in this repository are what the lessons say, and all their cells run."""

from pathlib import Path

import pytest

from minivllm.lab.exercise import load

ROOT = Path(__file__).resolve().parents[2]
notebooks = load(ROOT / "tools" / "notebooks.py")
PATHS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))


def test_lessons_and_notebooks_agree():
    assert notebooks.drift(ROOT, []) == [], f"to mend: {notebooks.MEND}"


@pytest.mark.without_browser
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_every_cell_runs(path: Path):
    assert notebooks.execute(path) < notebooks.SECONDS_PER_CELL
