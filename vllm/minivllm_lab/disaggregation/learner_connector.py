"""A KV connector between engines of one process; its scheduler side is exercise 08's
`ConnectorScheduler`.

LLM(model, parts=Parts(kv_connector=learner_connector(ConnectorScheduler)),
kv_transfer_config={...})
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from minivllm.config import EMBEDDED_MODEL, Parts
from minivllm.core.kv_connector import (
    KVCaches,
    KVConnectorBase_V1,
    KVConnectorConfig,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorRole,
)
from minivllm.core.request import Request
from minivllm.entrypoints.llm import LLM
from minivllm.errors import MinivllmError
from minivllm.sampling_params import SamplingParams
from minivllm_lab.checks.plugged import Plugged, Served, serve
from minivllm_lab.engines.inside import core_of

LEASE = 30.0
SECONDS_TO_RELEASE = 5.0


@dataclass
class Peer:
    """An engine's cache, the requests that other engines have read from it, and the number of
    blocks that it has read itself.
    """

    kv_caches: KVCaches
    sent: set[str] = field(default_factory=set)
    num_blocks: int = 0


PEERS: dict[str, Peer] = {}
"""The engines of this process by `engine_id`."""


@dataclass
class Reads(KVConnectorMetadata):
    """The reads that the exercise's `build_connector_meta` returned, and the requests whose lease
    has expired.
    """

    reads: Sequence[Any]
    expired: Sequence[str]


def learner_connector(kind: Callable[..., Any]) -> Callable[[KVConnectorConfig, KVConnectorRole], KVConnectorBase_V1]:
    """Return a factory of connectors whose scheduler side is an instance of `kind`."""

    return partial(LearnerConnector, kind)


class LearnerConnector(KVConnectorBase_V1):
    """A connector that copies blocks from one engine's cache into another's; the exercise decides
    which.
    """

    def __init__(self, kind: Callable[..., Any], config: KVConnectorConfig, role: KVConnectorRole) -> None:
        super().__init__(config, role)
        self.engine_id = config.kv_transfer_config.engine_id
        self.received: set[str] = set()
        if role is KVConnectorRole.SCHEDULER:
            address = {"remote_engine_id": self.engine_id}
            self.learner = kind(config.block_size, address, LEASE, time.monotonic)

    # The workers' side

    def register_kv_caches(self, kv_caches: KVCaches) -> None:
        """Register the cache so that the other engines can find it."""
        PEERS[self.engine_id] = Peer(kv_caches)

    def start_load_kv(self) -> None:
        """Copy the blocks to be read immediately; they count as received after the step."""
        meta = self._connector_metadata
        assert isinstance(meta, Reads)
        PEERS[self.engine_id].sent |= set(meta.expired)
        for read in meta.reads:
            peer = PEERS[read.params["remote_engine_id"]]
            if len(read.block_ids) != len(read.remote_block_ids):
                raise MinivllmError(f"cannot read {len(read.remote_block_ids)} blocks into {len(read.block_ids)}")
            if read.block_ids:
                caches = PEERS[self.engine_id].kv_caches.values(), peer.kv_caches.values()
                for ours, theirs in zip(*caches, strict=True):
                    for target, source in zip(ours, theirs, strict=True):
                        target[list(read.block_ids)] = source[list(read.remote_block_ids)]
                self.received.add(read.request_id)
                PEERS[self.engine_id].num_blocks += len(read.block_ids)
            peer.sent.add(read.params["remote_request_id"])

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Return the requests that other engines have read, and those whose blocks were copied
        here.
        """
        peer = PEERS[self.engine_id]
        sent, peer.sent = peer.sent, set()
        received, self.received = self.received, set()
        return sent, received

    # The scheduler's side

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Forward the call to the exercise's scheduler side."""
        return self.learner.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: Sequence[Any], num_external_tokens: int) -> None:
        """Forward the call to the exercise's scheduler side, with the blocks' ids."""
        self.learner.update_state_after_alloc(request, [block.block_id for block in blocks], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Reads:
        """Collect the reads and the expired leases."""
        return Reads(self.learner.build_connector_meta(), self.learner.expired())

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Forward the requests that were sent and received."""
        self.learner.update_connector_output(connector_output.finished_sending, connector_output.finished_recving)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Forward the call to the exercise's scheduler side."""
        return self.learner.request_finished(request, block_ids)

    # Both sides

    def shutdown(self) -> None:
        """Hide the cache from the other engines."""
        PEERS.pop(self.engine_id, None)


FREE, CAME = "blocks free again at the end", "blocks that came from the other engine"

# ---- two engines in a row ------------------------------------------------------------------------


def serve_through_both(plugged: Plugged, parts: Parts) -> Served:
    """Compute each prompt on one engine and answer it on another; if `parts` is empty, one engine
    does both.
    """
    if not parts.names:
        served = serve(plugged, parts)
        served.equal = {FREE: served.rows.pop(FREE)}
        served.rows[CAME] = 0
        return served
    prefiller, decoder = (_engine(parts, name) for name in ("prefiller", "decoder"))
    ids = {"temperature": 0.0, "ignore_eos": True}
    first_token = SamplingParams(**ids, max_tokens=1, extra_args={"kv_transfer_params": {"do_remote_decode": True}})
    prompts = list(plugged.prompts)
    prefilled = [output.kv_transfer_params for output in prefiller.generate(prompts, first_token, use_tqdm=False)]
    answers = [
        SamplingParams(**ids, max_tokens=plugged.max_tokens, extra_args={"kv_transfer_params": params})
        for params in prefilled
    ]
    outputs = decoder.generate(prompts, answers, use_tqdm=False)
    served = Served([], [])
    served.token_ids = [list(output.outputs[0].token_ids) for output in outputs]
    served.texts = [output.outputs[0].text for output in outputs]
    free = [_free_blocks(llm) for llm in (prefiller, decoder)]
    served.rows = {CAME: PEERS["decoder"].num_blocks}
    served.equal = {FREE: free[0] if free[0] == free[1] else " and ".join(free)}
    return served


def _engine(parts: Parts, name: str) -> LLM:
    settings = {"kv_connector": "ExampleConnector", "engine_id": name, "kv_role": "kv_both"}
    return LLM(
        EMBEDDED_MODEL, parts=parts, max_model_len=256, device="cpu", dtype="float32", kv_transfer_config=settings
    )


def _free_blocks(llm: LLM) -> str:
    """Step until all blocks are free or `SECONDS_TO_RELEASE` have passed; return how many are free."""
    pool = core_of(llm).scheduler.kv_cache_manager.block_pool
    until = time.monotonic() + SECONDS_TO_RELEASE
    while pool.get_num_free_blocks() < pool.num_usable_blocks and time.monotonic() < until:
        llm.llm_engine.step()
    return f"{pool.get_num_free_blocks()} of {pool.num_usable_blocks}"
