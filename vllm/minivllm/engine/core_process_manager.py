"""Start the processes of the cores, one for each data-parallel replica, and end them.

A core is a fresh Python process (`platforms.child_processes`), in which the user's script is not
imported, so it needs no `if __name__ == "__main__"`. It ignores Ctrl-C, which the front end handles.
Each side notices that the other has ended by the lifeline, a socket that hangs up then.

The client talks to the cores over two sockets (`mp_client.py`), in a folder that only this user can
read, and that is gone once all have connected.

In vLLM v0.33.0: `vllm/v1/engine/utils.py` (`CoreEngineProcManager`).
"""

import os
import shutil
import socket
import tempfile

import zmq

from minivllm.engine.arg_utils import EngineArgs
from minivllm.errors import MinivllmError
from minivllm.platforms.child_processes import ChildProcess, how_it_ended, start_process, wait_or_kill
from minivllm.platforms.device import pick_device

SECONDS_TO_LEAVE = 10.0
"""Cores told to leave are killed after this time. It is generous because a core ends its ranks
first.
"""
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


class CoreProcesses:
    """The processes of `args.data_parallel_size` cores, and the sockets that they connect to. Only
    the process that created this object may end them.

    `lifelines` are sockets, one for each core, which become readable when the core's process has
    ended; it ends when ours is closed.

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
        self.processes: list[ChildProcess] = []
        self.lifelines: list[socket.socket] = []

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
            lifeline, process = start_process(
                "minivllm.engine.core_proc", self._folder, str(rank), environment=environment
            )
            self.lifelines.append(lifeline)
            self.processes.append(process)

    def remove_folder(self) -> None:
        """Remove the sockets' names, which are not needed once all cores are connected."""
        shutil.rmtree(self._folder, ignore_errors=True)

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
        while self._sockets:
            self._sockets.pop().close()
        self._context.term()
        self.remove_folder()

    def tell_to_leave(self) -> None:
        """Ask the processes to leave, without waiting for them."""
        while self.lifelines:
            self.lifelines.pop().close()


def _environment(args: EngineArgs, rank: int) -> dict[str, str]:
    """Return a core's environment, which names the GPUs that it may use, if there are several cores."""
    environment = dict(os.environ)
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
