"""Choose which of several cores gets a request.

A core's score is waiting x 4 + running, from the counts it last reported plus the requests sent
since then. The lowest score wins.

In vLLM v0.33.0: `vllm/v1/engine/core_client.py` (`DPLBAsyncMPClient.get_core_engine_for_request`),
with the counts of `vllm/v1/engine/coordinator.py`.
"""

from dataclasses import dataclass

from minivllm.core.engine_messages import EngineCoreRequest
from minivllm.core.stats import SchedulerStats
from minivllm.errors import MinivllmError

WAITING_WEIGHT = 4


@dataclass
class _Core:
    """Counts of one core. `num_sent` is the number of our requests sent to it, `num_received` the
    number that its counts include.
    """

    waiting: int = 0
    running: int = 0
    num_sent: int = 0
    num_received: int = 0


class LoadBalancer:
    """Assigns each request to one of several cores."""

    def __init__(self, num_cores: int) -> None:
        self._cores = [_Core() for _ in range(num_cores)]

    def choose(self, request: EngineCoreRequest) -> int:
        """Return the rank of the core for this request, and count it as sent.

        Raises:
            MinivllmError: the request names a core that does not exist.
        """
        ranks = range(len(self._cores))
        rank = request.data_parallel_rank
        if rank is None:
            # The first of equals: an idle engine fills its cores in order.
            rank = min(ranks, key=self.score)
        elif rank not in ranks:
            raise MinivllmError(f"there is no data_parallel_rank {rank}: the cores are {list(ranks)}")
        self._cores[rank].num_sent += 1
        return rank

    def score(self, rank: int) -> int:
        """Return a core's load score."""
        core = self._cores[rank]
        return WAITING_WEIGHT * (core.waiting + core.num_sent - core.num_received) + core.running

    def observe(self, rank: int, stats: SchedulerStats, num_received: int) -> None:
        """Store a core's counts, which include the first `num_received` of our requests."""
        core = self._cores[rank]
        core.waiting, core.running = stats.num_waiting_reqs, stats.num_running_reqs
        core.num_received = num_received
