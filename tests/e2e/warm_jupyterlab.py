"""A JupyterLab whose kernels are forked from a process that has loaded torch, numba and IPython
(`warm_processes.py`).

Loading them takes most of a notebook's time. The first kernel is a fresh interpreter, as all
kernels are outside of tests, and so is any that starts before everything is loaded: Jupyter would
answer no request while it waited.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jupyter_client import launcher
from jupyterlab.labapp import main

if TYPE_CHECKING:
    from warm_processes import WarmSubprocess

TESTS = str(Path(__file__).resolve().parents[1])


class Starter:
    """A stand-in for `subprocess.Popen` where Jupyter starts a kernel."""

    def __init__(self) -> None:
        self.warm: WarmSubprocess | None = None

    def __call__(self, command: list[str], **options: Any) -> Any:
        if self.warm is not None and self.warm.template.is_loaded():
            return self.warm.Popen(command, **options)
        if self.warm is None:
            self.warm = warm_subprocess()
        return subprocess.Popen(command, **options)

    def close(self) -> None:
        if self.warm is not None:
            self.warm.template.close()


def warm_subprocess() -> WarmSubprocess | None:
    """Make the object that forks kernels, or return None where forking does not work; no kernel
    finds the tests' modules.
    """
    sys.path.append(TESTS)
    from warm_processes import CAN_FORK, Template, WarmSubprocess

    sys.path.remove(TESTS)
    return WarmSubprocess(Template("ipykernel.kernelapp", "ipykernel.zmqshell")) if CAN_FORK else None


if __name__ == "__main__":
    launcher.Popen = starter = Starter()  # pyright: ignore[reportAttributeAccessIssue]
    try:
        sys.exit(main())
    finally:
        starter.close()
