"""Engines that are only the two sides of a TCP connector, and steps without tokens."""

import time
from dataclasses import dataclass, replace

from kv_connector.nixl_doubles import config_of, make_caches

from minivllm.core.kv_connector import KVConnectorOutput
from minivllm.core.request import Request, RequestStatus
from minivllm.kv_connector.tcp_scheduler import TCPConnectorScheduler
from minivllm.kv_connector.tcp_settings import TCPSettings
from minivllm.kv_connector.tcp_worker import TCPConnectorWorker

SECRET = "known to both of them"
TO_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}


@dataclass
class Block:
    block_id: int
    block_hash: str | None = None


def tcp_config(engine_id: str, extra: dict | None = None, **others):
    config = config_of(engine_id, extra={"secret": SECRET, "timeout": 2.0, **(extra or {})}, **others)
    return replace(config, kv_transfer_config=replace(config.kv_transfer_config, kv_connector="TCPConnector"))


class Engine:
    """`engine_id` "P": its cache is full of numbers that are found nowhere twice; else of zeros."""

    def __init__(self, engine_id: str, extra: dict | None = None, **others) -> None:
        self.config = tcp_config(engine_id, extra, **others)
        settings = TCPSettings.of(self.config)
        self.caches = make_caches(self.config, fill=engine_id == "P")
        self.scheduler = TCPConnectorScheduler(self.config, settings)
        self.worker = TCPConnectorWorker(self.config, settings)
        self.worker.register_kv_caches(self.caches)
        self.scheduler.set_xfer_handshake_metadata({0: self.worker.get_handshake_metadata()})

    def step(self) -> KVConnectorOutput:
        self.worker.start_load_kv(self.scheduler.build_connector_meta())
        for name in self.caches:
            self.worker.wait_for_layer_load(name)
        self.worker.wait_for_save()
        sent, received = self.worker.get_finished()
        failed, invalid, told = self.worker.take_failed(), self.worker.take_invalid_block_ids(), self.worker.take_told()
        output = KVConnectorOutput(sent, received, failed, invalid, kv_connector_worker_meta=[told] if told else None)
        self.scheduler.update_connector_output(output)
        return output

    def step_until(self, is_done) -> KVConnectorOutput:
        until = time.monotonic() + 10
        while time.monotonic() < until:
            if is_done(output := self.step()):
                return output
            time.sleep(0.002)
        raise AssertionError("it never came")

    def prefill(self, name: str, num_tokens: int, block_ids: list[int]) -> dict:
        """A request computed here; returns what its client is told."""
        request = Request(name, range(num_tokens), max_tokens=1, kv_transfer_params=dict(TO_DECODE))
        self.scheduler.on_new_request(request)
        self.scheduler.update_state_after_alloc(request, [Block(block_id) for block_id in block_ids], 0)
        self.step()
        request.num_computed_tokens = num_tokens
        request.append_output_token_id(7)
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        delays, params = self.scheduler.request_finished(request, block_ids)
        assert delays
        assert params is not None
        self.step()
        return params

    def take(self, name: str, num_tokens: int, params: dict, blocks: list[Block]) -> tuple[Request, int]:
        """A request that another engine has computed gets these blocks; returns the tokens on their way too."""
        request = Request(name, range(num_tokens), max_tokens=4, kv_transfer_params=params)
        self.scheduler.on_new_request(request)
        cached = sum(self.config.block_size for block in blocks if block.block_hash)
        found, _ = self.scheduler.get_num_new_matched_tokens(request, cached)
        assert found is not None
        self.scheduler.update_state_after_alloc(request, blocks, found)
        return request, found

    def rows(self, block_ids: list[int]):
        return [tensor[block_ids] for layer in self.caches.values() for tensor in layer]

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()


def all_equal(these, those) -> bool:
    return all(one.equal(other) for one, other in zip(these, those, strict=True))
