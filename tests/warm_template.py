"""The process that is forked: it loads torch, the engine and the server, then becomes the requested
process.

It forks twice, so that what is left is an orphan, which Linux gives to the nearest ancestor that
adopts orphans (`PR_SET_CHILD_SUBREAPER`). That is the requesting process, which becomes the parent,
as if it had started the orphan itself.
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
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NoReturn

ABOVE_ALL = 200
"""File descriptors are first moved above this number, so that none is overwritten while each
goes to its place.
"""
LENGTH = struct.Struct("I")
ROOM = "/" * 4096
"""An argument of the template's that makes place for the command of what it becomes (`show`)."""
STARTERS = (
    "minivllm.platforms.child_processes",
    "minivllm_lab.disaggregation.server_pair", "server.serving",
)  # fmt: skip
"""The modules that start ranks, cores and servers."""
SERVER = ("minivllm.entrypoints.cli.main", "minivllm.entrypoints.openai.api_server")
set_by_loading: dict[str, str] = {}
"""Environment variables that modules have set when they were loaded."""
inherited: socket.socket | None = None
"""The seam to a template that was forked when this process was, if it was to have one."""


class Request(SimpleNamespace):
    """A request for a child; its file descriptors come along, in the order of `places`.

    Attributes:
        parent: the process that asks, and becomes the child's parent.
        command, environment, folder: what `subprocess.Popen` is given.
        places: the numbers that the file descriptors are to have.
        session: whether the process leads a session of its own.
        template: whether it has a template of its own, forked before it has threads.
        path: `sys.path`.
        mask: signals that are blocked.
        cores: cores of the processor on which it may run.
    """

    def encode(self) -> bytes:
        return json.dumps(vars(self)).encode()


def main() -> None:
    """Load everything, then fork at each request; started as `-c "..." FD PATH MODULES ROOM`."""
    import warm_processes  # noqa: F401  # before `sys.path` is replaced

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of Ctrl-C the others are told, who leave; then this one ends
    fd, path, modules = sys.argv[1:4]
    sys.path[:] = json.loads(path)
    load(json.loads(modules))
    with socket.socket(fileno=int(fd)) as asking:
        with contextlib.suppress(BrokenPipeError):  # nobody waits any more
            asking.sendall(LENGTH.pack(0))
        serve(asking)


def load(more_modules: Iterable[str]) -> None:
    """Load what ranks and cores need, compiled loops included, and `more_modules`."""
    from minivllm.platforms.collector import while_loading

    before = dict(os.environ)
    with while_loading():
        import minivllm.engine.core_proc
        import minivllm.executor.multiproc_executor
        import minivllm.worker.worker  # noqa: F401

        load_loops()
        for name in more_modules:
            importlib.import_module(name)
    set_by_loading.update({name: value for name, value in os.environ.items() if before.get(name) != value})


def load_loops() -> None:
    """Load the loops that numba has compiled for float32, which every rank needs."""
    with contextlib.suppress(ImportError):
        import numpy as np

        from minivllm.kernels.cpu import (
            attention_loops,
            cache_loops,
            elementwise_loops,
            panel_linear_loops,
            replay_loops,
        )

        attention_loops.programs_for(np.float32, np.float32), panel_linear_loops.programs_for(np.float32)
        elementwise_loops.norms_of(np.float32), elementwise_loops.gates_of(np.float32)
        elementwise_loops.rotations_of(np.float32), cache_loops.copies_of(np.float32), replay_loops.programs_for()


def serve(asking: socket.socket) -> NoReturn:
    """Fork at each request, until the requesting process is gone."""
    while True:
        length, fds, *_ = socket.recv_fds(asking, LENGTH.size, 16)
        if not length:
            os._exit(0)  # Triton's bindings complain of what is never taken apart
        request = Request(**json.loads(asking.recv(LENGTH.unpack(length)[0], socket.MSG_WAITALL)))
        asking.sendall(LENGTH.pack(fork_twice(asking, request, fds)))
        for fd in fds:
            os.close(fd)


