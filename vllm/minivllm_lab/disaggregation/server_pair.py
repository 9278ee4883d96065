"""Two real servers and a proxy before them, in processes of their own, each server on a core of its own.

    with server_pair(model, budget=2048) as pair:
        load(pair.proxy, asks)  # the prompt is computed by one, the answer by the other
        load(pair.prefill, asks)  # asked directly, the first one does both

A server's threads and its engine's process inherit its core, so two servers do not compute on each other's time. That
is as near to a machine each as one machine comes; they still share its memory and its caches. Where a process cannot
be bound to a core, or there is one core only, `pinned` is False.
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
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from minivllm.errors import MinivllmError
from minivllm.kv_connector.tcp.settings import SECRET_VARIABLE

SECONDS_TO_START, SECONDS_TO_END = 120.0, 15.0
NAME = "lesson"
"""The model's name in the API."""
SERVER_PACKAGES = ("aiohttp", "fastapi", "msgspec", "prometheus_client", "uvicorn", "zmq")
CONNECTOR = {"kv_connector": "TCPConnector", "kv_role": "kv_both"}


@dataclass(frozen=True)
class Pair:
    """The ports of two servers and of the proxy; whether each server has a core of its own."""

    prefill: int
    decode: int
    proxy: int
    pinned: bool

    def received_tokens(self) -> int:
        """How many tokens' keys and values the second server has got from the first one, as it says itself."""
        with urllib.request.urlopen(f"{_url(self.decode)}/metrics") as page:
            lines = page.read().decode().splitlines()
        name = "vllm:external_prefix_cache_hits_total"
        return int(sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name)))


def missing_package() -> str:
    """A package that servers or their cores need and that is not installed; empty if all are there."""
    return next((name for name in SERVER_PACKAGES if find_spec(name) is None), "")


@contextmanager
def server_pair(model: str, budget: int, max_model_len: int = 2048) -> Iterator[Pair]:
    """Starts all three; ends them at the end of the block, however it ends (also by Ctrl-C or SIGTERM).

    `model`: a model's directory; `budget`: tokens of a step, on both.

    Raises:
        MinivllmError: one of them does not start; says what it said last.
    """
    cores = _two_cores()
    ports = free_ports(3)
    environment = os.environ | {SECRET_VARIABLE: secrets.token_hex(16)}  # a command line can be read by all
    with ExitStack() as stack:
        stack.enter_context(_told_to_end())
        addresses = ("--prefill", _url(ports[0]), "--decode", _url(ports[1]), "--health-interval", "0.1")
        commands = (*[_serve(model, budget, max_model_len)] * 2, ("proxy", *addresses))
        started = [
            stack.enter_context(_process((*command, "--port", str(port)), environment, core))
            for command, port, core in zip(commands, ports, (*(cores or (None, None)), None), strict=True)
        ]
        stack.callback(lambda: [process.tell_to_end() for process in started])  # all at once, then wait for each
        for port, process in zip(ports, started, strict=True):
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


def _two_cores() -> tuple[int, int] | None:
    """Two cores that this process may use, if it can bind others to them."""
    if not hasattr(os, "sched_setaffinity"):  # not Linux
        return None
    cores = sorted(os.sched_getaffinity(0))
    return (cores[0], cores[-1]) if len(cores) > 1 else None


def free_ports(count: int) -> list[int]:
    """Ports that nobody listened on a moment ago, all different."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [probe.getsockname()[1] for probe in probes]


@contextmanager
def _told_to_end() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does; by default it would end this process alone, and servers would go on."""
    if threading.current_thread() is not threading.main_thread():  # only that one may set handlers
        yield
        return

    def stop(*_: Any) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _bound_to(core: int | None) -> Iterator[None]:
    """What this thread starts within the block runs on this core only."""
    if core is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class MinivllmProcess:
    """A command of minivllm's in a process of its own, and the file that has what it says."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.name, self.log, self.was_told = command[0], tempfile.TemporaryFile("w+"), False  # noqa: SIM115
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
        """Until it answers that it is well. Raises `MinivllmError` if it ends before, or takes too long."""
        until = time.monotonic() + SECONDS_TO_START
        while self.process.poll() is None and time.monotonic() < until:
            with suppress(OSError), urllib.request.urlopen(f"{_url(port)}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
            time.sleep(0.05)
        self.log.seek(0)
        said = self.log.read().strip().splitlines() or ["it said nothing"]
        raise MinivllmError(f"minivllm {self.name} does not start on this machine: {said[-1]}")

    def tell_to_end(self) -> None:
        """Sends SIGTERM, once: a second one would cut an orderly end short."""
        if not self.was_told:
            self.was_told = True
            self.process.terminate()

    def end(self) -> None:
        """Asks it to end, which takes its own processes with it; makes it end if it does not."""
        self.tell_to_end()
        try:
            self.process.wait(SECONDS_TO_END)
        finally:
            self.process.kill()
            self.process.wait()
            self.log.close()


@contextmanager
def _process(command: Sequence[str], environment: Mapping[str, str], core: int | None) -> Iterator[MinivllmProcess]:
    with _bound_to(core):
        one = MinivllmProcess(command, environment)
    try:
        yield one
    finally:
        one.end()
