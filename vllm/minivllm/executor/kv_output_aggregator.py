"""Merge the reports of all ranks' KV connectors into one.

In vLLM v0.33.0: `vllm/distributed/kv_transfer/kv_connector/utils.py` (`KVOutputAggregator`).
"""

from collections import defaultdict
from collections.abc import Sequence

from minivllm.core.kv_connector import KVConnectorOutput, joined_stats
from minivllm.core.scheduler_output import ModelRunnerOutput


class KVOutputAggregator:
    """The state of transfers across ranks: a transfer is finished when all ranks have finished it,
    in whichever steps; it has failed if any rank has.
    """

    def __init__(self, size: int, output_rank: int = 0) -> None:
        self.size = size
        self.output_rank = output_rank
        self.reset()

    def reset(self) -> None:
        """Forget transfers that only some ranks have finished: after a failed step all ranks report
        them again.
        """
        self._sent: defaultdict[str, set[int]] = defaultdict(set)
        self._received: defaultdict[str, set[int]] = defaultdict(set)
        self._failed: set[str] = set()

    def aggregate(self, outputs: Sequence[ModelRunnerOutput]) -> ModelRunnerOutput:
        """Return the output of the rank that samples, with the connector reports of all ranks
        merged in.
        """
        by_rank = {rank: output.kv_connector_output for rank, output in enumerate(outputs)}
        reports = {rank: report for rank, report in by_rank.items() if report is not None}
        joined = KVConnectorOutput()
        for rank, report in reports.items():
            self._failed |= report.failed_recving
            joined.invalid_block_ids |= report.invalid_block_ids
            joined.finished_sending |= self._finished(self._sent, rank, report.finished_sending)
            joined.finished_recving |= self._finished(self._received, rank, report.finished_recving)
        joined.failed_recving = self._failed & joined.finished_recving
        self._failed -= joined.failed_recving
        joined.kv_connector_stats = joined_stats([report.kv_connector_stats for report in reports.values()])
        metas = [meta for report in reports.values() for meta in report.kv_connector_worker_meta or ()]
        joined.kv_connector_worker_meta = metas or None
        output = outputs[self.output_rank]
        output.kv_connector_output = None if joined.is_empty() else joined
        return output

    def _finished(self, ranks_of: defaultdict[str, set[int]], rank: int, request_ids: set[str]) -> set[str]:
        """Record that a rank has finished these requests; return those that all ranks have
        finished.
        """
        for request_id in request_ids:
            ranks_of[request_id].add(rank)
        finished = {request_id for request_id in request_ids if len(ranks_of[request_id]) == self.size}
        for request_id in finished:
            del ranks_of[request_id]
        return finished
