"""Provide one interactive widget per lesson: `from widgets import kv_cache; kv_cache.show()`. No
widget imports torch.
"""

from pathlib import Path


def names() -> list[str]:
    """List the packages that define a widget's `SPEC`."""
    packages = Path(__file__).parent.glob("*/__init__.py")
    return sorted(path.parent.name for path in packages if "\nSPEC = Spec(" in path.read_text())
