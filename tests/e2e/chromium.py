"""Find Chromium on this machine."""

import os
import runpy
import shutil
from pathlib import Path

NAMES = runpy.run_path(str(Path(__file__).resolve().parents[2] / "tools" / "doctor.py"))["BROWSERS"]
HOW_TO_GET_IT = "apt-get install chromium, or name one in CHROMIUM=PATH"


def find_chromium() -> str | None:
    """Return Chromium's path, or None: what CHROMIUM names, else the first of the usual names on
    the PATH.
    """
    named = os.environ.get("CHROMIUM")
    return next((path for name in ([named] if named else NAMES) if (path := shutil.which(name))), None)
