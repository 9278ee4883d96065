"""Engines that are only the two sides of a connector whose decoder pulls, and steps without tokens."""

import time
from dataclasses import dataclass
from typing import Any

import torch
from patience import PATIENCE

from minivllm.core.kv_connector import KVConnectorConfig, KVConnectorOutput
from minivllm.core.request import Request, RequestStatus

TO_DECODE = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}


class Clock:
    """In place of the module `time`, or of its clocks: time passes when a test says so."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@dataclass
class Block:
    block_id: int
    block_hash: str | None = None


class PullEngine:
    """`engine_id` "P": its cache is full of numbers that are found nowhere twice; else of zeros."""

    config: KVConnectorConfig
    caches: dict[str, Any]
    scheduler: Any
    worker: Any

    def step(self) -> KVConnectorOutput:
        self.begin()
        sent, received = self.worker.get_finished(set())
        failed, invalid = self.worker.get_failed_recving(), self.worker.get_block_ids_with_load_errors()
        told = self.worker.build_connector_worker_meta()
        output = KVConnectorOutput(sent, received, failed, invalid, kv_connector_worker_meta=[told] if told else None)
        self.scheduler.update_connector_output(output)
        return output

    def begin(self) -> None:
        """The scheduler's side decides, the worker's side begins."""
        self.worker.bind_connector_metadata(self.scheduler.build_connector_meta(None))
        self.worker.start_load_kv()

    def step_until(self, is_done) -> KVConnectorOutput:
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            if is_done(output := self.step()):
                return output
            time.sleep(0.002)
        raise AssertionError("it never came")

    def prefill(self, name: str, num_tokens: int, block_ids: list[int]) -> dict:
        """A request computed here; returns what its client is told."""
        request = Request(name, range(num_tokens), max_tokens=1, kv_transfer_params=dict(TO_DECODE))
        self.scheduler.on_new_request(request)
        assert self.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
        self.scheduler.update_state_after_alloc(request, [Block(block_id) for block_id in block_ids], 0)
        self.step()
        request.num_computed_tokens = num_tokens
        request.append_output_token_id(7)
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        delays, params = self.scheduler.request_finished(request, block_ids)
        assert delays
        assert params is not None
        return params

    def admit(self, request: Request, blocks: list[Block]) -> int:
        """Gives the request its blocks; returns how many tokens are on their way."""
        cached = sum(self.config.block_size for block in blocks if block.block_hash)
        num_external, is_async = self.scheduler.get_num_new_matched_tokens(request, cached)
        assert num_external is not None
        assert is_async == (num_external > 0)
        self.scheduler.update_state_after_alloc(request, blocks, num_external)
        return num_external

    def rows(self, block_ids: list[int]) -> list[torch.Tensor]:
        return [tensor[block_ids] for layer in self.caches.values() for tensor in layer]

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()


def all_equal(these, those) -> bool:
    return all(one.equal(other) for one, other in zip(these, those, strict=True))
