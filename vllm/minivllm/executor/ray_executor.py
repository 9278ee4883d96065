"""Ranks as Ray actors, on any machines of a Ray cluster.

Ray only places the ranks and starts their processes: a placement group has one bundle for each, so either all of them
get a place or none. Each actor then connects back to the executor and lives on that socket as the rank of a process on
this machine does (`rank_loop.py`), so calls, failures and ends are those of `MultiprocExecutor`.

In vLLM v0.33.0: `vllm/v1/executor/ray_executor_v2.py` (`RayExecutorV2`), which is a multiprocess executor, too.
"""

import contextlib
import hmac
import importlib.util
import os
import secrets
import select
import socket
import subprocess
import sys
import threading
import time
from typing import Any

from minivllm.errors import MinivllmError, WorkerDiedError
from minivllm.executor.multiproc_executor import MultiprocExecutor, rendezvous, sampling_rank
from minivllm.executor.rank_loop import serve
from minivllm.executor.rank_processes import RankProcess, RankProcesses
from minivllm.worker.worker import WorkerSettings, worker_of_rank

SECONDS_TO_PLACE = 60.0
"""A placement group that is not ready after this time will not be: the cluster lacks resources."""
SECONDS_TO_CONNECT = 120.0
TOKEN_BYTES = 32
KEEPALIVE = (("TCP_KEEPIDLE", 3), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 10_000))
"""A machine that has gone without a word is noticed within about ten seconds; Ray takes a minute."""
SECONDS_A_LOOK, MILLISECONDS_A_LOOK = 1.0, 500
UV_VARIABLE = "RAY_ENABLE_UV_RUN_RUNTIME_ENV"
"""Below `uv run`, Ray would install the project once more for every actor. It is there already, on every machine."""
SECONDS_TO_END = 2.0


class RayExecutor(MultiprocExecutor):
    """One actor per rank, each with its own bundle. Joins a running cluster (`RAY_ADDRESS`), or starts one here."""

    def __init__(self, settings: WorkerSettings) -> None:
        """Places and starts the ranks, which load their models.

        Raises:
            MinivllmError: ray is not installed, or the cluster has no room for the ranks.
            WorkerDiedError: a rank died before it was ready.
        """
        ray = import_ray()
        size = settings.world_size
        self.max_concurrent_batches = settings.max_concurrent_batches
        self._was_connected = ray.is_initialized()
        if not self._was_connected:
            ray.init(logging_level="WARNING", include_dashboard=False)
        self._placement: Any = None
        try:
            self._placement = place(ray, size, settings.device)
            host = ray.util.get_node_ip_address()
            self._store = rendezvous(size, host)
            self._listener = socket.create_server((host, 0))
            address = (host, self._store.port)
            self.ranks = RankProcesses(
                worker_of_rank, (settings, address), size, sampling_rank(settings), self._start_rank
            )
        except BaseException:
            self._leave()
            raise

    def shutdown(self) -> None:
        """See `Executor`."""
        self.ranks.shutdown()
        self._leave()

    def _start_rank(self, rank: int) -> tuple[socket.socket, RankProcess]:
        ray = import_ray()
        actor = ray.remote(RankActor).options(**bundle_of(self._placement, rank)).remote()
        token = secrets.token_bytes(TOKEN_BYTES)
        process = RayProcess(actor, actor.live.remote(self._listener.getsockname()[:2], token))
        deadline = time.monotonic() + SECONDS_TO_CONNECT
        self._listener.settimeout(SECONDS_A_LOOK)
        while time.monotonic() < deadline and not process.has_ended():
            with contextlib.suppress(TimeoutError):
                connection, _ = self._listener.accept()
                if _knows(connection, token):  # what comes after it is unpickled
                    keep_alive(connection)
                    return connection, process
                connection.close()
        raise WorkerDiedError(f"rank {rank} of Ray has not connected to {self._listener.getsockname()[0]}")

    def _leave(self) -> None:
        ray = import_ray()
        if self._placement is not None and ray.is_initialized():
            ray.util.remove_placement_group(self._placement)
        self._placement = None
        if not self._was_connected:
            ray.shutdown()


