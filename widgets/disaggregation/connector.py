"""The reader's own scheduler side of a connector, from exercise 08, in the engines of lesson 08's widget.

It decides whom to wait for and whose blocks to keep; the simulation knows what is right in each case, and says so where
the reader's code decides otherwise, since real keys and values would then be lost.
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
    """Asks the reader's connector. Whoever prefills sends to whoever decodes."""

    def __init__(self, sends: bool, make: ConnectorScheduler) -> None:
        super().__init__(sends)
        self.asked = make(BLOCK_SIZE, {"remote_engine_id": "prefill"}, math.inf, lambda: 0.0)
        self.admitted: dict[str, int] = {}
        """Who has got blocks since the last step was scheduled, and how many of them are to be filled."""

    def on_new_request(self, request: Request) -> None:
        """Tells the request what a proxy would."""
        blocks = list(range(-(-request.num_prompt_tokens // BLOCK_SIZE)))
        where = {"remote_request_id": request.request_id, "remote_engine_id": "prefill", "remote_block_ids": blocks}
        told = {"do_remote_prefill": True, "remote_num_tokens": request.num_prompt_tokens, **where}
        request.kv_transfer_params = {"do_remote_decode": True} if self.sends else told

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Asks."""
        right = super().get_num_new_matched_tokens(request, num_computed_tokens)
        answer = self.asked.get_num_new_matched_tokens(request, num_computed_tokens)
        where = "was preempted" if request.num_preemptions else "is here" if self.sends else "is elsewhere"
        _must_be(answer == right, f"get_num_new_matched_tokens gives {answer!r} for a prompt of "
                 f"{request.num_prompt_tokens} tokens that {where}; {right} would be right")  # fmt: skip
        return right

    def update_state_after_alloc(
        self, request: Request, blocks: Sequence[KVCacheBlock], num_external_tokens: int
    ) -> None:
        """Tells, with the ids of the blocks."""
        self.asked.update_state_after_alloc(request, [block.block_id for block in blocks], num_external_tokens)
        if num_external_tokens:
            self.admitted[request.request_id] = -(-num_external_tokens // BLOCK_SIZE)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Asks for the reads, which must be of all who have got blocks."""
        reads = self.asked.build_connector_meta()
        found = [(read.request_id, len(read.block_ids), len(read.remote_block_ids)) for read in reads]
        right = [(name, count, count) for name, count in self.admitted.items()]
        _must_be(found == right, f"build_connector_meta gives reads of {_few(found)} (request, blocks here, blocks "
                 f"there); {_few(right)} would be right")  # fmt: skip
        self.taken += self.admitted
        self.admitted = {}
        return super().build_connector_meta(scheduler_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, KVTransferParams | None]:
        """Asks whether the blocks are kept."""
        right = super().request_finished(request, block_ids)
        kept, params = self.asked.request_finished(request, block_ids)
        why = "another engine reads them" if self.sends else "nobody reads them"
        done = "keeps" if kept else "frees"
        _must_be(kept == right[0], f"request_finished {done} the blocks of a request that has ended; {why}")
        return right[0], params

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Tells."""
        self.asked.update_connector_output(connector_output.finished_sending, connector_output.finished_recving)


def _must_be(right: bool, otherwise: str) -> None:
    if not right:
        raise MinivllmError(f"Your {otherwise}.")


def _few(reads: list[tuple[str, int, int]]) -> str:
    return ", ".join(map(str, reads[:2])) + ", …" * (len(reads) > 2) if reads else "nobody"
