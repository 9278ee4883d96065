"""Entry point of a core's process: `python -m minivllm.engine.core_main FOLDER LIFELINE PARENT
RANK`.

`core_process_manager.py` starts it. Its standard input is a pipe that is never written to and that
closes when the front end ends. A thread waits for that before anything large is imported, so that
no process outlives the front end, however early the front end ends. LIFELINE is a file descriptor
whose only purpose is to close when this process ends. PARENT is the id of the front end's process:
if a fork of the front end holds the pipe open, this process still notices that its own parent has
changed.
"""

from __future__ import annotations

import os
import select
import shutil
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

SECONDS = 0.5


def end_with_parent(parent: int, end: Callable[[], object]) -> None:
    """Wait until the parent has ended; then call `end`, and exit this process."""
    while os.getppid() == parent and not select.select([sys.stdin], [], [], SECONDS)[0]:
        continue
    try:
        end()
    finally:
        os._exit(0)


def leave(code: int) -> NoReturn:
    """Exit this process at once: everything has been released by now, and a regular interpreter
    shutdown would take torch a second.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main(folder: str, lifeline: int, parent: int, rank: int) -> int:
    """Run the core until it fails or the front end is gone; return the exit code."""
    os.set_inheritable(lifeline, False)  # ranks must not inherit it
    process: EngineCoreProc | None = None

    def end() -> None:
        try:
            if process is not None:
                process.shutdown()
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    # Before the imports below, which take seconds: the front end may end meanwhile.
    threading.Thread(target=end_with_parent, args=(parent, end), daemon=True).start()

    from minivllm.platforms.collector import while_loading

    with while_loading():
        from minivllm.engine.core_proc import EngineCoreProc

    process = EngineCoreProc(folder, rank)
    return process.run()


if __name__ == "__main__":
    leave(main(sys.argv[1], *map(int, sys.argv[2:])))
