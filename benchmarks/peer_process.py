"""An engine in a process of its own, as the benchmarks run ours and its peers, and busy processes
beside it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minivllm.errors import MinivllmError

ENGINES = Path(__file__).resolve().parent / "peer_engines"
ENVIRONMENTS = Path(__file__).resolve().parents[1] / ".peers"
SETTLED_SECONDS = 0.5
"""The pause between two engines: OpenMP's threads go on spinning after their last work, Intel's by
default for 0.2 s.
"""


def python_of(peer: str) -> Path:
    """Return the Python of a peer's environment, whether it exists or not."""
    return ENVIRONMENTS / peer / "bin" / "python"


VLLM_PYTHON = python_of("vllm")
SPIN = "import sys, time\nend = time.monotonic() + float(sys.argv[1])\nwhile time.monotonic() < end: pass"
LONGEST = 3600.0
"""Seconds after which a busy process ends by itself."""


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Keep `count` cores busy, each with a process of its own, until the block ends."""
    with ExitStack() as running:
        for _ in range(count):
            process = subprocess.Popen([sys.executable, "-S", "-c", SPIN, str(LONGEST)])
            running.callback(process.wait)
            running.callback(process.kill)
        yield


@dataclass(frozen=True)
class Peer:
    """An engine with its settings, and the script and Python that run it."""

    title: str
    script: str
    dtype: str
    batch: int = 0
    python: Path = Path(sys.executable)
    environment: Mapping[str, str] = field(default_factory=dict)


class Running:
    """A peer's process."""

    def __init__(self, peer: Peer, work: dict[str, Any], folder: Path) -> None:
        self.peer = peer
        name = peer.title.replace(" ", "-").replace(",", "")
        path, self.log = folder / f"{name}.json", folder / f"{name}.log"
        path.write_text(json.dumps({**work, "dtype": peer.dtype, "batch": peer.batch}))
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [str(peer.python), str(ENGINES / peer.script), str(path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment | dict(peer.environment),
                cwd=folder,  # not the repository, whose folder vllm/ would pose as the library
            )
        self.facts: dict[str, Any] = {}

    def ask(self, what: str) -> dict[str, Any]:
        """Let the peer serve that many requests, "all" or those of an adapter mix; return its answer."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, and `_answer` says so
            self.process.stdin.write(what + "\n")
            self.process.stdin.flush()
        return self._answer()

    def __enter__(self) -> Running:
        """Wait until the engine is ready; end it if it refuses."""
        try:
            self.facts = self._answer()["ready"]
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *reason: object) -> None:
        self.process.kill()
        self.process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            last_lines = [line for line in self.log.read_text().splitlines() if line.strip()][-3:]
            code = self.process.wait()
            raise MinivllmError(f"{self.peer.title} ended without an answer (exit {code}): {' | '.join(last_lines)}")
        return json.loads(line)
