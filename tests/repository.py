"""The repository's folder. Its programs in `tools` can be imported by name (`pythonpath` in `pyproject.toml`)."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
