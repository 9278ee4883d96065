"""Ranks as Ray actors, on any machines of a Ray cluster.

Ray only places the ranks and starts their processes. A placement group has one bundle for each, so
either all of them fit or none is started. Each actor connects back over TCP and first sends a token
that only it knows. The connection closes when either end does, and keepalive closes it when a
machine has gone silent. Over it, a rank serves the executor just like a local rank process
(`rank_loop.py`), so calls and failures behave as in `MultiprocExecutor`.

In vLLM v0.33.0: `vllm/v1/executor/ray_executor_v2.py` (`RayExecutorV2`), which is a multiprocess
executor, too.
"""

import contextlib
import hmac
import importlib.util
import os
import secrets
import select
import socket
import subprocess
import threading
import time
from typing import Any

from minivllm.errors import MinivllmError, WorkerDiedError
from minivllm.executor.multiproc_executor import MultiprocExecutor
from minivllm.executor.rank_loop import serve
from minivllm.worker.settings import WorkerSettings

SECONDS_TO_PLACE = 60.0
"""A placement group that is not ready after this time will not be: the cluster lacks resources."""
SECONDS_TO_CONNECT = 120.0
SECONDS_TO_SAY_IT = 5.0
"""A stranger that connects and sends nothing delays the others by this much."""
TOKEN_BYTES = 32
KEEPALIVE = (("TCP_KEEPIDLE", 3), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 10_000))
"""Notice within about ten seconds that a machine has gone silent; Ray takes a minute."""
SECONDS_A_LOOK, MILLISECONDS_A_LOOK = 1.0, 500
UV_VARIABLE = "RAY_ENABLE_UV_RUN_RUNTIME_ENV"
"""Below `uv run`, Ray would install the project once more for every actor. It is there already,
on every machine.
"""
SECONDS_TO_END = 2.0


class RayExecutor(MultiprocExecutor):
    """One actor per rank, each with its own bundle. Joins a running cluster (`RAY_ADDRESS`), or
    starts one here.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        """Place and start the ranks, which load their models.

        Raises:
            MinivllmError: ray is not installed, or the cluster cannot be joined, or has no room.
            WorkerDiedError: a rank died before it was ready.
        """
        ray = import_ray()
        # A caller's own connection to the cluster must survive this engine.
        self._was_connected = ray.is_initialized()
        if not self._was_connected:
            try:
                ray.init(logging_level="WARNING", include_dashboard=False)
            except ConnectionError as error:
                raise MinivllmError(f"cannot join the Ray cluster: {error}; is RAY_ADDRESS right?") from None
        self._placement: Any = None
        self._listener = socket.socket()
        try:
            self._placement = place(ray, settings.world_size, "GPU" if settings.device == "cuda" else "CPU")
            self._listener = socket.create_server((ray.util.get_node_ip_address(), 0))
            self._start_ranks(settings, self._listener.getsockname()[0], self._start_actor)
        except BaseException:
            self._leave_cluster()
            raise

    def shutdown(self) -> None:
        super().shutdown()
        self._leave_cluster()

    def _start_actor(self, rank: int) -> tuple[socket.socket, "RayProcess"]:
        """Start a rank's actor in its bundle, and return our end of its connection.

        Raises:
            WorkerDiedError: it has not connected in time.
        """
        # Starting it does not wait for it: Ray may have to start a process first.
        actor = import_ray().remote(RankActor).options(**bundle_of(self._placement, rank)).remote()
        token = secrets.token_bytes(TOKEN_BYTES)
        address = self._listener.getsockname()[:2]
        process = RayProcess(actor, actor.live.remote(address, token))
        deadline = time.monotonic() + SECONDS_TO_CONNECT
        self._listener.settimeout(SECONDS_A_LOOK)
        while time.monotonic() < deadline and not process.has_ended():
            with contextlib.suppress(TimeoutError):
                connection, _ = self._listener.accept()
                if _knows(connection, token):  # what comes after it is trusted
                    keep_alive(connection)
                    connection.settimeout(None)
                    return connection, process
                connection.close()
        process.kill()
        raise WorkerDiedError(f"rank {rank} of Ray has not connected to {address[0]}; Ray's log says why")

    def _leave_cluster(self) -> None:
        """Stop the actors, free their bundles and leave. A second call does nothing."""
        ray = import_ray()
        self._listener.close()
        if self._placement is not None and ray.is_initialized():
            ray.util.remove_placement_group(self._placement)
        self._placement = None
        if not self._was_connected:
            ray.shutdown()


class RayProcess:
    """An actor with the interface of a `ChildProcess`."""

    pid = "a Ray actor"

    def __init__(self, actor: Any, running: Any) -> None:
        self._actor = actor
        self._running = running
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        if not self.has_ended(timeout):
            raise subprocess.TimeoutExpired("a Ray actor", timeout or 0.0)
        return 0

    def has_ended(self, timeout: float | None = 0.0) -> bool:
        """Wait up to `timeout` seconds; return whether the actor's work has ended."""
        ray = import_ray()
        # At the interpreter's end Ray may be shut down before us, and its actors with it.
        return not ray.is_initialized() or bool(ray.wait([self._running], timeout=timeout)[0])

    def kill(self) -> None:
        ray = import_ray()
        if ray.is_initialized():
            ray.kill(self._actor)


