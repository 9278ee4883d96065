"""One process per rank. In vLLM v0.33.0: `vllm/v1/executor/multiproc_executor.py`
(`MultiprocExecutor`).

Rank 0 has its own process too, so the engine's process never blocks in an all-reduce: it notices at
once when a rank dies, and can kill the others wherever they are stuck.
"""

import socket
import weakref
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from minivllm.core.scheduler_output import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from minivllm.errors import MinivllmError, WorkerDiedError, WorkerFailedError
from minivllm.executor.abstract import Executor
from minivllm.executor.kv_output_aggregator import KVOutputAggregator
from minivllm.executor.rank_loop import RESET
from minivllm.executor.rank_processes import SECONDS_TO_LEAVE, RankProcesses, RankStarter, start_here
from minivllm.worker.settings import WorkerSettings
from minivllm.worker.worker import LOOPBACK_ADDRESS, worker_of_rank


class MultiprocExecutor(Executor):
    """One process per rank.

    The ranks end with this object. Several steps may be in flight: the ranks share the sampled
    tokens among themselves, so the next step can be sent before this one's output has been read.
    The ranks handle all calls in the order in which they were made.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        check_devices(settings)
        self._start_ranks(settings, LOOPBACK_ADDRESS, start_here)

    def _start_ranks(self, settings: WorkerSettings, host: str, start: RankStarter) -> None:
        """Start the ranks, which rendezvous at this address of this machine."""
        size = settings.world_size
        sampling_rank = size - settings.tensor_parallel_size  # the first one of the last stage
        self.max_concurrent_batches = settings.max_concurrent_batches
        self._aggregator = None
        if settings.kv_transfer_config is not None:
            self._aggregator = KVOutputAggregator(size, sampling_rank)
        self._store = rendezvous(size, host)  # must live as long as the ranks, which use it
        address = (self._store.host, self._store.port)
        self.ranks = RankProcesses(worker_of_rank, (settings, address), size, sampling_rank, start)
        weakref.finalize(self, self.ranks.shutdown)

    def collective_rpc(self, method: str, *arguments: Any) -> list[Any]:
        if method == RESET and self._aggregator is not None:
            self._aggregator.reset()
        return self.ranks.call(method, *arguments)

    def _start(self, method: str, argument: SchedulerOutput | GrammarOutput) -> Future[ModelRunnerOutput]:
        if self._aggregator is None:
            return self.ranks.send(method, argument)
        return self.ranks.send(method, argument, join=self._aggregator.aggregate)

    def shutdown(self) -> None:
        if self._aggregator is not None:  # let the ranks' connectors end what they have started, if they answer in time
            with suppress(WorkerFailedError, WorkerDiedError, MinivllmError, TimeoutError):
                self.ranks.send("shutdown", join=list).result(SECONDS_TO_LEAVE)
        self.ranks.shutdown()


def rendezvous(size: int, host: str = LOOPBACK_ADDRESS) -> dist.TCPStore:
    """Return the store through which `size` ranks find each other, served by this process on a free
    port.

    It listens on this address only. If torch opened the socket itself, it would listen on every
    interface.
    """
    with socket.create_server((host, 0), backlog=128) as listener:
        port, fd = listener.getsockname()[1], listener.detach()
    return dist.TCPStore(host, port, size, is_master=True, wait_for_workers=False, master_listen_fd=fd)


def check_devices(settings: WorkerSettings) -> None:
    """Reject more ranks than there are GPUs.

    Raises:
        MinivllmError: there are more ranks than GPUs.
    """
    size = settings.world_size
    # NCCL does not take two ranks on one GPU; say so before any process starts.
    if settings.device == "cuda" and size > torch.cuda.device_count():
        what = "tensor_parallel_size" + " x pipeline_parallel_size" * (settings.pipeline_parallel_size > 1)
        raise MinivllmError(
            f"{what} is {size}, and each rank needs a GPU of its own: "
            f'there are {torch.cuda.device_count()} here; use no more than that, or device="cpu"'
        )
