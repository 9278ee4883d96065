"""The flags of `minivllm proxy`."""

import re
from dataclasses import dataclass, field
from typing import Annotated

from minivllm.config.checks import positive_seconds, require
from minivllm.entrypoints.openai.settings import SECONDS, HttpArgs

EXAMPLE = "http://127.0.0.1:8100"
ADDRESS = re.compile(r"https?://([\w.-]+|\[[0-9a-fA-F:]+\])(:[1-9]\d{0,4})?/?")


@dataclass(frozen=True, kw_only=True)
class ProxyArgs(HttpArgs):
    """Settings of the proxy.

    - `host`, `port`: where it listens; by default on all interfaces.
    - `prefill`: addresses of servers that compute prompts. `decode`: those of servers that generate.
    - `health_interval`: seconds between checks of a server's /health.
    - `shutdown_timeout`: seconds that open requests have to finish after SIGTERM.
    - `disable_uvicorn_access_log`: no log line for each request. `uvicorn_log_level`: of uvicorn's
      own log.
    """

    prefill: list[str] = field(default_factory=list)
    decode: list[str] = field(default_factory=list)
    health_interval: float = 2.0
    shutdown_timeout: Annotated[float, SECONDS] = 30.0

    def __post_init__(self) -> None:
        super().__post_init__()
        positive_seconds("health_interval", self.health_interval)
        for flag, addresses in (("--prefill", self.prefill), ("--decode", self.decode)):
            require(bool(addresses), f"{flag} names no server; give its address, such as {flag} {EXAMPLE}")
            for address in addresses:
                is_address = ADDRESS.fullmatch(address) is not None
                require(is_address, f"{flag} {address!r} is not an address; it must be like {EXAMPLE}")
                # Two entries would get twice the requests of the others.
                require(addresses.count(address) == 1, f"{flag} names {address} twice")
