"""Entry point of the core's process: `python -m minivllm.engine.core_entry FOLDER LIFELINE`.

`mp_client.py` starts it. Its standard input is a pipe that is never written to and that closes when the front end ends;
a thread waits for that before anything large is imported, so that no process is left over, whenever the front end ends.
LIFELINE is a file descriptor whose only purpose is to close when this process ends.
"""

import os
import shutil
import sys
import threading
from collections.abc import Callable


def _end_with_front_end(folder: str, end: Callable[[], None]) -> None:
    sys.stdin.buffer.raw.read()  # type: ignore[attr-defined]
    try:
        end()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)


def main(folder: str, lifeline: int) -> int:
    """Runs the core until it fails or the front end is gone; returns the exit code."""
    os.set_inheritable(lifeline, False)  # ranks must not inherit it
    started: list[Callable[[], None]] = []
    end = (folder, lambda: [shutdown() for shutdown in started] and None)
    threading.Thread(target=_end_with_front_end, args=end, daemon=True).start()

    from minivllm.engine.core_proc import EngineCoreProc

    process = EngineCoreProc(folder)
    started.append(process.shutdown)
    return process.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
