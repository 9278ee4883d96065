"""One interactive piece per lesson: `from widgets import kv_cache; kv_cache.show()`. None of them imports torch."""

from pathlib import Path


def names() -> list[str]:
    """Every widget, by its package: those that define a `SPEC`."""
    packages = Path(__file__).parent.glob("*/__init__.py")
    return sorted(path.parent.name for path in packages if "\nSPEC = Spec(" in path.read_text())