class RankActor:
    """A rank's process; Ray starts it."""

    def live(self, address: tuple[str, int], token: bytes) -> None:
        """Runs the rank until the executor's socket is closed."""
        sock = socket.create_connection(address, SECONDS_TO_CONNECT)
        sock.settimeout(None)
        keep_alive(sock)
        own = sock.getsockname()[0]
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of(own))
        ended = threading.Event()
        threading.Thread(target=_end_with_executor, args=(sock, ended), daemon=True).start()
        sock.sendall(token)
        serve(sock)
        ended.set()


class RayProcess:
    """An actor, as `RankProcesses` sees a process."""

    pid = "a Ray actor"

    def __init__(self, actor: Any, running: Any) -> None:
        self._actor, self._running = actor, running
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Waits until the actor's rank has ended.

        Raises:
            subprocess.TimeoutExpired: it has not, in time.
        """
        done, _ = import_ray().wait([self._running], timeout=timeout)
        if not done:
            raise subprocess.TimeoutExpired("a Ray actor", timeout or 0.0)
        return 0

    def has_ended(self) -> bool:
        """Whether the actor's rank has ended."""
        return bool(import_ray().wait([self._running], timeout=0)[0])

    def kill(self) -> None:
        """Ends the actor."""
        import_ray().kill(self._actor)


def import_ray() -> Any:
    """Return the module.

    Raises:
        MinivllmError: it is not installed.
    """
    if importlib.util.find_spec("ray") is None:
        raise MinivllmError("ray is not installed: run `uv sync --group dist`, or use another backend")
    os.environ.setdefault(UV_VARIABLE, "0")
    import ray  # pyright: ignore[reportMissingImports]
    import ray.util  # pyright: ignore[reportMissingImports]

    return ray


def place(ray: Any, size: int, device: str) -> Any:
    """Return a placement group of `size` bundles, each with a GPU or a CPU, close together where there is room.

    Raises:
        MinivllmError: the cluster has no room for it.
    """
    resource = "GPU" if device == "cuda" else "CPU"
    if ray.cluster_resources().get(resource, 0) < size:
        raise _no_room(ray, size, resource)
    group = ray.util.placement_group([{resource: 1}] * size, strategy="PACK")
    if not group.wait(SECONDS_TO_PLACE):
        ray.util.remove_placement_group(group)
        raise _no_room(ray, size, resource)
    return group


def _no_room(ray: Any, size: int, resource: str) -> MinivllmError:
    return MinivllmError(
        f"the Ray cluster has no room for {size} ranks with one {resource} each: it has "
        f"{ray.available_resources().get(resource, 0):g} free of {ray.cluster_resources().get(resource, 0):g}"
    )


def bundle_of(group: Any, rank: int) -> dict[str, Any]:
    """Return an actor's options: that it takes a bundle of this group, whole."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # pyright: ignore[reportMissingImports]

    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
    bundle = group.bundle_specs[rank]
    return {"scheduling_strategy": strategy, "num_cpus": bundle.get("CPU", 0), "num_gpus": bundle.get("GPU", 0)}


def keep_alive(sock: socket.socket) -> None:
    """Let a connection fail that has lost its other end without a word."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE:
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def interface_of(address: str) -> str:
    """Return the name of the network interface with this IPv4 address, which gloo is to use."""
    if sys.platform != "linux":
        return "lo0" if address.startswith("127.") else "en0"
    import fcntl
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                found = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
            except OSError:  # it has no address
                continue
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    raise MinivllmError(f"no network interface has the address {address}")


def _knows(connection: socket.socket, token: bytes) -> bool:
    """Whether the other end says the token first, as only our actor can."""
    connection.settimeout(SECONDS_TO_CONNECT)
    try:
        said = connection.recv(len(token), socket.MSG_WAITALL)
    except OSError:
        return False
    return hmac.compare_digest(said, token)


def _end_with_executor(sock: socket.socket, ended: threading.Event) -> None:
    """Ends this process when the executor's end of the socket closes, wherever the rank waits then.

    A rank that ends by itself is Ray's to clear away.
    """
    hang_up = select.poll()
    hang_up.register(sock, select.POLLHUP | select.POLLRDHUP)
    while not hang_up.poll(MILLISECONDS_A_LOOK):
        pass
    if not ended.wait(SECONDS_TO_END):
        os._exit(0)
