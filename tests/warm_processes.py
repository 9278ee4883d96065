"""Ranks, cores and kernels from a process that has loaded torch, for tests of what they do and not of how they start.

A fresh interpreter spends 3 s on loading torch and the engine. A template does so once for each worker of xdist, and is
then forked: twice, so that what is left is an orphan, which Linux gives to the nearest ancestor that asks for orphans
(`PR_SET_CHILD_SUBREAPER`). That is the test's process, which then is the parent, as of a process that it has started.
A core that has come so forks itself for each of its ranks.

Elsewhere, and where a test has changed an environment variable, a fresh interpreter is started as ever. Forks share the
seed of Python's hashes, which ranks must not rest on: `engine/test_tensor_parallel.py` and the servers have fresh ones.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib
import json
import logging
import os
import random
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any, NoReturn

import numpy as np

PR_SET_CHILD_SUBREAPER = 36
ABOVE_ALL = 200
"""File descriptors are first moved above this number, so that none is overwritten while each goes to its place."""
MAY_CHANGE = {
    "PYTEST_CURRENT_TEST", "PYTHONPATH", "TORCHINDUCTOR_CACHE_DIR", "NIXL_LOG_LEVEL", "UCX_TLS",
    "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT", "JPY_PARENT_PID", "JPY_SESSION_NAME",
    "MINIVLLM_LOGGING_LEVEL",
}  # fmt: skip
"""Variables that nothing reads while the template loads its modules, or of which `become` takes account."""
CORE, RANKS = "minivllm.engine.core_entry", "minivllm.executor.rank_processes"
LENGTH = struct.Struct("I")
SESSION = 5
"""Where a request says whether the process leads a session of its own."""


class Template:
    """The process that is forked, and the seam to it."""

    def __init__(self, *more_modules: str) -> None:
        self.environment = fixed(os.environ)
        self.socket, theirs = socket.socketpair()
        with theirs:
            path = json.dumps([*map(str, sys.path)])
            command = [sys.executable, "-P", __file__, str(theirs.fileno()), path, *more_modules]
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True
            )
        self._greeted = False

    def is_loaded(self) -> bool:
        """Whether a child would come at once. Before that `fork` waits, some 10 s where no bytecode is kept yet."""
        return self._greeted or bool(select.select([self.socket], [], [], 0)[0])

    def fork(
        self, command: Sequence[str], environment: Mapping[str, str], folder: str, fds: Mapping[int, int], session: bool
    ) -> int:
        """A child of this process that runs the command; `fds`: its file descriptors -> ours. Returns its id."""
        mask = [*map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))]
        request = json.dumps([os.getpid(), command, dict(environment), folder, [*fds], session, mask]).encode()
        adopt_orphans(True)
        try:
            socket.send_fds(self.socket, [LENGTH.pack(len(request))], [*fds.values()])
            self.socket.sendall(request)
            if not self._greeted:
                self._greeted = bool(self.socket.recv(LENGTH.size))
            return LENGTH.unpack(self.socket.recv(LENGTH.size))[0]
        finally:
            adopt_orphans(False)

    def close(self) -> None:
        self.socket.close()
        self.process.wait(10)


class Itself:
    """In place of a template, in a core: it has loaded all that its ranks need, and is already their parent."""

    def __init__(self) -> None:
        self.environment = fixed(os.environ)

    def fork(
        self, command: Sequence[str], environment: Mapping[str, str], folder: str, fds: Mapping[int, int], session: bool
    ) -> int:
        """As `Template.fork`."""
        mask = [*map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))]
        request = [os.getpid(), command, dict(environment), folder, [*fds], session, mask]
        if (pid := os.fork()) == 0:
            if session:
                os.setsid()
            keep_only(set(fds.values()))
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            become(request, [*fds.values()])
        return pid


class WarmSubprocess:
    """In place of the module `subprocess`: what `rank_processes.py`, `core_processes.py` and Jupyter need of it."""

    DEVNULL, PIPE, TimeoutExpired = subprocess.DEVNULL, subprocess.PIPE, subprocess.TimeoutExpired

    def __init__(self, template: Template | Itself) -> None:
        self.template = template

    def Popen(
        self,
        command: Sequence[str],
        *,
        stdin: int,
        stdout: None = None,
        stderr: None = None,
        pass_fds: Sequence[int] = (),
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        start_new_session: bool = False,
    ) -> Any:
        environment = os.environ if env is None else env
        if fixed(environment) != self.template.environment:
            options = {"stdin": stdin, "pass_fds": pass_fds, "env": env, "start_new_session": start_new_session}
            return subprocess.Popen(command, cwd=cwd, **options)
        theirs, ours = os.pipe() if stdin == subprocess.PIPE else (os.open(os.devnull, os.O_RDONLY), None)
        try:
            fds = {0: theirs, 1: 1, 2: 2, **{fd: fd for fd in pass_fds}}
            pid = self.template.fork(command, environment, cwd or os.getcwd(), fds, start_new_session)
        finally:
            os.close(theirs)
        return WarmProcess(command, pid, None if ours is None else open(ours, "wb", buffering=0))


class WarmProcess:
    """A child of this process; as `subprocess.Popen`."""

    def __init__(self, args: Sequence[str], pid: int, stdin: IO[bytes] | None) -> None:
        self.args, self.pid, self.stdin, self.stdout, self.stderr = args, pid, stdin, None, None
        self.returncode: int | None = None
        self._waiting = threading.Lock()

    def poll(self) -> int | None:
        with self._waiting:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(0.005)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def keep_only(fds: set[int]) -> None:
    """Close all other file descriptors, as a fresh interpreter has none of them."""
    start = 0
    for fd in [*sorted(fds), os.sysconf("SC_OPEN_MAX")]:
        os.closerange(start, fd)
        start = fd + 1


def fixed(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in MAY_CHANGE}


def adopt_orphans(adopts: bool) -> None:
    """While this holds, orphans below this process become its children, in place of the first process's."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(adopts), 0, 0, 0)


