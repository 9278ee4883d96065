"""Entry point of one of several API servers: `python -m minivllm.entrypoints.openai.api_server_entry SOCKET PARENT`.

`api_servers.py` starts it, and says all else through its standard input, which then closes when the launcher ends.
"""

import os
import signal
import socket
import sys
import threading
import time

from minivllm.engine.core_entry import end_with_parent, leave
from minivllm.platforms.collector import while_loading

SECONDS_TO_END = 5.0


def _read(size: int) -> bytes:
    """Read this many bytes of standard input, and none beyond."""
    found = b""
    while len(found) < size:
        piece = os.read(0, size - len(found))
        if not piece:
            sys.exit(1)  # the launcher is gone
        found += piece
    return found


def _end() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(SECONDS_TO_END)


def main(listening: int, parent: int) -> int:
    """Serve until a signal, the engine's end or the launcher's; return the exit code."""
    from minivllm.entrypoints.openai.api_servers import LENGTH_BYTES, SAID_WHY

    message = _read(int.from_bytes(_read(LENGTH_BYTES), "big"))
    threading.Thread(target=end_with_parent, args=(parent, _end), daemon=True).start()

    with while_loading():
        from minivllm.engine.arg_utils import EngineArgs
        from minivllm.engine.core_processes import CoreAddresses
        from minivllm.engine.wire import decode
        from minivllm.entrypoints.openai.launcher import serve_on
        from minivllm.entrypoints.openai.settings import FrontendArgs
        from minivllm.errors import EngineDeadError, MinivllmError

    engine, settings, template, addresses = decode(message, tuple[dict, dict, str | None, CoreAddresses])
    for lifeline in addresses.lifelines:
        os.set_inheritable(lifeline, False)
    try:
        args, server = EngineArgs(**engine), FrontendArgs(**settings)
        return serve_on(socket.socket(fileno=listening), args, server, template, addresses)
    except (MinivllmError, EngineDeadError) as error:
        print(f"minivllm: {' '.join(str(error).split())}", file=sys.stderr)
        return SAID_WHY


if __name__ == "__main__":
    leave(main(*map(int, sys.argv[1:])))