class RankActor:
    """A rank's process, started by Ray. It ends when the executor closes the connection."""

    def live(self, address: tuple[str, int], token: bytes) -> None:
        """Connect to the executor, and run the rank until the connection is closed."""
        with socket.create_connection(address, SECONDS_TO_CONNECT) as sock:
            sock.settimeout(None)
            keep_alive(sock)
            ended = threading.Event()
            threading.Thread(target=_end_with_executor, args=(sock, ended), daemon=True).start()
            sock.sendall(token)
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of(sock.getsockname()[0]))
            try:
                serve(sock)
            finally:
                ended.set()


def import_ray() -> Any:
    """Import ray and return the module.

    Raises:
        MinivllmError: it is not installed.
    """
    if importlib.util.find_spec("ray") is None:
        raise MinivllmError("ray is not installed: run `uv sync --group dist`, or use another backend")
    os.environ.setdefault(UV_VARIABLE, "0")
    import ray  # pyright: ignore[reportMissingImports]
    import ray.util  # pyright: ignore[reportMissingImports]

    return ray


def place(ray: Any, size: int, resource: str) -> Any:
    """Return a placement group of `size` bundles, each of one "GPU" or "CPU", close together where
    there is room.

    Raises:
        MinivllmError: the cluster has no room for it.
    """
    total = ray.cluster_resources().get(resource, 0)
    if total >= size:
        group = ray.util.placement_group([{resource: 1}] * size, strategy="PACK")
        if group.wait(SECONDS_TO_PLACE):
            return group
        ray.util.remove_placement_group(group)
    raise MinivllmError(
        f"the Ray cluster has no room for {size} processes with 1 {resource} each: it has "
        f"{ray.available_resources().get(resource, 0):g} free of {total:g}"
    )


def bundle_of(group: Any, index: int) -> dict[str, Any]:
    """Return an actor's options, which give it a whole bundle of this group."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # pyright: ignore[reportMissingImports]

    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
    bundle = group.bundle_specs[index]
    return {"scheduling_strategy": strategy, "num_cpus": bundle.get("CPU", 0), "num_gpus": bundle.get("GPU", 0)}


def keep_alive(sock: socket.socket) -> None:
    """Enable keepalive, so that a connection fails when its other end disappears silently."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE:
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _knows(connection: socket.socket, token: bytes) -> bool:
    """Return whether the other end first sends the token, as only our actor can."""
    connection.settimeout(SECONDS_TO_SAY_IT)
    try:
        said = connection.recv(len(token), socket.MSG_WAITALL)
    except OSError:
        return False
    return hmac.compare_digest(said, token)


def _end_with_executor(sock: socket.socket, ended: threading.Event) -> None:
    """End this process when the executor's end of the socket closes, wherever the actor is waiting
    then.

    If the actor ends by itself, Ray cleans it up.
    """
    hang_up = select.poll()
    hang_up.register(sock, select.POLLHUP | select.POLLRDHUP)
    while not ended.is_set() and not hang_up.poll(MILLISECONDS_A_LOOK):
        pass
    # The actor may be about to end by itself.
    if not ended.wait(SECONDS_TO_END):
        os._exit(0)


def interface_of(address: str) -> str:
    """Return the name of the network interface with this address, which gloo should use."""
    import psutil  # comes with ray, in the group `dist`

    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return name
    raise MinivllmError(f"no network interface has the address {address}")
