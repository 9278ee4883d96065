"""Two hosts: network namespaces of this machine with a cable between them, and a Ray cluster
over both.
"""

import contextlib
import importlib.util
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ASKED_FOR = "MINIVLLM_TEST_HOSTS"
PORT = 6390
SECONDS = 180


def why_not_here() -> str | None:
    """Return why these tests cannot run here, or None if they can."""
    if not os.environ.get(ASKED_FOR):
        return "need two hosts, and take long (make dist)"
    if sys.platform != "linux" or os.geteuid() or not shutil.which("ip"):
        return "need Linux, root and iproute2, to make two hosts of this one"
    if importlib.util.find_spec("ray") is None:
        return "need ray (uv sync --group dist)"
    return None


class Hosts:
    """Hosts "a" and "b" at 10.78.0.1 and 10.78.0.2, each a node of one Ray cluster with one CPU."""

    def __init__(self) -> None:
        self._names = {host: f"mv{os.getpid()}{host}" for host in "ab"}
        self._env = os.environ | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "RAY_ADDRESS": f"{self.address('a')}:{PORT}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),  # of this cluster alone
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_raylet_start_wait_time_s": str(SECONDS),
            "PYTHONUNBUFFERED": "1",
        }

    @staticmethod
    def address(host: str) -> str:
        return {"a": "10.78.0.1", "b": "10.78.0.2"}[host]

    def start(self) -> None:
        a, b = self._names["a"], self._names["b"]
        for name in (a, b):
            ip("netns", "add", name)
        ip("link", "add", "cable", "netns", a, "type", "veth", "peer", "name", "cable", "netns", b)
        for host, name in self._names.items():
            ip("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "cable")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "cable", "up")
        self._ray("a", "--head", f"--port={PORT}", "--include-dashboard=false")
        self._ray("b", f"--address={self.address('a')}:{PORT}")

    def run(self, host: str, code: str) -> subprocess.Popen[str]:
        """Start a Python program on this host."""
        command = ["ip", "netns", "exec", self._names[host], sys.executable, "-c", code]
        return subprocess.Popen(command, env=self._env, stdout=subprocess.PIPE, text=True)

    def cut_cable(self) -> None:
        ip("-n", self._names["a"], "link", "set", "cable", "down")

    def end(self) -> None:
        for name in self._names.values():
            run = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
            for pid in map(int, run.stdout.split()):  # all that runs there is ours
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name])

    def _ray(self, host: str, *flags: str) -> None:
        command = ["ray", "start", f"--node-ip-address={self.address(host)}", "--num-cpus=1", "--disable-usage-stats"]
        done = subprocess.run(
            ["ip", "netns", "exec", self._names[host], *command, "--object-store-memory=83886080", *flags],
            env=self._env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=SECONDS,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextlib.contextmanager
def two_hosts() -> Iterator[Hosts]:
    hosts = Hosts()
    try:
        hosts.start()
        yield hosts
    finally:
        hosts.end()
