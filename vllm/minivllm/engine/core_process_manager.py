"""Start the processes of the cores, one for each data-parallel replica, exchange settings with
them, and end them.

A core is a fresh Python process that runs `core_main.py`. The user's script is not imported there,
so it needs no `if __name__ == "__main__"`. A core ignores Ctrl-C, which the front end handles. Each
side notices that the other has ended by a pipe that closes with it: the core's standard input, and
the lifeline.

A core first says hello on the handshake's socket and receives the engine's arguments. From then on
it talks to the client over two other sockets (`mp_client.py`). All sockets are in a folder that
only this user can read (`core_sockets.py`). `ray_cores.py` has cores on other machines.

In vLLM v0.33.0: `vllm/v1/engine/utils.py` (`CoreEngineProcManager`, `wait_for_engine_startup`).
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import IO

import zmq

from minivllm import errors
from minivllm.core.engine_messages import EngineCoreReady
from minivllm.engine.arg_utils import EngineArgs
from minivllm.engine.core_sockets import OwnSockets
from minivllm.engine.socket_messages import Failure, Kind, decode, encode, identity
from minivllm.errors import EngineDeadError, MinivllmError
from minivllm.platforms.child_processes import ChildProcess, how_it_ended, wait_or_kill
from minivllm.platforms.device import pick_device

SECONDS_TO_LEAVE = 10.0
"""Cores told to leave are killed after this time. It is generous because a core ends its ranks
first.
"""
MILLISECONDS_FOR_LAST_WORDS = 500
"""How long a core that has ended may still be heard: its last message may be on its way."""
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


class CoreProcesses:
    """The processes of `args.data_parallel_size` cores. Only the process that created this object
    may end them.

    `lifelines` are file descriptors, one for each core, which become readable when the core's
    process has ended.
    """

    def __init__(self, args: EngineArgs) -> None:
        self._owner = os.getpid()
        self._args = args
        self.folder = tempfile.mkdtemp(prefix="minivllm-")
        self.sockets = OwnSockets()
        self.processes: list[ChildProcess] = []
        self.lifelines: list[int] = []
        self._inputs: list[IO[bytes]] = []

    def start(self) -> list[EngineCoreReady]:
        """Start the cores; return each core's ready message once all are ready.

        Raises:
            MinivllmError: a core rejects the arguments, or there are too few GPUs.
            EngineDeadError: a core's process died before it was ready.
        """
        handshake = self.bind(zmq.ROUTER, "handshake")
        self._start_cores()
        engines = self._meet(handshake)
        handshake.close()
        return engines

    def bind(self, kind: int, name: str) -> zmq.Socket:
        """Return a socket in the folder."""
        return self.sockets.bind_in_folder(kind, self.folder, name)

    def obituary(self, rank: int) -> str:
        """Describe how a core's process, which has ended, came to its end."""
        return died(rank, self.names(), how_it_ended(self.processes[rank].wait()))

    def names(self) -> list[int | str]:
        """Return the names of the cores' processes, for messages."""
        return [process.pid for process in self.processes]

    def end(self) -> None:
        """Ask the processes to leave, kill the ones that stay, and release everything else. A
        second call does nothing.
        """
        if os.getpid() != self._owner:
            return  # a fork
        # All of them first, then wait: so their ends overlap.
        self.tell_to_leave()
        wait_or_kill(self.processes, SECONDS_TO_LEAVE)
        self._give_back()

    def tell_to_leave(self) -> None:
        """Ask the processes to leave, without waiting for them. A process that is computing ends
        after its step.
        """
        while self._inputs:
            self._inputs.pop().close()

    def _start_cores(self) -> None:
        environments = [_environment(self._args, rank) for rank in range(self._args.data_parallel_size)]
        for rank, environment in enumerate(environments):
            self._start_one(rank, environment)

    def _num_neighbours(self, rank: int) -> int:
        """Return how many cores share this one's machine, itself included."""
        return len(self.processes)

    def _close_lifelines(self) -> None:
        while self.lifelines:
            os.close(self.lifelines.pop())

    def _give_back(self) -> None:
        self._close_lifelines()
        self.sockets.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start_one(self, rank: int, environment: Mapping[str, str]) -> None:
        """Start a core's process. Our end of its lifeline becomes readable as soon as the process
        has ended.
        """
        # The core holds one end of this pipe, so ours becomes readable when the core ends, however
        # it does.
        ours, theirs = os.pipe()
        self.lifelines.append(ours)
        command = [sys.executable, "-P", "-m", "minivllm.engine.core_main", self.folder, str(theirs), str(self._owner)]
        # A terminal sends Ctrl-C to all processes in front; only the front end should answer it.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the process inherits the mask
        try:
            process = subprocess.Popen(
                [*command, str(rank)],
                stdin=subprocess.PIPE,  # never written to: it closes when this process ends
                pass_fds=(theirs,),
                env=environment,
            )
            assert process.stdin is not None
            self._inputs.append(process.stdin)
            self.processes.append(process)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            os.close(theirs)

    def _meet(self, handshake: zmq.Socket) -> list[EngineCoreReady]:
        """Wait for each core's hello, send it the engine's arguments, and wait until all are
        ready.
        """
        settings = {field.name: getattr(self._args, field.name) for field in fields(self._args)}
        del settings["parts"]  # Python objects; EngineArgs has refused any
        ready: dict[int, EngineCoreReady] = {}
        names = [identity(rank) for rank in range(len(self.processes))]
        while len(ready) < len(names):
            # A core that is ready may end later; that is for the client to notice.
            waiting = {fd: rank for rank, fd in enumerate(self.lifelines) if rank not in ready}
            ended = wait_for_message(handshake, waiting)
            if ended is not None:
                raise EngineDeadError(self.obituary(ended))
            name, kind, payload = handshake.recv_multipart()
            if kind == Kind.HELLO:
                start = (settings, self._num_neighbours(names.index(name)))
                handshake.send_multipart((name, Kind.START, encode(start)))
            elif kind == Kind.FAILED:
                raise decode(payload, Failure).error()
            else:
                ready[names.index(name)] = decode(payload, EngineCoreReady)
        return [ready[rank] for rank in range(len(names))]


