"""A separate JupyterLab for tests: on a free port, with all its files in a temporary folder."""

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from patience import eventually

from minivllm_lab.disaggregation.server_pair import free_ports

START_SECONDS = 120
STOP_SECONDS = 30
CONFIG = Path(__file__).resolve().parents[2] / ".jupyter"
"""The repository's settings for JupyterLab, which `make lab` takes too: no news, no popups, all
cells drawn.
"""


@contextmanager
def jupyterlab(folder: Path, private: Path) -> Iterator[str]:
    """Serve `folder` and yield the address; everything else that Jupyter writes goes to `private`."""
    private.mkdir(parents=True, exist_ok=True)
    [port] = free_ports(1)
    log = private / "jupyterlab.log"
    command = [sys.executable, "-P", "-m", "jupyterlab", *_flags(folder, port)]
    with log.open("w") as output:
        streams = {"stdout": output, "stderr": subprocess.STDOUT}
        server = subprocess.Popen(command, env=_environment(private), cwd=folder, start_new_session=True, **streams)
    try:
        address = f"http://127.0.0.1:{port}"
        eventually(lambda: server.poll() is not None or _answers(address), START_SECONDS)
        assert _answers(address), f"JupyterLab does not answer at {address}:\n{log.read_text()[-3000:]}"
        yield address
    finally:
        _stop(server, log)


def _flags(folder: Path, port: int) -> list[str]:
    return [
        "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}", "--ServerApp.port_retries=0",
        f"--ServerApp.root_dir={folder}", "--IdentityProvider.token=", "--ServerApp.disable_check_xsrf=True",
        "--ServerApp.terminals_enabled=False", "--LabApp.expose_app_in_browser=True",
    ]  # fmt: skip


def _environment(private: Path) -> dict[str, str]:
    kinds = ("JUPYTER_CONFIG", "JUPYTER_DATA", "JUPYTER_RUNTIME", "JUPYTERLAB_SETTINGS", "JUPYTERLAB_WORKSPACES")
    own = {f"{kind}_DIR": str(private / kind) for kind in kinds}
    return {**os.environ, **own, "IPYTHONDIR": str(private / "ipython"), "JUPYTER_CONFIG_PATH": str(CONFIG)}


def _answers(address: str) -> bool:
    try:
        urllib.request.urlopen(f"{address}/api/status", timeout=2).close()
    except OSError:
        return False
    return True


def _stop(server: subprocess.Popen, log: Path) -> None:
    """Stop the server and its kernels, that is, the whole process group.

    A server that has done all its work for SIGTERM may still run forever: its interpreter waits for
    worker threads whose loop is gone.
    """
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGTERM)
        eventually(lambda: server.poll() is not None or _has_stopped(server, log), STOP_SECONDS)
        os.killpg(server.pid, signal.SIGKILL)
        server.wait(10)


def _has_stopped(server: subprocess.Popen, log: Path) -> bool:
    """Return whether the server has shut down its extensions and kernels."""
    try:
        return "Shutting down" in log.read_text() and not psutil.Process(server.pid).children()
    except psutil.NoSuchProcess:
        return True
