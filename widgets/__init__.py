"""One interactive piece per lesson: `from widgets import kv_cache; kv_cache.show()`. None of them imports torch."""

from pathlib import Path


def names() -> list[str]:
    """Every widget, by its module: those that define a `SPEC`."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.py") if "\nSPEC = Spec(" in path.read_text())
