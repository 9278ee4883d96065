"""Two real servers with a proxy in front, in processes of their own, each server on a core of its
own.

    with server_pair(model, budget=2048) as pair:
        load(pair.proxy, asks)  # one server computes the prompt, the other the answer
        load(pair.prefill, asks)  # asked directly, the first server does both

A server's threads and its engine's process inherit its core, so two servers do not compute on each
other's time. On one machine this is the closest thing to a machine for each; they still share its memory
and its caches. `pinned` is False where a process cannot be bound to a core, or there is only one
core.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from typing import NamedTuple

from minivllm.errors import MinivllmError
from minivllm.kv_connector.tcp.settings import SECRET_VARIABLE

SECONDS_TO_START, SECONDS_TO_END = 120.0, 15.0
NAME = "lesson"
"""Name of the model in the API."""
SERVER_PACKAGES = ("aiohttp", "fastapi", "msgspec", "prometheus_client", "uvicorn", "zmq")
CONNECTOR = {"kv_connector": "TCPConnector", "kv_role": "kv_both"}


class Pair(NamedTuple):
    """The ports of two servers and of the proxy, and whether each server has a core of its own."""

    prefill: int
    decode: int
    proxy: int
    pinned: bool

    def received_tokens(self) -> int:
        """Read from the second server's metrics how many tokens it has received from the first."""
        with urllib.request.urlopen(f"{_url(self.decode)}/metrics") as page:
            lines = page.read().decode().splitlines()
        name = "vllm:external_prefix_cache_hits_total"
        return int(sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name)))


def missing_package() -> str:
    """Return a package that the servers need and that is not installed, or an empty string."""
    return next((name for name in SERVER_PACKAGES if find_spec(name) is None), "")


@contextmanager
def server_pair(model: str, budget: int, max_model_len: int = 2048) -> Iterator[Pair]:
    """Start both servers and the proxy; stop them when the block ends, also by Ctrl-C or SIGTERM.

    `model` is a model's directory, `budget` the tokens of a step on both servers.

    Raises:
        MinivllmError: one of them does not start; the message holds its last line of output.
    """
    cores = _two_cores()
    ports = free_ports(3)
    environment = os.environ | {SECRET_VARIABLE: secrets.token_hex(16)}  # every user can read a command line
    addresses = ("--prefill", _url(ports[0]), "--decode", _url(ports[1]), "--health-interval", "0.1")
    commands = (*[_serve(model, budget, max_model_len)] * 2, ("proxy", *addresses))
    with ExitStack() as stack:
        stack.enter_context(_sigterm_raises())
        processes: list[MinivllmProcess] = []
        stack.callback(end_all, processes)
        for command, port in zip(commands, ports, strict=True):
            processes.append(MinivllmProcess((*command, "--port", str(port)), environment))
        for process, core in zip(processes, cores, strict=False):
            os.sched_setaffinity(process.process.pid, {core})
        for port, process in zip(ports, processes, strict=True):
            process.wait_until_ready(port)
        yield Pair(*ports, pinned=bool(cores))


def _serve(model: str, budget: int, max_model_len: int) -> tuple[str, ...]:
    sizes = {"max-model-len": max_model_len, "max-num-batched-tokens": budget, "max-num-seqs": 8}
    cache = {"block-size": 16, "num-gpu-blocks-override": 600}
    flags = [part for name, value in (sizes | cache).items() for part in (f"--{name}", str(value))]
    kind = ("--device", "cpu", "--dtype", "float32", "--served-model-name", NAME, "--no-enable-prefix-caching")
    return ("serve", model, *flags, *kind, "--kv-transfer-config", json.dumps(CONNECTOR))


def _url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def _two_cores() -> tuple[int, ...]:
    """Return two cores that this process may use, or none if it cannot bind others to them."""
    if not hasattr(os, "sched_setaffinity"):  # not Linux
        return ()
    cores = sorted(os.sched_getaffinity(0))
    return (cores[0], cores[-1]) if len(cores) > 1 else ()


def free_ports(count: int) -> list[int]:
    """Return different ports that nothing listened on a moment ago."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [probe.getsockname()[1] for probe in probes]


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Let SIGTERM end the block as Ctrl-C does; by default it would end this process and leave
    the servers running.
    """
    if threading.current_thread() is not threading.main_thread():  # only that one may set handlers
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class MinivllmProcess:
    """A command of minivllm in a process of its own, and a file with its output."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.name = command[0]
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        always = ("--host", "127.0.0.1", "--disable-uvicorn-access-log", "--shutdown-timeout", "0")
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "minivllm", *command, *always],
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches it through us, once
        )

    def wait_until_ready(self, port: int) -> None:
        """Wait until the process reports that it is healthy.

        Raises:
            MinivllmError: the process exits first, or takes too long.
        """
        until = time.monotonic() + SECONDS_TO_START
        while self.process.poll() is None and time.monotonic() < until:
            with suppress(OSError), urllib.request.urlopen(f"{_url(port)}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
            time.sleep(0.05)
        self.log.seek(0)
        said = self.log.read().strip().splitlines() or ["it printed nothing"]
        raise MinivllmError(f"minivllm {self.name} does not start on this machine: {said[-1]}")


def end_all(processes: Sequence[MinivllmProcess]) -> None:
    """Ask all processes at once to shut down, along with their children; kill those that do not."""
    for process in processes:
        process.process.terminate()
    try:
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.process.wait(SECONDS_TO_END)
    finally:
        for process in processes:
            process.process.kill()
            process.process.wait()
            process.log.close()