# ---- the template ----------------------------------------------------------------------------------------------------


def main(fd: int, path: list[str], more_modules: Sequence[str]) -> None:
    """Load everything, then fork whenever one is asked for, until the test's process is gone."""
    sys.path[:] = path
    from minivllm.platforms.collector import while_loading

    with while_loading():
        import minivllm.engine.core_proc
        import minivllm.executor.multiproc_executor
        import minivllm.worker.worker  # noqa: F401

        load_loops()
        for name in more_modules:
            importlib.import_module(name)
    with socket.socket(fileno=fd) as asking:
        with contextlib.suppress(BrokenPipeError):  # nobody waits any more
            asking.sendall(LENGTH.pack(0))
        while True:
            length, fds, *_ = socket.recv_fds(asking, LENGTH.size, 16)
            if not length:
                os._exit(0)  # Triton's bindings complain of what is never taken apart
            request = json.loads(asking.recv(LENGTH.unpack(length)[0], socket.MSG_WAITALL))
            asking.sendall(LENGTH.pack(fork_twice(asking, request, fds)))
            for one in fds:
                os.close(one)


def load_loops() -> None:
    """What numba has compiled for float32, which every rank needs."""
    with contextlib.suppress(ImportError):
        from minivllm.kernels.cpu import attention_loops, elementwise_loops, panel_linear_loops

        attention_loops.programs_for(np.float32), panel_linear_loops.programs_for(np.float32)
        elementwise_loops.norms_of(np.float32), elementwise_loops.gates_of(np.float32)
        elementwise_loops.rotations_of(np.float32)


def fork_twice(asking: socket.socket, request: list[Any], fds: list[int]) -> int:
    """The process id of the child's child, once the child is gone, and it leads the session that it was to lead."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        if os.fork() == 0:
            if request[SESSION]:
                os.setsid()
            os.write(writer, LENGTH.pack(os.getpid()))
            asking.close()
            os.close(reader), os.close(writer)
            become(request, fds)
        os._exit(0)
    os.waitpid(child, 0)
    pid = LENGTH.unpack(os.read(reader, LENGTH.size))[0]
    os.close(reader), os.close(writer)
    return pid


def become(request: list[Any], fds: list[int]) -> NoReturn:
    """Run the command as a fresh interpreter would."""
    code = 1
    try:
        parent, command, environment, folder, places, _, mask = request
        wait_for_parent(parent)
        moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, ABOVE_ALL) for fd in fds]
        for fd in fds:
            os.close(fd)
        for fd, place in zip(moved, places, strict=True):
            os.dup2(fd, place)
            os.close(fd)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        logging.getLogger("minivllm").setLevel(environment.get("MINIVLLM_LOGGING_LEVEL", "INFO").upper())
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        random.seed()
        if CORE in command:
            importlib.import_module(RANKS).subprocess = WarmSubprocess(Itself())
        run(command[1:])
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())  # pyright: ignore[reportArgumentType]
    finally:
        os._exit(code)


def wait_for_parent(pid: int) -> None:
    """Until the process between is gone, and this one given to the test's."""
    deadline = time.monotonic() + 10
    while os.getppid() != pid and time.monotonic() < deadline:
        time.sleep(0.001)


def run(arguments: list[str]) -> None:
    """`SCRIPT ...` or `-m MODULE ...`, with or without a `-P` before it: the path is what it is in the template."""
    if arguments[0] == "-P":
        arguments = arguments[1:]
    if arguments[0] == "-m":
        sys.argv[:] = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = arguments
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3:])
