"""Start the processes of the cores, one for each data-parallel replica, and end them.

A core is a fresh Python process that runs `core_main.py`. The user's script is not imported there,
so it needs no `if __name__ == "__main__"`. A core ignores Ctrl-C, which the front end handles. Each
side notices that the other has ended by a pipe that closes with it: the core's standard input, and
the lifeline.

The client talks to the cores over two sockets (`mp_client.py`), in a folder that only this user can
read.

In vLLM v0.33.0: `vllm/v1/engine/utils.py` (`CoreEngineProcManager`).
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

import zmq

from minivllm import errors
from minivllm.engine.arg_utils import EngineArgs
from minivllm.errors import MinivllmError
from minivllm.platforms.child_processes import ChildProcess, how_it_ended, wait_or_kill
from minivllm.platforms.device import pick_device

SECONDS_TO_LEAVE = 10.0
"""Cores told to leave are killed after this time. It is generous because a core ends its ranks
first.
"""
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


class CoreProcesses:
    """The processes of `args.data_parallel_size` cores, and the sockets that they connect to. Only
    the process that created this object may end them.

    `lifelines` are file descriptors, one for each core, which become readable when the core's
    process has ended.

    The sockets are kept here because pyzmq's context has only weak references to them: when the
    garbage collector takes both, the sockets are gone before a finalizer runs, and the context
    would wait for sockets that nobody can close any more.
    """

    def __init__(self, args: EngineArgs) -> None:
        self._owner = os.getpid()
        self._args = args
        self._folder = tempfile.mkdtemp(prefix="minivllm-")
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket] = []
        self._inputs: list[IO[bytes]] = []
        self.processes: list[ChildProcess] = []
        self.lifelines: list[int] = []

    def bind(self, kind: int, name: str) -> zmq.Socket:
        """Return a socket in the folder, which queues any number of messages and drops none."""
        socket = self._context.socket(kind)
        self._sockets.append(socket)
        # High-water marks of 0 mean none; by default ZeroMQ drops what exceeds a thousand messages.
        socket.linger = socket.sndhwm = socket.rcvhwm = 0
        socket.bind(f"ipc://{self._folder}/{name}")
        return socket

    def start(self) -> None:
        """Start the processes.

        Raises:
            MinivllmError: there are too few GPUs.
        """
        environments = [_environment(self._args, rank) for rank in range(self._args.data_parallel_size)]
        for rank, environment in enumerate(environments):
            self._start_one(rank, environment)

    def obituary(self, rank: int) -> str:
        """Describe how a core's process, which has ended, came to its end."""
        process, size = self.processes[rank], len(self.processes)
        which = f"core {rank} of {size}" if size > 1 else "core"
        return f"the engine's {which} (process {process.pid}) {how_it_ended(process.wait())}; its output says why"

    def end(self) -> None:
        """Ask the processes to leave, kill the ones that stay, and release everything else. A
        second call does nothing.
        """
        if os.getpid() != self._owner:
            return  # a fork
        # All of them first, then wait: so their ends overlap.
        self.tell_to_leave()
        wait_or_kill(self.processes, SECONDS_TO_LEAVE)
        while self.lifelines:
            os.close(self.lifelines.pop())
        while self._sockets:
            self._sockets.pop().close()
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)

    def tell_to_leave(self) -> None:
        """Ask the processes to leave, without waiting for them. A process that is computing ends
        after its step.
        """
        while self._inputs:
            self._inputs.pop().close()

    def _start_one(self, rank: int, environment: dict[str, str]) -> None:
        # The core holds one end of this pipe, so ours becomes readable when the core ends, however
        # it does.
        own_end, core_end = os.pipe()
        self.lifelines.append(own_end)
        command = [sys.executable, "-P", "-m", "minivllm.engine.core_main", self._folder]
        # A terminal sends Ctrl-C to all processes in front; only the front end should answer it.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the process inherits the mask
        try:
            process = subprocess.Popen(
                [*command, str(core_end), str(self._owner), str(rank)],
                stdin=subprocess.PIPE,  # never written to: it closes when this process ends
                pass_fds=(core_end,),
                env=environment,
            )
            assert process.stdin is not None
            self._inputs.append(process.stdin)
            self.processes.append(process)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            os.close(core_end)


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

    each = args.tensor_parallel_size * args.pipeline_parallel_size
    num_needed = each * args.data_parallel_size
    num_gpus = torch.cuda.device_count()
    if num_needed > num_gpus:
        raise MinivllmError(
            f"data_parallel_size is {args.data_parallel_size}, with {each} GPUs for each core, which needs "
            f'{num_needed}: only {num_gpus} are here; use fewer, or device="cpu"'
        )
    # The user may have hidden some GPUs; cores share what is left.
    visible = os.environ.get(VISIBLE_DEVICES)
    names = visible.split(",") if visible else [str(index) for index in range(num_gpus)]
    return names[rank * each : (rank + 1) * each]
