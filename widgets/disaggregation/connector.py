"""Run the reader's connector scheduler of exercise 08 in the engines of lesson 08's widget.

The connector decides which requests wait and whose blocks are kept. The simulation knows the right
answer in each case, and reports where the reader's code decides otherwise, because real keys and
values would then be lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from minivllm.core.block_pool import KVCacheBlock
from minivllm.core.kv_connector import KVConnectorMetadata, KVConnectorOutput, KVTransferParams
from minivllm.core.request import Request
from minivllm.core.scheduler_output import SchedulerOutput
from minivllm.errors import MinivllmError
from minivllm_lab.disaggregation.pools import SimulatedConnector
from minivllm_simulate.layouts import BLOCK_SIZE

ConnectorScheduler = Callable[..., Any]
"""Called with block size, address, lease and clock, as in exercise 08."""


class CheckedConnector(SimulatedConnector):
    """A connector that checks each of the reader's answers; prefill engines send, decode engines
    receive.
    """

    def __init__(self, sends: bool, make: ConnectorScheduler) -> None:
        super().__init__(sends)
        self.asked = make(BLOCK_SIZE, {"remote_engine_id": "prefill"}, math.inf, lambda: 0.0)
        self.admitted: dict[str, int] = {}
        """Requests that got blocks since the last step was scheduled, and how many of these are
        to be filled.
        """

    def on_new_request(self, request: Request) -> None:
        blocks = list(range(-(-request.num_prompt_tokens // BLOCK_SIZE)))
        source = {"remote_request_id": request.request_id, "remote_engine_id": "prefill", "remote_block_ids": blocks}
        receives = {"do_remote_prefill": True, "remote_num_tokens": request.num_prompt_tokens, **source}
        request.kv_transfer_params = {"do_remote_decode": True} if self.sends else receives

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        right = super().get_num_new_matched_tokens(request, num_computed_tokens)
        answer = self.asked.get_num_new_matched_tokens(request, num_computed_tokens)
        where = "was preempted" if request.num_preemptions else "is local" if self.sends else "is remote"
        _must_be(
            answer == right,
            f"get_num_new_matched_tokens returns {answer!r} for a prompt of {request.num_prompt_tokens} tokens that "
            f"{where}, but it should return {right}",
        )
        return right

    def update_state_after_alloc(
        self, request: Request, blocks: Sequence[KVCacheBlock], num_external_tokens: int
    ) -> None:
        self.asked.update_state_after_alloc(request, [block.block_id for block in blocks], num_external_tokens)
        if num_external_tokens:
            self.admitted[request.request_id] = -(-num_external_tokens // BLOCK_SIZE)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        reads = self.asked.build_connector_meta()
        counts = [(read.request_id, len(read.block_ids), len(read.remote_block_ids)) for read in reads]
        right = [(name, count, count) for name, count in self.admitted.items()]
        _must_be(
            counts == right,
            f"build_connector_meta returns reads of {_few(counts)} (request, local blocks, remote blocks), but "
            f"it should return {_few(right)}",
        )
        self.taken += self.admitted
        self.admitted = {}
        return super().build_connector_meta(scheduler_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, KVTransferParams | None]:
        right = super().request_finished(request, block_ids)
        kept, params = self.asked.request_finished(request, block_ids)
        why = "another engine reads them" if self.sends else "no engine reads them"
        action = "keeps" if kept else "frees"
        _must_be(kept == right[0], f"request_finished {action} the blocks of a finished request, but {why}")
        return right[0], params

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self.asked.update_connector_output(connector_output.finished_sending, connector_output.finished_recving)


def _must_be(right: bool, otherwise: str) -> None:
    if not right:
        raise MinivllmError(f"Your {otherwise}.")


def _few(reads: list[tuple[str, int, int]]) -> str:
    return ", ".join(map(str, reads[:2])) + ", …" * (len(reads) > 2) if reads else "no request"
