"""The servers of one kind, and which of them gets the next request.

`least_loaded` counts prompt tokens under way, not requests. On a prefill server the work that waits is proportional to
them: one prompt of 8,000 tokens keeps it as busy as eighty of 100. On a decode server they are what the keys and values
take of the cache and of each step's reads, so the server with the fewest has the most room and the shortest steps.
Requests only decide between equal loads, then whose turn it is.
"""

import asyncio
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from minivllm.entrypoints.proxy.settings import POLICIES
from minivllm.errors import MinivllmError


@dataclass(eq=False, slots=True)
class Upstream:
    """A server. `num_tokens`: of the prompts that it has under way. `trouble`: why it is not asked now."""

    url: str
    role: str
    num_requests: int = 0
    num_tokens: int = 0
    trouble: str | None = None
    num_silent: int = 0
    """How often in a row it has not answered to a look at its health."""
    is_late: bool = False
    """It was reached and has not answered in time, not for long yet: perhaps it is only busy."""
    limits: set[asyncio.Timeout] = field(default_factory=set)
    """Of whoever waits for it."""

    @asynccontextmanager
    async def patience(self, seconds: float | None = None) -> AsyncGenerator[None, None]:
        """What is done within is cut off after so many seconds, or by `cut_off`.

        Raises:
            TimeoutError: it was.
        """
        async with asyncio.timeout(seconds) as limit:
            self.limits.add(limit)
            try:
                yield
            finally:
                self.limits.discard(limit)

    def cut_off(self) -> None:
        """Whoever waits for this server waits no longer."""
        for limit in self.limits:
            limit.reschedule(asyncio.get_running_loop().time())


class Pool:
    """The servers with one role, "prefill" or "decode"."""

    def __init__(self, role: str, urls: Sequence[str], policy: str = "round_robin") -> None:
        if policy not in POLICIES:
            raise MinivllmError(f"unknown policy {policy!r}; known are {', '.join(POLICIES)}")
        self.role = role
        self.upstreams = [Upstream(url.rstrip("/"), role) for url in urls]
        self._policy = policy
        self._next = 0

    @property
    def healthy(self) -> list[Upstream]:
        """Those that answer; if none does, those that are only late."""
        answer = [one for one in self.upstreams if one.trouble is None]
        return answer or [one for one in self.upstreams if one.is_late]

    def choose(self, tried: Collection[Upstream] = ()) -> Upstream | None:
        """Return the server for a request that these have not served; None if there is none left."""
        number = len(self.upstreams)
        in_turn = [self.upstreams[(self._next + step) % number] for step in range(number)]
        healthy = self.healthy
        fit = [one for one in in_turn if one in healthy and one not in tried]
        if not fit:
            return None
        chosen = fit[0]
        if self._policy == "least_loaded":
            chosen = min(fit, key=lambda one: (one.num_tokens, one.num_requests))
        self._next = (self.upstreams.index(chosen) + 1) % number
        return chosen
