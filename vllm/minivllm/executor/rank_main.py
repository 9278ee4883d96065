"""The script that a rank's process runs: `rank_main.py SOCKET_FD PARENT_PID SYS_PATH_AS_JSON`.

It imports only the standard library until a thread watches for the parent's end, because other
imports can take long: minivllm, torch, and whatever module defines the rank's function. The
parent's script is not imported, so that script may start ranks at its top level.
"""

import json
import os
import select
import signal
import socket
import sys
import threading

MILLISECONDS_A_LOOK = 500


def end_with_parent(sock: socket.socket, parent: int) -> None:
    """End this process when the other end of the socket closes, or when the parent is gone.

    The second check matters if the parent has forked: the fork holds a copy of the other end.
    """
    hang_up = select.poll()
    hang_up.register(sock, select.POLLHUP)
    while not hang_up.poll(MILLISECONDS_A_LOOK) and os.getppid() == parent:
        pass
    os._exit(0)


def main() -> None:
    """Start the thread that ends the rank with its parent, then run the rank."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles interrupts
    fd, parent, path = sys.argv[1:]
    sock = socket.socket(fileno=int(fd))
    threading.Thread(target=end_with_parent, args=(sock, int(parent)), daemon=True).start()
    # Only now: an import from the parent's path could take long, or fail.
    sys.path[:] = json.loads(path)
    sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]; nothing is flushed at exit
    from minivllm.executor.rank_loop import serve

    try:
        serve(sock)
    finally:
        os._exit(0)  # an orderly exit could wait forever for peers


if __name__ == "__main__":
    main()
