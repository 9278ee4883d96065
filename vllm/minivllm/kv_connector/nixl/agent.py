"""A NIXL agent, reduced to what the connector needs: register memory, meet a peer, read its blocks,
notify it.

Memory is described by regions: `count` pieces of `num_bytes` each, one every `stride` bytes. A list
of pieces is prepared once for each peer; a transfer then names pieces by their index in it. A READ
moves bytes without any action by the peer, so the peer has to be told when it is over.

In vLLM v0.33.0: `NixlWrapper` in `vllm/distributed/nixl_utils.py` is NIXL's own class.
"""

import importlib
import importlib.util
import os
import queue
import threading
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from minivllm.errors import MinivllmError

State = Literal["PROC", "DONE", "ERR"]
"""A read is under way; all bytes have come; it has failed, and what has arrived is unknown."""
SECONDS_BETWEEN_LOOKS = 0.001
MODULES = ("nixl._api", "nixl_cu13._api", "nixl_cu12._api")
"""The distribution `nixl` only chooses between the builds for two CUDA releases; either works on
a CPU.
"""


class Region(NamedTuple):
    """`count` pieces of `num_bytes` starting at `address`, one every `stride` bytes, on a device
    (0: host memory).
    """

    address: int
    num_bytes: int
    device_id: int
    stride: int
    count: int


class NixlAgent:
    """A NIXL agent with the UCX backend, which moves the bytes; `UCX_TLS` in the environment limits
    its transports.
    """

    def __init__(self, name: str) -> None:
        """Start an agent, whose name must differ from that of every peer. Raise `MinivllmError` if
        nixl is not installed or cannot start.
        """
        api = _import_nixl()
        config = api.nixl_agent_config(
            backends=["UCX"],
            capture_telemetry=True,
            enable_prog_thread=False,
            sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,  # the core's calls come from several threads
        )
        try:
            # A restriction of UCX's transports is a usual cause, so the message shows it.
            self._api: Any = api.nixl_agent(name, config)
        except Exception as error:
            ways = os.environ.get("UCX_TLS", "not set")
            raise MinivllmError(
                f"NIXL cannot start its backend UCX: {error}; UCX_TLS is {ways} (sm,tcp,self works)"
            ) from None
        self._inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._ends = threading.Event()
        self._driver = threading.Thread(target=self._drive, daemon=True, name="nixl-progress")
        self._driver.start()
        self._memory_kind = "DRAM"
        self._registered: Any = None
        self._lists: dict[str | None, list[Any]] = {}

    def register(self, tensors: Sequence[torch.Tensor]) -> None:
        """Register this memory for transfers; call it once."""
        self._memory_kind = "VRAM" if tensors[0].is_cuda else "DRAM"
        self._registered = self._api.register_memory(list(tensors))

    def metadata(self) -> bytes:
        """Return the metadata with which a peer reaches this agent and its memory."""
        return self._api.get_agent_metadata()

    def add_peer(self, metadata: bytes) -> str:
        """Add the peer with this metadata, and return its name. NIXL raises its own exception for
        metadata that it cannot read.
        """
        name = self._api.add_remote_agent(metadata)
        return name.decode() if isinstance(name, bytes) else name

    def remove_peer(self, peer: str) -> None:
        """Forget a peer, and the lists prepared for it."""
        self._release_lists(peer)
        self._api.remove_remote_agent(peer)

    def prepare(self, peer: str | None, regions: Sequence[Region]) -> Any:
        """Prepare all pieces of these regions in order; a `peer` of None means this agent's own
        memory.
        """
        # [regions, 5], in the order of the fields of `Region`.
        table = np.array(regions, np.uint64).reshape(-1, len(Region._fields))
        prepared = self._api.prep_xfer_dlist(peer or "NIXL_INIT_AGENT", table, self._memory_kind)
        self._lists.setdefault(peer, []).append(prepared)
        return prepared

    def read(self, local: Any, into: np.ndarray, remote: Any, pieces: np.ndarray) -> "Transfer":
        """Start to read: piece `pieces[i]` of the peer's list goes into piece `into[i]` of the
        local one.
        """
        # NIXL takes indices of 32 bits only.
        indices = (into.astype(np.int32), pieces.astype(np.int32))
        handle = self._api.make_prepped_xfer("READ", local, indices[0], remote, indices[1], b"")
        return Transfer(self._api, handle)

    def notify(self, peer: str, message: bytes) -> None:
        """Send a notification without a transfer. NIXL raises its own exception if it knows that
        the peer is gone.
        """
        self._api.send_notif(peer, message)

    def notifications(self) -> list[bytes]:
        """Return what peers have sent since the last call."""
        return [self._inbox.get_nowait() for _ in range(self._inbox.qsize())]

    def close(self) -> None:
        """Release everything. A second call does nothing."""
        if self._api is None:
            return
        self._ends.set()
        self._driver.join()
        for peer in list(self._lists):
            if peer is None:
                self._release_lists(None)
            else:
                self.remove_peer(peer)
        if self._registered is not None:
            self._api.deregister_memory(self._registered)
        self._api = self._registered = None

    def _release_lists(self, peer: str | None) -> None:
        for prepared in self._lists.pop(peer, ()):
            self._api.release_dlist_handle(prepared)

    def _drive(self) -> None:
        """Drive the agent's connections while this process computes or waits.

        Over TCP, data moves and first connections are made only while both sides poll. NIXL has a
        thread for that, but it never sleeps: an idle agent would occupy a whole core.
        """
        # Asking for notifications also makes NIXL move whatever can move.
        while not self._ends.wait(SECONDS_BETWEEN_LOOKS):
            for messages in self._api.get_new_notifs().values():
                for message in messages:
                    self._inbox.put(message)


class Transfer:
    """A read that has started."""

    def __init__(self, api: Any, handle: Any) -> None:
        self._api = api
        self._handle = handle
        try:
            self._state: State = api.transfer(handle)
        except Exception:
            self.release()
            raise

    def state(self) -> State:
        """Return the state of the read."""
        if self._state == "PROC":
            try:
                self._state = self._api.check_xfer_state(self._handle)
            except Exception:  # NIXL raises one for a peer that is gone
                self._state = "ERR"
        return self._state

    def times(self) -> dict[str, float]:
        """Return NIXL's measurements of a finished read, by the names of their metrics."""
        measured = self._api.get_xfer_telemetry(self._handle)
        return {"xfer_time_seconds": measured.xferDuration / 1e6, "bytes_transferred": measured.totalBytes}

    def release(self) -> bool:
        """Release the read. Return False if it cannot be cancelled: it is still writing into local
        memory.
        """
        try:
            self._api.release_xfer_handle(self._handle)
        except Exception:
            return False
        return True


def _import_nixl() -> Any:
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    for name in MODULES:
        if importlib.util.find_spec(name.partition(".")[0]):
            return importlib.import_module(name)
    raise MinivllmError(
        "NixlConnector needs nixl, which is not installed: run `uv sync --group nixl` (Linux, 56 MB); "
        "TCPConnector needs no package"
    )
