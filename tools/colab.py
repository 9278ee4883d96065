"""Install the course in Colab's running session; the first cell of each notebook runs this there.

Only what is missing or too old is installed; the rest of Colab stays as it is. The script needs
nothing but Python and pip.
"""

from __future__ import annotations

import importlib
import os
import site
import subprocess
import sys
import sysconfig
import tomllib
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
THEIRS = ("jupyterlab", "ipywidgets")
"""Colab is these itself."""


def wanting() -> list[str]:
    """Return the requirements of pyproject.toml that this Python does not meet."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return [text for text in listed if not _is_met(Requirement(text))]


def _is_met(one: Requirement) -> bool:
    if one.name in THEIRS or (one.marker and not one.marker.evaluate()):
        return True
    try:
        return one.specifier.contains(version(one.name), prereleases=True)
    except PackageNotFoundError:
        return False


def main() -> None:
    """Install what is missing, make it importable in the running Python, and change to the
    notebooks' folder.
    """
    pip = [sys.executable, "-m", "pip", "install", "--quiet"]
    packages = wanting()
    if packages:
        subprocess.run([*pip, *packages], check=True)
    if find_spec("minivllm") is None:
        subprocess.run([*pip, "--no-deps", "--editable", str(ROOT)], check=True)
    site.addsitedir(sysconfig.get_path("purelib"))  # an editable install is a line in a file that is read at the start
    importlib.invalidate_caches()
    os.chdir(ROOT / "notebooks")


if __name__ == "__main__":
    main()
