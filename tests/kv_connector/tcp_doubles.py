"""Engines that are only the two sides of a TCP connector."""

from dataclasses import replace

from kv_connector.nixl_doubles import config_of, make_caches
from kv_connector.pull_doubles import Block, PullEngine
from patience import PATIENCE

from minivllm.core.request import Request
from minivllm.kv_connector.tcp.scheduler import TCPConnectorScheduler
from minivllm.kv_connector.tcp.worker import TCPConnectorWorker

SECRET = "known to both of them"


def tcp_config(engine_id: str, extra: dict | None = None, **others):
    config = config_of(engine_id, extra={"secret": SECRET, "timeout": PATIENCE, **(extra or {})}, **others)
    return replace(config, kv_transfer_config=replace(config.kv_transfer_config, kv_connector="TCPConnector"))


class Engine(PullEngine):
    """Over real sockets."""

    def __init__(self, engine_id: str, extra: dict | None = None, **others) -> None:
        self.config = tcp_config(engine_id, extra, **others)
        self.caches = make_caches(self.config, fill=engine_id == "P")
        self.scheduler = TCPConnectorScheduler(self.config)
        self.worker = TCPConnectorWorker(self.config)
        self.worker.register_kv_caches(self.caches)
        self.scheduler.set_xfer_handshake_metadata({0: self.worker.get_handshake_metadata()})

    def prefill(self, name: str, num_tokens: int, block_ids: list[int]) -> dict:
        """As `PullEngine`'s; the request has left the batch when this returns."""
        params = super().prefill(name, num_tokens, block_ids)
        self.step()
        return params

    def take(self, name: str, num_tokens: int, params: dict, blocks: list[Block]) -> tuple[Request, int]:
        """A request that another engine has computed gets these blocks; returns the tokens on their way too."""
        request = Request(name, range(num_tokens), max_tokens=4, kv_transfer_params=params)
        self.scheduler.on_new_request(request)
        return request, self.admit(request, blocks)
