"""Ranks as Ray actors, on any machines of a Ray cluster.

Ray only places the ranks and starts their processes (`ray_actors.py`). Each rank then serves its
connection to the executor just like a local rank process (`rank_loop.py`), so calls and failures
behave as in `MultiprocExecutor`.

In vLLM v0.33.0: `vllm/v1/executor/ray_executor_v2.py` (`RayExecutorV2`), which is a multiprocess
executor, too.
"""

import os
import socket
import sys

from minivllm.errors import MinivllmError
from minivllm.executor.multiproc_executor import MultiprocExecutor
from minivllm.executor.rank_loop import serve
from minivllm.executor.ray_actors import RayActors, connected_actor
from minivllm.platforms.child_processes import ChildProcess
from minivllm.worker.settings import WorkerSettings


class RayExecutor(MultiprocExecutor):
    """One actor per rank, each with its own bundle. Joins a running cluster (`RAY_ADDRESS`), or
    starts one here.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        """Place and start the ranks, which load their models.

        Raises:
            MinivllmError: ray is not installed, or the cluster has no room for the ranks.
            WorkerDiedError: a rank died before it was ready.
        """
        self._actors = RayActors(settings.world_size, settings.device)
        try:
            self._start_ranks(settings, self._actors.host, self._start_rank)
        except BaseException:
            self._actors.leave()
            raise

    def shutdown(self) -> None:
        super().shutdown()
        self._actors.leave()

    def _start_rank(self, rank: int) -> tuple[socket.socket, ChildProcess]:
        return self._actors.start(rank, RankActor)


class RankActor:
    """A rank's process, started by Ray."""

    def live(self, address: tuple[str, int], token: bytes) -> None:
        """Run the rank until the executor's socket is closed."""
        with connected_actor(address, token) as sock:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of(sock.getsockname()[0]))
            serve(sock)


def interface_of(address: str) -> str:
    """Return the name of the network interface with this IPv4 address, which gloo should use."""
    if sys.platform != "linux":
        return "lo0" if address.startswith("127.") else "en0"
    import fcntl
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            # A `struct ifreq`: the kernel fills in the address of the interface with this name.
            request = struct.pack("256s", name.encode()[:15])
            try:
                reply = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
            except OSError:  # it has no address
                continue
            if socket.inet_ntoa(reply[20:24]) == address:
                return name
    raise MinivllmError(f"no network interface has the address {address}")
