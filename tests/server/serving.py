"""A server as users start it: a process of its own, real sockets."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil
from patience import eventually

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
        eventually(lambda: self.process.poll() is not None or answers(self.client), SECONDS_TO_START)
        assert answers(self.client), f"the server does not start:\n{self.said()}"

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

    def metric(self, name: str, *labels: str) -> float:
        """Sum a metric, or several that a pattern names, over the rows with these labels, as `engine="0"`."""
        lines = self.client.get("/metrics").text.splitlines()
        rows = [line for line in lines if re.match(rf"(?:{name})[{{ ]", line) and all(map(line.__contains__, labels))]
        return sum(float(row.rsplit(" ", 1)[1]) for row in rows)

    def num_aborted(self) -> float:
        return self.metric("vllm:request_success_total", 'finished_reason="abort"')

    def is_idle(self) -> bool:
        return not self.metric("vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc)")

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


def answers(client: httpx.Client, status: int = 200) -> bool:
    """Return whether a server answers, and with this status when asked for its health."""
    try:
        return client.get("/health").status_code == status
    except httpx.TransportError:
        return False


def events_of(stream: str) -> list[dict[str, Any]]:
    """Return the events of a stream, except the one that says it is done."""
    return [json.loads(line.removeprefix("data: ")) for line in stream.splitlines() if line.startswith("data: {")]


def refusal(reply: httpx.Response) -> tuple[int, str, str | None]:
    """Return an error's status, type and the parameter at fault."""
    error = reply.json()["error"]
    return reply.status_code, error["type"], error["param"]


def free_port() -> int:
    return free_ports(1)[0]
