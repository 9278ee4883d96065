"""Report what this machine can run, what it cannot run and why, and what to do about it.

    make doctor

Participants send its output back before a workshop. It needs nothing but Python.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EMBEDDED = ROOT / "vllm" / "models" / "tiny-python" / "model.safetensors"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """One line of the report: `ok` is None if a missing item only slows things down or disables
    an extra.
    """

    subject: str
    ok: bool | None
    found: str
    advice: str = ""


def check_python() -> Finding:
    """Check Python's version and where its packages are."""
    ok = sys.version_info >= (3, 11)
    advice = "use Python 3.11 or newer (uv can install it: uv python install 3.12)"
    return Finding("Python", ok, platform.python_version(), "" if ok else advice)


def check_uv() -> Finding:
    """Check for uv, the tool that installs everything else."""
    path = shutil.which("uv")
    return Finding("uv", bool(path), "found" if path else "missing", "" if path else "make setup installs it")


def check_packages() -> Finding:
    """Check for the packages that the lessons and the engine import."""
    wanted = ("torch", "transformers", "safetensors", "numpy", "numba", "rich", "matplotlib", "ipywidgets")
    missing = [name for name in wanted if find_spec(name) is None]
    if missing:
        return Finding("packages", False, f"missing: {', '.join(missing)}", "make setup")
    return Finding("packages", True, "complete")


def check_memory() -> Finding:
    """Check for the few GiB of memory that the test suite and lesson 05 need."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    except (ValueError, OSError, AttributeError):
        return Finding("memory", None, "unknown", "4 GiB is enough for every lesson")
    advice = "the lessons need 4 GiB: close other programs"
    return Finding("memory", total >= 4, f"{total:.0f} GiB", "" if total >= 4 else advice)


def check_disk() -> Finding:
    """Check that there is room for the packages."""
    free = shutil.disk_usage(ROOT).free / GIB
    enough = free >= 8 or check_packages().ok
    advice = "the packages take 6 GB, or about 2 GB with make setup-cpu"
    return Finding("free disk", bool(enough), f"{free:.0f} GiB", "" if enough else advice)


def check_model() -> Finding:
    """Check for the embedded model's weights."""
    found = EMBEDDED.exists()
    advice = "clone the repository again: the model is part of it"
    return Finding("embedded model", found, "found" if found else "missing", "" if found else advice)


def check_triton() -> Finding:
    """Check for Triton, which compiles or interprets the kernels."""
    if find_spec("triton") is None:
        advice = "kernels need Linux (or WSL); everything else runs" if sys.platform != "linux" else "make setup"
        return Finding("Triton", None, "missing", advice)
    import triton

    return Finding("Triton", True, triton.__version__)


def check_gpu() -> Finding:
    """Check for a CUDA device, and report what it can do."""
    if find_spec("torch") is None:
        return Finding("GPU", None, "unknown", "make setup, then make doctor again")
    import torch

    if not torch.cuda.is_available():
        advice = "kernels run in Triton's interpreter: correct, but slow"
        return Finding("GPU", None, f"none visible to torch {torch.__version__}", advice)
    major, minor = torch.cuda.get_device_capability()
    free, total = torch.cuda.mem_get_info()
    text = f"{torch.cuda.get_device_name()}, sm_{major}{minor}, {free / GIB:.0f} of {total / GIB:.0f} GiB free"
    return Finding("GPU", major >= 8 or None, text, "" if major >= 8 else "older than sm_80: bf16 kernels may not run")


def check_jupyter() -> Finding:
    """Check for JupyterLab, in which the widgets run."""
    found = find_spec("jupyterlab") is not None
    return Finding("JupyterLab", found, "found" if found else "missing", "" if found else "make setup")


def check_browser() -> Finding:
    """Check for Chromium on the PATH, which only the browser test needs."""
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    advice = "make test skips the browser test; apt-get install chromium provides the browser"
    return Finding("Chromium", True if path else None, "found" if path else "not found", "" if path else advice)


CHECKS: tuple[Callable[[], Finding], ...] = (
    check_python,
    check_uv,
    check_packages,
    check_memory,
    check_disk,
    check_model,
    check_triton,
    check_gpu,
    check_jupyter,
    check_browser,
)


def main() -> int:
    """Print one line per check; return 1 if something essential is missing."""
    print(f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores")
    findings = [check() for check in CHECKS]
    for finding in findings:
        mark = {True: "ok", False: "NO", None: "--"}[finding.ok]
        print(f"  {mark}  {finding.subject:<15} {finding.found}")
        if finding.advice:
            print(f"      {'':<15} → {finding.advice}")
    broken = [finding.subject for finding in findings if finding.ok is False]
    print(f"Fix first: {', '.join(broken)}." if broken else "Every lesson runs here.")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
