"""Processes forked from one that has loaded torch, for tests of what processes do and not of how
they start.

A fresh interpreter spends 3 s on loading torch and the engine. A template (`warm_template.py`) does
so once, and is forked for each xdist worker. Each worker comes with a template of its own, which is
forked for ranks, cores and servers. These fork themselves for what they start.

Elsewhere, and where a test has changed an environment variable, a fresh interpreter is started as
usual. Forks share the seed of Python's hashes, which ranks must not depend on:
`engine/test_tensor_parallel.py` has fresh ones.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import warm_template
from warm_template import LENGTH, ROOM, SERVER, STARTERS, Request

PR_SET_CHILD_SUBREAPER = 36
MAY_CHANGE = {
    "PYTEST_CURRENT_TEST", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_XDIST_TESTRUNUID", "PYTHONPATH",
    "TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "NIXL_LOG_LEVEL", "UCX_TLS", "VLLM_NIXL_SIDE_CHANNEL_HOST",
    "VLLM_NIXL_SIDE_CHANNEL_PORT", "VLLM_SERVER_DEV_MODE", "JPY_PARENT_PID", "JPY_SESSION_NAME",
    "MINIVLLM_LOGGING_LEVEL", "MINIVLLM_KV_TRANSFER_SECRET",
}  # fmt: skip
"""Variables that nothing reads while the template loads its modules, or of which `become` takes
account.
"""
CAN_FORK = sys.platform == "linux" and not Path("/dev/nvidiactl").exists()
"""Only Linux gives orphans to who asks for them, and CUDA does not survive a fork."""


class Template:
    """The process that is forked, and the connection to it. A process that came with a template
    uses that one.
    """

    def __init__(self, *more_modules: str) -> None:
        self.environment = fixed(os.environ)
        self._forking = threading.Lock()
        self._greeted, self.process = False, None
        if warm_template.inherited is not None and not more_modules:
            self.socket, self._greeted = warm_template.inherited, True
            return
        self.socket, theirs = socket.socketpair()
        with theirs:
            start = f"import sys; sys.path.append({str(Path(__file__).parent)!r}); import warm_template as t; t.main()"
            arguments = [str(theirs.fileno()), json.dumps([*map(str, sys.path)]), json.dumps([*SERVER, *more_modules])]
            command = [sys.executable, "-P", "-c", start, *arguments, ROOM]
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])

    def is_loaded(self) -> bool:
        """Return whether a child would start immediately. Until then `fork` waits, some 10 s where
        no bytecode is kept yet.
        """
        has_ended = self.process is not None and self.process.poll() is not None
        return not has_ended and (self._greeted or bool(select.select([self.socket], [], [], 0)[0]))

    def fork(self, request: Request, fds: Sequence[int]) -> int:
        """Fork a child of this process with these file descriptors; return its id.

        Raises:
            RuntimeError: the template or the child has ended; its traceback says why.
        """
        message = request.encode()
        with self._forking:
            adopt_orphans(True)
            try:
                socket.send_fds(self.socket, [LENGTH.pack(len(message))], fds)
                self.socket.sendall(message)
                self._greeted = self._greeted or bool(self.socket.recv(LENGTH.size))
                told = self.socket.recv(LENGTH.size)
            except OSError as error:
                raise RuntimeError("the process that is forked has ended") from error
            finally:
                adopt_orphans(False)
        if not (pid := LENGTH.unpack(told)[0] if told else 0):
            raise RuntimeError(f"nothing was forked for {request.command}")
        return pid

    def close(self) -> None:
        if self.process is not None:
            self.socket.close()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:  # it still loads
                self.process.kill()
                self.process.wait()


class Itself:
    """A stand-in for a template in a forked process, which has loaded all that its children need."""

    def __init__(self) -> None:
        self.environment = fixed(os.environ)

    def fork(self, request: Request, fds: Sequence[int]) -> int:
        """Fork as `Template.fork` does."""
        if (pid := os.fork()) == 0:
            if request.session:
                os.setsid()
            warm_template.keep_only({*fds})
            warm_template.become(request, fds)
        return pid


class WarmSubprocess:
    """A stand-in for the module `subprocess`, with what ranks, cores, servers, kernels and xdist's
    workers use of it.
    """

    DEVNULL, PIPE, TimeoutExpired = subprocess.DEVNULL, subprocess.PIPE, subprocess.TimeoutExpired

    def __init__(self, template: Template | Itself, with_template: bool = False) -> None:
        """Fork from `template`; if `with_template`, each process comes with a template of its own."""
        self.template, self._with_template = template, with_template

    def Popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen:
        return WarmProcess(self.template, self._with_template, command, **options)


class WarmProcess(subprocess.Popen):
    """A child of this process that is forked from a template, unless its environment is another one."""

    def __init__(self, template: Template | Itself, with_template: bool, command: Sequence[str], **options: Any):
        self._template, self._with_template = template, with_template
        super().__init__(command, **options)

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *more) -> None:
        environment = os.environ if env is None else env
        if fixed(environment) != self._template.environment:
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *more)
            return
        *pipes, _, _, _, _, _, session, _ = more[3:]  # two ends of each stream, -1 where it is this process's own
        streams = [place if end == -1 else end for place, end in enumerate((pipes[0], pipes[3], pipes[5]))]
        given = {"command": [*args], "environment": dict(environment), "folder": cwd or os.getcwd(), "session": session}
        own = {"parent": os.getpid(), "path": [*map(str, sys.path)], "cores": [*os.sched_getaffinity(0)]}
        mask = [*map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))]
        request = Request(**given, **own, mask=mask, places=[0, 1, 2, *pass_fds], template=self._with_template)
        self.pid = self._template.fork(request, [*streams, *pass_fds])
        self._child_created = True
        self._close_pipe_fds(*pipes)


@contextlib.contextmanager
def forked(template: Template | None) -> Iterator[None]:
    """Fork the ranks, cores and servers that are started inside the block, unless there is no
    template.
    """
    with contextlib.ExitStack() as patches:
        for name in STARTERS if template else ():
            module = importlib.import_module(name)
            patches.enter_context(mock.patch.object(module, "subprocess", WarmSubprocess(template)))
        yield


def fixed(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in MAY_CHANGE}


def adopt_orphans(adopts: bool) -> None:
    """Set whether orphans below this process become its children instead of the first process's."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(adopts), 0, 0, 0)
