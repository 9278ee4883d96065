"""Which of several cores gets a request.

A core's score is waiting x 4 + running: what it last said, and requests sent since that it has not counted yet; the
lowest wins.

Routing "prefix" is not vLLM's, whose engine leaves it to routers in front of it: the core that has most of the prompt's
leading blocks among those recently sent to it, unless its score is above the lowest by more than `PREFIX_SLACK`.

In vLLM v0.33.0: `vllm/v1/engine/core_client.py` (`DPLBAsyncMPClient.get_core_engine_for_request`), with the counts of
`vllm/v1/engine/coordinator.py`.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from minivllm.core.block_hash import BlockHash, generate_block_hash_extra_keys, hash_new_full_blocks
from minivllm.core.messages import EngineCoreReady, EngineCoreRequest
from minivllm.core.stats import SchedulerStats
from minivllm.errors import MinivllmError

WAITING_WEIGHT = 4
PREFIX_SLACK = 16
"""How far a core's score may be above the lowest for the sake of its blocks: as four waiting or 16 running requests."""


@dataclass
class _Core:
    """What is known of one core. `num_sent` counts our requests, `num_received` those that its counts include."""

    capacity: int
    waiting: int = 0
    running: int = 0
    num_sent: int = 0
    num_received: int = 0
    alive: bool = True
    blocks: OrderedDict[BlockHash, None] = field(default_factory=OrderedDict)

    def remember(self, hashes: Sequence[BlockHash]) -> None:
        """The core will have these blocks, and at most as many as its cache holds."""
        for block_hash in reversed(hashes):  # as in the pool, the end of a prefix is forgotten first
            self.blocks[block_hash] = None
            self.blocks.move_to_end(block_hash)
        while len(self.blocks) > self.capacity:
            self.blocks.popitem(last=False)


class LoadBalancer:
    """Chooses among cores."""

    def __init__(self, engines: Sequence[EngineCoreReady], routing: str = "load") -> None:
        self._cores = [_Core(engine.num_gpu_blocks) for engine in engines]
        self._routing = routing
        self._block_size = engines[0].limits.block_size

    def choose(self, request: EngineCoreRequest) -> int:
        """Returns the rank of the core for this request, and counts it as sent.

        Raises:
            MinivllmError: the request names a core that there is not, or that has ended.
        """
        hashes = self._hashes(request) if self._routing == "prefix" and len(self._cores) > 1 else []
        rank = self._asked(request) if request.data_parallel_rank is not None else self._best(hashes)
        self._cores[rank].num_sent += 1
        self._cores[rank].remember(hashes)
        return rank

    def score(self, rank: int) -> int:
        """Returns how loaded a core is."""
        core = self._cores[rank]
        return WAITING_WEIGHT * (core.waiting + core.num_sent - core.num_received) + core.running

    def observe(self, rank: int, stats: SchedulerStats, num_received: int) -> None:
        """Takes in a core's counts, which include the first `num_received` of our requests."""
        core = self._cores[rank]
        core.waiting, core.running = stats.num_waiting_reqs, stats.num_running_reqs
        core.num_received = num_received

    def forget_blocks(self) -> None:
        """The caches were emptied."""
        for core in self._cores:
            core.blocks.clear()

    def drop(self, rank: int) -> None:
        """A core has ended: no request goes there any more."""
        self._cores[rank].alive = False

    def _asked(self, request: EngineCoreRequest) -> int:
        rank = request.data_parallel_rank
        assert rank is not None
        if not (0 <= rank < len(self._cores) and self._cores[rank].alive):
            raise MinivllmError(f"there is no data_parallel_rank {rank}: the running cores are {self._alive()}")
        return rank

    def _alive(self) -> list[int]:
        return [rank for rank, core in enumerate(self._cores) if core.alive]

    def _best(self, hashes: Sequence[BlockHash]) -> int:
        """The first of the least loaded, or one with more of the prefix that is not much more loaded."""
        scores = {rank: self.score(rank) for rank in self._alive()}
        most = min(scores.values()) + PREFIX_SLACK
        if not hashes:
            return min(scores, key=lambda rank: scores[rank])
        found = {rank: self._num_leading(rank, hashes) for rank in scores}
        return min(scores, key=lambda rank: (-found[rank] if scores[rank] <= most else 0, scores[rank]))

    def _num_leading(self, rank: int, hashes: Sequence[BlockHash]) -> int:
        blocks = self._cores[rank].blocks
        return sum(1 for _ in takewhile(blocks.__contains__, hashes))

    def _hashes(self, request: EngineCoreRequest) -> list[BlockHash]:
        hashes: list[BlockHash] = []
        keys = generate_block_hash_extra_keys(None, request.cache_salt)
        hash_new_full_blocks(hashes, request.prompt_token_ids, self._block_size, keys)
        return hashes
