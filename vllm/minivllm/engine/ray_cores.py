"""The cores as Ray actors, on any machines of a Ray cluster: `data_parallel_backend="ray"`.

Ray places and starts them (`ray_actors.py`). After that they work like cores on this machine, only
over TCP: a core's lifeline is the connection that its actor has made, and its sockets are encrypted
(`core_sockets.py`).

In vLLM v0.33.0: `vllm/v1/engine/utils.py` (`CoreEngineActorManager`), `vllm/v1/engine/core.py`
(`EngineCoreActor`).
"""

from dataclasses import replace

import zmq

from minivllm.engine.arg_utils import EngineArgs
from minivllm.engine.core_process_manager import CoreProcesses, died
from minivllm.engine.core_sockets import TcpServer, TcpSockets
from minivllm.executor.ray_actors import RayActors, connected_actor


class RayCores(CoreProcesses):
    """Cores as actors of Ray, with the interface of `CoreProcesses`."""

    def __init__(self, args: EngineArgs) -> None:
        """Reserve resources in the cluster for all cores.

        Raises:
            MinivllmError: ray is not installed, or the cluster has no room for the cores.
        """
        ranks = args.tensor_parallel_size * args.pipeline_parallel_size
        self._actors = RayActors(args.data_parallel_size, args.device, ranks)
        # "auto" was decided by what the cluster has, not by this machine.
        super().__init__(replace(args, device=self._actors.device))
        self._server = TcpServer(self.sockets, self._actors.host)

    def bind(self, kind: int, name: str) -> zmq.Socket:
        """Return a socket on the interface that the cluster uses."""
        return self._server.bind(kind, name)

    def obituary(self, rank: int) -> str:
        """Return a message that a core is lost, without the reason, which Ray would know only a
        minute later.
        """
        return died(rank, self.names(), "has ended, or its machine cannot be reached")

    def names(self) -> list[int | str]:
        return ["a Ray actor"] * self._args.data_parallel_size

    def tell_to_leave(self) -> None:
        """Close the lifelines, which tells the actors to leave."""
        self._close_lifelines()

    def _start_cores(self) -> None:
        for rank in range(self._args.data_parallel_size):
            connection, process = self._actors.start(f"core {rank}", rank, CoreActor, self._server.for_cores, rank)
            # The connection is only watched for its end, so its descriptor is enough.
            self.lifelines.append(connection.detach())
            self.processes.append(process)

    def _num_neighbours(self, rank: int) -> int:
        return self._actors.num_on_the_machine_of(rank)

    def _give_back(self) -> None:
        super()._give_back()
        self._actors.leave()


class CoreActor:
    """A core's process, started by Ray."""

    def live(self, address: tuple[str, int], token: bytes, sockets: TcpSockets, rank: int) -> None:
        """Run the core until it fails or the front end is gone."""
        from minivllm.engine.core_proc import EngineCoreProc

        process = EngineCoreProc(sockets, rank)
        with connected_actor(address, token, process.shutdown):
            process.run()
