"""What the ranks of a tensor-parallel group say of a KV connector, as if one had said it.

In vLLM v0.33.0: `vllm/distributed/kv_transfer/kv_connector/utils.py` (`KVOutputAggregator`).
"""

from collections import defaultdict
from collections.abc import Sequence

from minivllm.core.kv_connector import KVConnectorOutput, joined_stats
from minivllm.core.output import ModelRunnerOutput


class KVOutputAggregator:
    """A transfer is over when all ranks have said so, in whichever steps. It has failed if it has on any of them."""

    def __init__(self, size: int, output_rank: int = 0) -> None:
        self.size, self.output_rank = size, output_rank
        self.reset()

    def reset(self) -> None:
        """Forget what some ranks have said, and others not: after a failed step they are all told again."""
        self._sent: defaultdict[str, set[int]] = defaultdict(set)
        self._received: defaultdict[str, set[int]] = defaultdict(set)
        self._failed: set[str] = set()

    def aggregate(self, outputs: Sequence[ModelRunnerOutput]) -> ModelRunnerOutput:
        """Return the output of the rank that samples, with what all ranks say of their connectors."""
        output = outputs[self.output_rank]
        said = {rank: one.kv_connector_output for rank, one in enumerate(outputs)}
        by_rank = {rank: one for rank, one in said.items() if one is not None}
        joined = KVConnectorOutput()
        for rank, one in by_rank.items():
            self._failed |= one.failed_recving
            joined.invalid_block_ids |= one.invalid_block_ids
            joined.finished_sending |= self._over(self._sent, rank, one.finished_sending)
            joined.finished_recving |= self._over(self._received, rank, one.finished_recving)
        joined.failed_recving = self._failed & joined.finished_recving
        self._failed -= joined.failed_recving
        joined.kv_connector_stats = joined_stats([one.kv_connector_stats for one in by_rank.values()])
        metas = [meta for one in by_rank.values() for meta in one.kv_connector_worker_meta or ()]
        joined.kv_connector_worker_meta = metas or None
        output.kv_connector_output = None if joined.is_empty() else joined
        return output

    def _over(self, told: defaultdict[str, set[int]], rank: int, names: set[str]) -> set[str]:
        """The requests that this rank names as the last one."""
        for name in names:
            told[name].add(rank)
        over = {name for name in names if len(told[name]) == self.size}
        for name in over:
            del told[name]
        return over
