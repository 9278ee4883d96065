"""Find Chromium on this machine."""

import os
import runpy
import shutil
from collections.abc import Sequence
from pathlib import Path

NAMES = runpy.run_path(str(Path(__file__).resolve().parents[2] / "tools" / "doctor.py"))["BROWSERS"]
HOW_TO_GET_IT = "apt-get install chromium, or name one in CHROMIUM=PATH"


def find_chromium() -> str | None:
    """Return Chromium's path, or None."""
    return find_program("CHROMIUM", NAMES)


def find_program(variable: str, names: Sequence[str]) -> str | None:
    """Return the path of the program that the environment's `variable` names, else of the first of
    `names` on the PATH; None if there is none.
    """
    named = os.environ.get(variable)
    return next((path for name in ([named] if named else names) if (path := shutil.which(name))), None)
