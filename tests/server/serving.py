"""A server as users start it: a process of its own, real sockets."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import psutil

from minivllm_lab.disaggregation.server_pair import free_ports

MODEL = Path(__file__).parents[2] / "vllm" / "models" / "tiny-python"
CHAT_TEMPLATE = Path(__file__).parent / "data" / "chat.jinja"
FLAGS = (
    str(MODEL), "--max-model-len", "512", "--dtype", "float32", "--served-model-name", "tiny-python",
    "--num-gpu-blocks-override", "600", "--host", "127.0.0.1", "--disable-uvicorn-access-log",
)  # fmt: skip
SECONDS_TO_START = 240.0
"""Also of a first request: the CPU's loops may have to be compiled, beside neighbours."""


class Server:
    """A running `minivllm serve`, and a client of it."""

    def __init__(self, flags: tuple[str, ...] = (), env: Mapping[str, str] | None = None) -> None:
        self.port = free_port()
        self.log = tempfile.NamedTemporaryFile("a")  # noqa: SIM115
        command = [sys.executable, "-P", "-m", "minivllm", "serve", *FLAGS, "--port", str(self.port), *flags]
        self.process = subprocess.Popen(command, stderr=self.log, stdout=self.log, env=os.environ | dict(env or {}))
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = httpx.Client(base_url=self.url, timeout=SECONDS_TO_START)

    def wait_until_ready(self) -> None:
        end = time.monotonic() + SECONDS_TO_START
        while time.monotonic() < end and self.process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                if self.client.get("/health").status_code == 200:
                    return
            time.sleep(0.05)
        raise AssertionError(f"the server does not start:\n{self.said()}")

    def said(self) -> str:
        return Path(self.log.name).read_text()

    def processes(self) -> list[psutil.Process]:
        """Return the server's process and those below it."""
        own = psutil.Process(self.process.pid)
        return [own, *own.children(recursive=True)]

    def core(self) -> psutil.Process:
        return next(process for process in self.processes() if "minivllm.engine.core_proc" in process.cmdline())

    def folder(self) -> Path:
        """Return the folder of its sockets."""
        command = self.core().cmdline()
        return Path(command[command.index("minivllm.engine.core_proc") + 1])

    def metric(self, name: str) -> float:
        """Sum a metric over its labels."""
        lines = self.client.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))

    def stop(self) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        finally:
            self.process.kill()
            self.log.close()


@contextlib.contextmanager
def running(*flags: str, env: Mapping[str, str] | None = None) -> Iterator[Server]:
    server = Server(flags, env)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()


def free_port() -> int:
    return free_ports(1)[0]
