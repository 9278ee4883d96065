"""Engines that consist only of the two sides of a TCP connector."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from kv_connector.nixl_doubles import config_of, make_caches
from kv_connector.pull_doubles import PullEngine, engines
from patience import PATIENCE

from minivllm.kv_connector.tcp.scheduler import TCPConnectorScheduler
from minivllm.kv_connector.tcp.worker import TCPConnectorWorker

SECRET = "known to both of them"


def tcp_config(engine_id: str, extra: dict | None = None, **others):
    config = config_of(engine_id, extra={"secret": SECRET, "timeout": PATIENCE, **(extra or {})}, **others)
    return replace(config, kv_transfer_config=replace(config.kv_transfer_config, kv_connector="TCPConnector"))


class Engine(PullEngine):
    """A TCP engine over real sockets."""

    def __init__(
        self, engine_id: str, extra: dict | None = None, lease: float = 30.0, shape: dict | None = None, **others
    ) -> None:
        self.config = tcp_config(engine_id, {"kv_lease_duration": lease, **(extra or {})}, **others)
        self.caches = make_caches(self.config, fill=engine_id == "P", **(shape or {}))
        self.scheduler = TCPConnectorScheduler(self.config)
        self.worker = TCPConnectorWorker(self.config)
        self.worker.register_kv_caches(self.caches)
        self.scheduler.set_xfer_handshake_metadata({0: self.worker.get_handshake_metadata()})

    def prefill(self, name: str, num_tokens: int, block_ids: list[int]) -> dict:
        """Prefill as `PullEngine` does, and step once more, so that the request has left the batch."""
        params = super().prefill(name, num_tokens, block_ids)
        self.step()
        return params


@contextmanager
def tcp_engines() -> Iterator:
    """Yield a function that makes engines, and close them: no thread may be left."""
    threads = threading.active_count()
    with engines(Engine) as make:
        yield make
    assert threading.active_count() <= threads
