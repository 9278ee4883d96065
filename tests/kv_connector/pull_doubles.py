"""Engines that consist only of the two sides of a connector whose decoder pulls, and steps without
tokens.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from patience import PATIENCE

from minivllm.core.kv_connector import KVConnectorConfig, KVConnectorOutput
from minivllm.core.request import Request, RequestStatus

TO_DECODE = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}


class Clock:
    """A stand-in for the module `time` or its clocks: time passes when a test says so."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@dataclass
class Block:
    block_id: int
    block_hash: str | None = None


def blocks_of(*block_ids: int) -> list[Block]:
    return [Block(block_id) for block_id in block_ids]


class PullEngine:
    """An engine whose cache has a different number in every position if it is called "P", and zeros
    otherwise.
    """

    config: KVConnectorConfig
    caches: dict[str, Any]
    scheduler: Any
    worker: Any

    def step(self) -> KVConnectorOutput:
        self.begin()
        sent, received = self.worker.get_finished(set())
        failed, told = self.worker.get_failed_recving(), self.worker.build_connector_worker_meta()
        output = KVConnectorOutput(sent, received, failed, kv_connector_worker_meta=[told] if told else None)
        self.scheduler.update_connector_output(output)
        return output

    def begin(self) -> None:
        """Let the scheduler's side decide, then let the worker's side begin."""
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
        """Prefill a request here; return the `kv_transfer_params` that its client gets."""
        request = Request(name, range(num_tokens), max_tokens=1, kv_transfer_params=dict(TO_DECODE))
        self.scheduler.on_new_request(request)
        assert self.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
        self.scheduler.update_state_after_alloc(request, blocks_of(*block_ids), 0)
        self.step()
        request.num_computed_tokens = num_tokens
        request.append_output_token_id(7)
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        delays, params = self.scheduler.request_finished(request, block_ids)
        assert delays
        assert params is not None
        return params

    def take(self, name: str, num_tokens: int, params: dict) -> Request:
        """Add a request that another engine has prefilled."""
        request = Request(name, range(num_tokens), max_tokens=4, kv_transfer_params=params)
        self.scheduler.on_new_request(request)
        return request

    def abort(self, request: Request, block_ids: Sequence[int] = ()) -> None:
        request.status = RequestStatus.FINISHED_ABORTED
        assert self.scheduler.request_finished(request, list(block_ids)) == (False, None)

    def admit(self, request: Request, blocks: list[Block]) -> int:
        """Give the request its blocks; return how many tokens are to be read."""
        cached = sum(self.config.block_size for block in blocks if block.block_hash)
        num_external, is_async = self.scheduler.get_num_new_matched_tokens(request, cached)
        assert num_external is not None
        assert is_async == (num_external > 0)
        self.scheduler.update_state_after_alloc(request, blocks, num_external)
        return num_external

    def load(self, name: str, num_tokens: int, params: dict, *block_ids: int) -> KVConnectorOutput:
        """Take a request and step until its blocks have been read, or the read has failed."""
        assert self.admit(self.take(name, num_tokens, params), blocks_of(*block_ids)) == num_tokens
        return self.step_until(lambda output: output.finished_recving)

    def fail_a_step(self) -> None:
        """Drop what the ranks should have been told, and start over."""
        self.worker.reset()
        self.scheduler.start_over()

    def rows(self, block_ids: list[int]) -> list[torch.Tensor]:
        return [tensor[block_ids] for layer in self.caches.values() for tensor in layer]

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()


def all_equal(these, those) -> bool:
    return all(tensor.equal(other) for tensor, other in zip(these, those, strict=True))


@contextmanager
def engines(kind: Callable[..., PullEngine], *first: Any) -> Iterator[Callable[..., PullEngine]]:
    """Yield a function that makes engines of this kind, and close them afterwards."""
    built = []

    def make(*arguments: Any, **named: Any) -> PullEngine:
        built.append(kind(*first, *arguments, **named))
        return built[-1]

    yield make
    for engine in built:
        engine.close()


def check_given_back(p: PullEngine, d: PullEngine) -> None:
    """Let the decode engine send its release, and expect the prefill engine to free the blocks of `r`."""
    assert d.scheduler.has_pending_block_frees()
    d.step_until(lambda _: not d.scheduler.has_pending_block_frees())
    assert p.step_until(lambda output: output.finished_sending).finished_sending == {"r"}