def wait_for_message(socket: zmq.Socket, lifelines: Mapping[int, int]) -> int | None:
    """Wait for a message; return None once there is one, or the rank of a core that ended before
    any arrived.

    `lifelines`: the ranks by file descriptor.
    """
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    for fd in lifelines:
        poller.register(fd, zmq.POLLIN)
    ready = dict(poller.poll())
    # A message goes before a death: it may say why the core has ended.
    if socket in ready or socket.poll(MILLISECONDS_FOR_LAST_WORDS):
        return None
    return next(lifelines[fd] for fd in lifelines if fd in ready)


def died(rank: int, pids: Sequence[int | str], how: str) -> str:
    """Return a message that the core of this rank has died; `pids` are all cores' process ids."""
    which = f"core {rank} of {len(pids)}" if len(pids) > 1 else "core"
    pid = pids[rank]
    process = f"process {pid}" if isinstance(pid, int) else pid
    return f"the engine's {which} ({process}) {how}; its output says why"


def _environment(args: EngineArgs, rank: int) -> dict[str, str]:
    """Return a core's environment: the module search path and, with several cores, the GPUs that it
    may use.
    """
    home = str(Path(errors.__file__).resolve().parents[1])
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, (home, os.environ.get("PYTHONPATH")))))
    if args.data_parallel_size > 1 and pick_device(args.device).type == "cuda":
        environment[VISIBLE_DEVICES] = ",".join(_gpus(args, rank))
    return environment


def _gpus(args: EngineArgs, rank: int) -> list[str]:
    """Return a core's GPUs, as `CUDA_VISIBLE_DEVICES` names them."""
    import torch

    each, there = args.tensor_parallel_size * args.pipeline_parallel_size, torch.cuda.device_count()
    if each * args.data_parallel_size > there:
        raise MinivllmError(
            f"data_parallel_size is {args.data_parallel_size}, with {each} GPUs for each core, which needs "
            f'{each * args.data_parallel_size}: only {there} are here; use fewer, or device="cpu"'
        )
    # The user may have hidden some GPUs; cores share what is left.
    visible = os.environ.get(VISIBLE_DEVICES)
    names = visible.split(",") if visible else [str(index) for index in range(there)]
    return names[rank * each : (rank + 1) * each]
