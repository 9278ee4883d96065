"""A separate JupyterLab for tests: on a free port, with all its files in a temporary folder."""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

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
    with log.open("w") as output:
        server = subprocess.Popen(
            [sys.executable, "-P", "-m", "jupyterlab", *_flags(folder, port)],
            env=_environment(private),
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        address = f"http://127.0.0.1:{port}"
        _wait_until_it_answers(server, address, log)
        yield address
    finally:
        _stop(server, log)


def _flags(folder: Path, port: int) -> list[str]:
    return [
        "--no-browser",
        "--allow-root",
        "--ip=127.0.0.1",
        f"--port={port}",
        "--ServerApp.port_retries=0",
        f"--ServerApp.root_dir={folder}",
        "--IdentityProvider.token=",
        "--ServerApp.disable_check_xsrf=True",
        "--ServerApp.terminals_enabled=False",
        "--LabApp.expose_app_in_browser=True",
    ]


def _environment(private: Path) -> dict[str, str]:
    places = {
        "JUPYTER_CONFIG_DIR": "config",
        "JUPYTER_DATA_DIR": "data",
        "JUPYTER_RUNTIME_DIR": "runtime",
        "JUPYTERLAB_SETTINGS_DIR": "settings",
        "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
        "IPYTHONDIR": "ipython",
    }
    own = {name: str(private / place) for name, place in places.items()}
    return {**os.environ, **own, "JUPYTER_CONFIG_PATH": str(CONFIG)}


def _wait_until_it_answers(server: subprocess.Popen, address: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            break
        try:
            urllib.request.urlopen(f"{address}/api/status", timeout=2).close()
            return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"JupyterLab does not answer at {address}:\n{log.read_text()[-3000:]}")


def _stop(server: subprocess.Popen, log: Path) -> None:
    """Stop the server and its kernels, that is, the whole process group.

    A server that has done all its work for SIGTERM may still run forever: its interpreter waits for
    worker threads whose loop is gone.
    """
    try:
        os.killpg(server.pid, signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        while server.poll() is None and time.monotonic() < deadline and not _has_stopped(server, log):
            time.sleep(0.1)
        os.killpg(server.pid, signal.SIGKILL)
        server.wait(10)
    except ProcessLookupError:
        return


def _has_stopped(server: subprocess.Popen, log: Path) -> bool:
    """Return whether the server has shut down its extensions and kernels."""
    try:
        return "Shutting down" in log.read_text() and not psutil.Process(server.pid).children()
    except psutil.NoSuchProcess:
        return True
