"""Choose which of several cores gets a request.

A core's score is waiting x 4 + running, from the counts it last reported plus the requests sent
since then. The lowest score wins.

In vLLM v0.33.0: `vllm/v1/engine/core_client.py` (`DPLBAsyncMPClient.get_core_engine_for_request`),
with the counts of `vllm/v1/engine/coordinator.py`.
"""

from minivllm.core.engine_messages import EngineCoreRequest
from minivllm.core.stats import SchedulerStats
from minivllm.errors import MinivllmError

WAITING_WEIGHT = 4


class LoadBalancer:
    """Assigns each request to one of several cores."""

    def __init__(self, num_cores: int) -> None:
        self._num_sent = [0] * num_cores
        self._reported = [0] * num_cores
        """The score that each core last reported, less what it had received by then."""

    def choose(self, request: EngineCoreRequest) -> int:
        """Return the rank of the core for this request, and count it as sent.

        Raises:
            MinivllmError: the request names a core that does not exist.
        """
        ranks = range(len(self._num_sent))
        rank = request.data_parallel_rank
        if rank is None:
            # The first of equals: an idle engine fills its cores in order.
            rank = min(ranks, key=self.score)
        elif rank not in ranks:
            raise MinivllmError(f"there is no data_parallel_rank {rank}: the cores are {list(ranks)}")
        self._num_sent[rank] += 1
        return rank

    def score(self, rank: int) -> int:
        """Return a core's load score."""
        # A request that was sent waits, until the core counts it itself.
        return self._reported[rank] + WAITING_WEIGHT * self._num_sent[rank]

    def observe(self, rank: int, stats: SchedulerStats, num_received: int) -> None:
        """Store a core's counts, which include the first `num_received` of our requests."""
        num_waiting = stats.num_waiting_reqs - num_received
        self._reported[rank] = WAITING_WEIGHT * num_waiting + stats.num_running_reqs
