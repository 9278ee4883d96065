"""The script that the process of a rank or of a core runs, which `child_processes.py` starts:
`child_main.py SOCKET_FD PARENT_PID SYS_PATH_AS_JSON MODULE [ARGUMENT ...]`.

It imports only the standard library until a thread watches for the parent's end, because other
imports can take long: minivllm, torch, and whatever module defines a rank's function. The parent's
script is not imported, so that script may start processes at its top level.
"""

import importlib
import json
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

MILLISECONDS_A_LOOK = 500


def end_with_parent(fd: int, parent: int, end: Callable[[], object] | None = None) -> None:
    """Wait until the other end of this socket or pipe closes, or the parent is gone; then call
    `end`, and exit this process.

    The second check matters if the parent has forked: the fork holds a copy of the other end.
    """
    hang_up = select.poll()
    hang_up.register(fd, select.POLLHUP)
    while not hang_up.poll(MILLISECONDS_A_LOOK) and os.getppid() == parent:
        pass
    try:
        if end is not None:
            end()
    finally:
        os._exit(0)


def leave(code: int) -> NoReturn:
    """Exit this process at once: everything has been released by now, and a regular interpreter
    shutdown would take torch a second, or could wait forever for peers.
    """
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None: it was closed when Python started
        with suppress(OSError):
            stream.flush()
    os._exit(code)


def main() -> None:
    """Start the thread that ends this process with its parent, then call `serve(socket, ...)` of the
    module; `end`, if it has one, is called at the parent's end.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles interrupts
    fd, parent, path, name, *arguments = sys.argv[1:]
    sock = socket.socket(fileno=int(fd))
    sock.set_inheritable(False)  # what this process starts must not hold it open

    def end() -> None:
        if (at_the_end := getattr(sys.modules.get(name), "end", None)) is not None:
            at_the_end()

    threading.Thread(target=end_with_parent, args=(int(fd), int(parent), end), daemon=True).start()
    # Only now: an import from the parent's path could take long, or fail.
    sys.path[:] = json.loads(path)
    if sys.stdout is not None:
        sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]; nothing is flushed at exit
    code = 1
    try:
        from minivllm.platforms.collector import while_loading

        with while_loading():
            module = importlib.import_module(name)
        code = module.serve(sock, *arguments) or 0
    except BaseException:  # `leave` is faster than Python's own report
        traceback.print_exc()
    leave(code)


if __name__ == "__main__":
    main()
