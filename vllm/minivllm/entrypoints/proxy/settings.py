"""What the flags of `minivllm proxy` say."""

from dataclasses import dataclass, field
from urllib.parse import urlsplit

from minivllm.config.checks import is_count, positive_seconds, require
from minivllm.entrypoints.openai.settings import HttpArgs

POLICIES = ("round_robin", "least_loaded")
EXAMPLE = "http://127.0.0.1:8100"


@dataclass(frozen=True, kw_only=True)
class ProxyArgs(HttpArgs):
    """Settings of the proxy.

    - `host`, `port`: where it listens; by default on all interfaces.
    - `prefill`: addresses of the servers that compute prompts. `decode`: of those that generate.
    - `policy`: which of them gets a request. "round_robin": the next one; "least_loaded": the one with the fewest
      prompt tokens under way.
    - `max_num_reqs`: with so many requests under way, further ones get a 503.
    - `connect_timeout`: seconds that a server has to take a connection. `prefill_timeout`: seconds that a prefill
      server has to answer, then another one is asked; by default any number.
    - `health_interval`: seconds between two looks at a server's /health.
    - `shutdown_timeout`: seconds that open requests have to finish after SIGTERM.
    - `disable_uvicorn_access_log`: no log line for each request. `uvicorn_log_level`: of uvicorn's own log.
    """

    prefill: list[str] = field(default_factory=list)
    decode: list[str] = field(default_factory=list)
    policy: str = "round_robin"
    max_num_reqs: int | None = None
    connect_timeout: float = 5.0
    prefill_timeout: float | None = None
    health_interval: float = 2.0
    shutdown_timeout: float = 30.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("prefill", "decode"):
            _check_addresses(name, getattr(self, name))
        require(self.policy in POLICIES, f"unknown policy {self.policy!r}; known are {', '.join(POLICIES)}")
        require(
            self.max_num_reqs is None or is_count(self.max_num_reqs, 1),
            f"max_num_reqs is {self.max_num_reqs!r}; it must be a whole number of at least 1",
        )
        positive_seconds("connect_timeout", self.connect_timeout)
        positive_seconds("health_interval", self.health_interval)
        if self.prefill_timeout is not None:
            positive_seconds("prefill_timeout", self.prefill_timeout)


def _check_addresses(name: str, addresses: list[str]) -> None:
    flag = f"--{name}"
    require(
        bool(addresses) and all(isinstance(one, str) for one in addresses),
        f"{flag} names no server; give its address, such as {flag} {EXAMPLE}",
    )
    for one in addresses:
        require(_is_address(one), f"{flag} {one!r} is no address; it must be like {EXAMPLE}")
    twice = {one for one in addresses if addresses.count(one) > 1}
    require(not twice, f"{flag} names {', '.join(sorted(twice))} twice")


def _is_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        found = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none
        return False
    return found and parts.path in ("", "/") and not (parts.query or parts.fragment or parts.username)