def fork_twice(asking: socket.socket, request: Request, fds: Sequence[int]) -> int:
    """Return the process id of the child's child, once the child is gone and its child leads a
    session if requested.

    Return 0 if it has ended before it could report its own id.
    """
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        if os.fork() == 0:
            if request.session:
                os.setsid()
            os.write(writer, LENGTH.pack(os.getpid()))
            asking.close()
            os.close(reader), os.close(writer)
            become(request, fds)
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    told = os.read(reader, LENGTH.size)
    os.close(reader)
    return LENGTH.unpack(told)[0] if told else 0


def become(request: Request, fds: Sequence[int]) -> NoReturn:
    """Run the command as a fresh interpreter would."""
    code = 1
    try:
        wait_for_parent(request.parent)
        if request.template:
            leave_template()
        put(fds, request.places)
        hear_signals()
        show(request.command)
        os.sched_setaffinity(0, request.cores)
        os.chdir(request.folder)
        sys.path[:] = request.path
        os.environ.clear()
        os.environ.update({**set_by_loading, **request.environment})
        logging.getLogger("minivllm").setLevel(os.environ.get("MINIVLLM_LOGGING_LEVEL", "INFO").upper())
        signal.pthread_sigmask(signal.SIG_SETMASK, request.mask)
        random.seed()
        tempfile.tempdir = None
        if any(word.partition(".")[0] in ("minivllm", "minivllm_lab") for word in request.command):
            fork_from_here()
        run(request.command[1:])
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # pyright: ignore[reportArgumentType]
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
        os._exit(code)


def wait_for_parent(pid: int) -> None:
    """Wait until the process in between is gone and this one is a child of the requesting process."""
    deadline = time.monotonic() + 10
    while os.getppid() != pid and time.monotonic() < deadline:
        time.sleep(0.001)


def leave_template() -> None:
    """Fork a template for what this process becomes, so that the template need not load anything."""
    global inherited
    inherited, theirs = socket.socketpair()
    if os.fork() == 0:
        keep_only({0, 1, 2, theirs.fileno()})
        serve(theirs)
    theirs.close()


def keep_only(fds: set[int]) -> None:
    """Close all other file descriptors, as a fresh interpreter has none of them."""
    start = 0
    for fd in [*sorted(fds), os.sysconf("SC_OPEN_MAX")]:
        if start < fd:  # `os.closerange(0, 0)` closes all, with Python 3.11
            os.closerange(start, fd)
        start = fd + 1


def put(fds: Sequence[int], places: Sequence[int]) -> None:
    """Give each file descriptor its number, and point Python's streams at this process's own."""
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, ABOVE_ALL) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, place in zip(moved, places, strict=True):
        os.dup2(fd, place)
        os.close(fd)
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", 1, closefd=False)  # noqa: SIM115


def hear_signals() -> None:
    """Handle signals as a freshly started interpreter does, whatever the forked process had set."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def show(command: Sequence[str]) -> None:
    """Let `ps` and psutil see this command: it is written over the template's, after as many
    slashes as fit.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = map(int, fields[45:47])  # arg_start, arg_end: man 5 proc_pid_stat
    room = end - start - 1
    ctypes.memmove(start, "\0".join(command).encode()[:room].rjust(room, b"/") + b"\0", end - start)


def fork_from_here() -> None:
    """Make a core or a server fork what it starts, because it has loaded everything that is needed."""
    from warm_processes import Itself, WarmSubprocess

    for name in sys.modules.keys() & STARTERS:
        sys.modules[name].subprocess = WarmSubprocess(Itself())  # pyright: ignore[reportAttributeAccessIssue]


def run(arguments: list[str]) -> None:
    """Run `SCRIPT ...`, `-m MODULE ...` or `-c CODE ...`, with or without leading `-P` and `-u`."""
    while arguments[0] in ("-P", "-u"):
        arguments = arguments[1:]
    if arguments[0] == "-c":
        sys.modules["__main__"] = module = ModuleType("__main__")
        sys.argv[:] = ["-c", *arguments[2:]]
        exec(arguments[1], vars(module))
    elif arguments[0] == "-m":
        sys.argv[:] = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = arguments
        runpy.run_path(arguments[0], run_name="__main__")
