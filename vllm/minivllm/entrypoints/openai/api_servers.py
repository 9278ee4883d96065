"""Several API servers over the same cores: `--api-server-count`.

The launcher starts the cores, then a process for each API server, with a listening socket of its own for the same port:
the system distributes the connections among them. Every server is a client of every core, which answers the one that
asked. The launcher only watches: a signal goes on to all servers, and where one of them ends, the others end too.

In vLLM v0.33.0: `vllm/entrypoints/cli/serve.py` (`run_multi_api_server`), `vllm/v1/utils.py`
(`APIServerProcessManager`, `wait_for_completion_or_failure`).
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path

from minivllm.engine.arg_utils import EngineArgs
from minivllm.engine.core_processes import CoreAddresses, CoreProcesses
from minivllm.engine.prometheus import FOLDER_VARIABLE
from minivllm.engine.wire import encode
from minivllm.entrypoints.openai.chat_template import read_template
from minivllm.entrypoints.openai.http_server import bind, signals, signals_end_the_start
from minivllm.entrypoints.openai.settings import FrontendArgs
from minivllm.logger import init_logger
from minivllm.platforms.child_processes import wait_or_kill

logger = init_logger(__name__)
LENGTH_BYTES = 8
"""The header of the message that a server's process gets on its standard input: its length, big-endian."""
SECONDS_TO_LEAVE = 10.0
SAID_WHY = 2
"""The exit code of a server that could not begin, and has said why."""


def serve_with_several(args: EngineArgs, settings: FrontendArgs, template: str | None) -> int:
    """As `launcher.serve`, which calls it for several API servers."""
    bind(settings).close()  # fails where somebody else has the port, which a shared socket would not
    listening = [bind(settings, shared=True) for _ in range(settings.api_server_count)]
    cores = CoreProcesses(args, settings.api_server_count)
    servers: list[subprocess.Popen[bytes]] = []
    try:
        read_template(settings.chat_template, args.model)  # a wrong one is said once
        with signals_end_the_start():
            addresses = cores.start()
            metrics = Path(addresses.folder) / "metrics"
            metrics.mkdir()
            for index, one in enumerate(listening):
                message = _message(args, settings, template, replace(addresses, client_index=index))
                servers.append(_start(one, addresses, metrics, message))
                one.close()
        return asyncio.run(_watch(servers, cores))
    finally:
        for one in listening:
            one.close()
        _end(servers)
        cores.end()


def _message(args: EngineArgs, settings: FrontendArgs, template: str | None, addresses: CoreAddresses) -> bytes:
    """All that a server needs to know. It goes through a pipe: API keys must not stand in a command line."""
    engine = {field.name: getattr(args, field.name) for field in fields(args) if field.name != "parts"}
    message = encode((engine, asdict(settings), template, addresses))
    return len(message).to_bytes(LENGTH_BYTES, "big") + message


def _start(
    listening: socket.socket, addresses: CoreAddresses, metrics: Path, message: bytes
) -> subprocess.Popen[bytes]:
    module = "minivllm.entrypoints.openai.api_server_entry"
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", module, str(listening.fileno()), str(os.getpid())],
        stdin=subprocess.PIPE,  # closes when this process ends
        pass_fds=(listening.fileno(), *addresses.lifelines),
        env=os.environ | {FOLDER_VARIABLE: str(metrics)},
        start_new_session=True,  # Ctrl-C reaches it through us, once
    )
    assert process.stdin is not None
    process.stdin.write(message)
    process.stdin.flush()
    return process


async def _watch(servers: Sequence[subprocess.Popen[bytes]], cores: CoreProcesses) -> int:
    """Waits until all servers have ended; the first one's end, and every signal to us, is a signal to the others.

    What a core's end means, the servers decide; how it ended, only its parent can say.
    """
    asked, was_asked, told = signals(), False, False
    _say_when_one_ends(cores)
    pending = {asyncio.create_task(asyncio.to_thread(server.wait)) for server in servers}
    while pending:
        signalled = asyncio.create_task(asked.acquire())
        done, pending = await asyncio.wait({*pending, signalled}, return_when=asyncio.FIRST_COMPLETED)
        was_asked |= signalled in done
        if signalled not in done:
            signalled.cancel()
            pending -= {signalled}
            if not (was_asked or told):
                logger.error("An API server has ended (%s), and the others with it", _codes(servers))
            told = True
        _tell(servers)
    codes = {server.returncode for server in servers}
    if codes <= ({0, -signal.SIGTERM} if was_asked else {0}):
        return 0
    return SAID_WHY if SAID_WHY in codes else 1


def _say_when_one_ends(cores: CoreProcesses) -> None:
    loop = asyncio.get_running_loop()

    def say(rank: int, lifeline: int) -> None:
        loop.remove_reader(lifeline)
        logger.error(cores.obituary(rank))

    for rank, lifeline in enumerate(cores.lifelines):
        loop.add_reader(lifeline, say, rank, lifeline)


def _codes(servers: Sequence[subprocess.Popen[bytes]]) -> str:
    ended = [(server.pid, server.returncode) for server in servers if server.returncode is not None]
    return ", ".join(f"process {pid}, exit code {code}" for pid, code in ended)


def _tell(servers: Sequence[subprocess.Popen[bytes]]) -> None:
    for server in servers:
        if server.returncode is None:
            server.send_signal(signal.SIGTERM)


def _end(servers: Sequence[subprocess.Popen[bytes]]) -> None:
    _tell(servers)
    for server in servers:
        assert server.stdin is not None
        server.stdin.close()
    wait_or_kill(servers, SECONDS_TO_LEAVE)
