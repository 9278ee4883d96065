"""Two servers for each request: one computes the prompt, the other generates.

The prefill server is asked for one token. It keeps the prompt's keys and values and says where they are; the decode
server is sent that with the client's request, fetches them and answers, and its bytes go to the client as they come.
Up to then nothing was said to the client, so where a server does not answer, another one is asked.

A client that leaves closes its connection to whichever server works for it, and so aborts its request there. A decode
server that aborts or refuses a request tells the prefill server. What no decode server was told of, the prefill server
frees when its lease ends.

In vLLM v0.33.0: `tests/v1/kv_connector/nixl_integration/toy_proxy_server.py`. That one has no health checks, asks
nobody else, and answers every failure with a bare 500.
"""

import asyncio
import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
from starlette.responses import Response

from minivllm.entrypoints.openai.errors import RequestError, bad_gateway, unavailable
from minivllm.entrypoints.openai.middleware import ServerState
from minivllm.entrypoints.proxy.bodies import Body, check, decode_body, estimated_tokens, prefill_body, why_decode_alone
from minivllm.entrypoints.proxy.metrics import ProxyMetrics, Turn
from minivllm.entrypoints.proxy.passed_on import PassedOn, passed_headers
from minivllm.entrypoints.proxy.pool import Pool, Upstream
from minivllm.entrypoints.proxy.settings import ProxyArgs
from minivllm.errors import MinivllmError
from minivllm.logger import init_logger

logger = init_logger(__name__)
SECONDS_KEPT_ALIVE = 2.0
"""How long an idle connection to a server is used again: less than uvicorn's 5 s, or a request meets its end."""
SECONDS_TO_SAY_HEALTHY = 5.0
LOST_AFTER = 3
"""Looks without an answer, after which nobody waits for a server any longer."""
MAX_ID_CHARACTERS = 1024
NO_ANSWER = (aiohttp.ClientError, TimeoutError, OSError)
NO_CONNECTION = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
"""The server was not sent anything."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A client's request: where it goes, what is sent, and about how many tokens its prompt has."""

    path: str
    body: Body
    headers: Mapping[str, str]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Prefilled:
    """What a prefill server says: where the keys and values are, if it keeps them, and the prompt's tokens."""

    kv_transfer_params: Body | None
    num_tokens: int


class Proxy:
    """The servers behind the proxy. `start` it in the event loop that serves, and `close` it there."""

    def __init__(self, settings: ProxyArgs) -> None:
        self.settings = settings
        self.state = ServerState()
        self.prefill = Pool("prefill", settings.prefill, settings.policy)
        self.decode = Pool("decode", settings.decode, settings.policy)
        self.upstreams = [*self.prefill.upstreams, *self.decode.upstreams]
        self.metrics = ProxyMetrics(self.upstreams)
        self.errored, self.dead_error = False, None
        self._stopped = False
        self._watchers: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Opens the connections' pool, and looks at each server's health, now and from time to time."""
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=SECONDS_KEPT_ALIVE)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self.settings.connect_timeout)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=timeout, auto_decompress=False, headers={"Accept-Encoding": "identity"}
        )
        await asyncio.gather(*(self.look_at(one) for one in self.upstreams))
        self._watchers = [asyncio.create_task(self._watch(one)) for one in self.upstreams]

    async def close(self) -> None:
        """Closes all connections."""
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        await self._session.close()

    async def wait_until_dead(self) -> None:
        """Never returns: servers may come back."""
        await asyncio.Event().wait()

    def end_requests(self) -> None:
        """Requests under way end with an error."""
        self._stopped = True
        for one in self.upstreams:
            one.cut_off()

    # A request

    async def answer(self, path: str, content: bytes, headers: Mapping[str, str]) -> Response:
        """Return the reply to a client's request: a decode server's, or another server's refusal.

        Raises:
            MinivllmError: the request is not one.
            RequestError: no server answers, or there are too many requests.
        """
        body = check(_parsed(content))
        most = self.settings.max_num_reqs
        if most is not None and self.state.num_open > most:
            raise unavailable(f"the proxy has {most} requests under way, which is max_num_reqs; try again later")
        asked = Asked(path, body, _headers_of(headers), estimated_tokens(body))
        way = why_decode_alone(body)
        prefilled: Prefilled | Response = Prefilled(None, asked.num_tokens)
        if way is None:
            prefilled = await self._prefilled(asked)
            if isinstance(prefilled, Response):
                return prefilled
            way = "two_steps" if prefilled.kv_transfer_params else "not_kept"
        self.metrics.count_way(way)
        return await self._decoded(asked, prefilled)

    async def _prefilled(self, asked: Asked) -> Prefilled | Response:
        """Asks prefill servers until one answers. What one refuses, every one would: that is the reply."""
        content, tried, last = _json(prefill_body(asked.body)), list[Upstream](), None
        while (upstream := self.prefill.choose(tried)) is not None:
            tried.append(upstream)
            turn = Turn(upstream, asked.num_tokens, self.metrics)
            try:
                last = await self._prefilled_by(turn, asked, content)
            except NO_ANSWER as error:
                self._note_failure(turn, error)
                continue
            finally:
                turn.end()
            if isinstance(last, Prefilled) or last.status_code < 500:
                return last
        return last or self._none_left(self.prefill)

    async def _prefilled_by(self, turn: Turn, asked: Asked, content: bytes) -> Prefilled | Response:
        url = turn.upstream.url + asked.path
        async with (
            turn.upstream.patience(self.settings.prefill_timeout),
            self._session.post(url, data=content, headers=asked.headers) as reply,
        ):
            said = await reply.read()
        turn.answered(reply.status)
        if reply.status != 200:
            return Response(said, reply.status, passed_headers(reply))
        turn.observe("prefill")
        return _prefilled_of(said, asked)

    async def _decoded(self, asked: Asked, prefilled: Prefilled) -> Response:
        """Asks decode servers until one takes the request.

        One that was sent it may have fetched the keys and values, which are there only once: no other is asked then.
        """
        content, tried, last = _json(decode_body(asked.body, prefilled.kv_transfer_params)), list[Upstream](), None
        while (upstream := self.decode.choose(tried)) is not None:
            tried.append(upstream)
            turn = Turn(upstream, prefilled.num_tokens, self.metrics)
            try:
                last = await self._decoded_by(turn, asked, content)
            except NO_CONNECTION as error:
                self._note_failure(turn, error)
                continue
            except NO_ANSWER as error:
                self._note_failure(turn, error)
                raise bad_gateway("the decode server has not answered; the request may be sent again") from None
            finally:
                if not isinstance(last, PassedOn):
                    turn.end()
            if last.status_code != 503:  # that one is full, or shuts down, and has not begun
                return last
        return last or self._none_left(self.decode)

    async def _decoded_by(self, turn: Turn, asked: Asked, content: bytes) -> Response:
        async with turn.upstream.patience():
            reply = await self._session.post(turn.upstream.url + asked.path, data=content, headers=asked.headers)
            try:
                turn.answered(reply.status)
                turn.observe("decode_wait")
                if reply.content_type == "text/event-stream":
                    return PassedOn(reply, turn, self._last_words)
                said = await reply.read()
            except BaseException:
                reply.close()
                raise
        turn.observe("decode")
        return Response(said, reply.status, passed_headers(reply))

    def _none_left(self, pool: Pool) -> Any:
        raise self._stopping() or unavailable(f"no {pool.role} server answers; try again later")

    def _last_words(self) -> RequestError:
        """What a client is told whose stream breaks off."""
        return self._stopping() or bad_gateway("the decode server has ended before the end of its answer")

    def _stopping(self) -> RequestError | None:
        return unavailable("the server is shutting down") if self._stopped else None

    def _note_failure(self, turn: Turn, error: Exception) -> None:
        """A server has not answered a request. Until its health has been looked at, it is not asked again."""
        stopping = self._stopping()
        if stopping is not None:
            raise stopping from None
        turn.outcome = "failed"
        if not isinstance(error, TimeoutError) or isinstance(error, NO_CONNECTION):  # else it is slow, not dead
            self._note(turn.upstream, _named(error))

    # The servers' health

    @property
    def is_healthy(self) -> bool:
        """Whether there is a server of each kind to ask."""
        return bool(self.prefill.healthy) and bool(self.decode.healthy)

    async def models(self, headers: Mapping[str, str]) -> Response:
        """Return what a server says of its models.

        Raises:
            RequestError: no server answers.
        """
        for upstream in (*self.decode.healthy, *self.prefill.healthy):
            try:
                async with (
                    upstream.patience(SECONDS_TO_SAY_HEALTHY),
                    self._session.get(f"{upstream.url}/v1/models", headers=_headers_of(headers)) as reply,
                ):
                    return Response(await reply.read(), reply.status, passed_headers(reply))
            except NO_ANSWER as error:
                self._note(upstream, _named(error))
        return self._none_left(self.decode)

    async def look_at(self, upstream: Upstream) -> None:
        """Asks a server for its health."""
        try:
            async with asyncio.timeout(SECONDS_TO_SAY_HEALTHY), self._session.get(f"{upstream.url}/health") as reply:
                self._note(upstream, None if reply.status == 200 else f"its /health says {reply.status}")
            upstream.num_silent, upstream.is_late = 0, False
        except NO_ANSWER as error:
            self._note(upstream, _named(error))
            upstream.num_silent += 1
            upstream.is_late = type(error) is TimeoutError and upstream.num_silent < LOST_AFTER
            if upstream.num_silent == LOST_AFTER:
                upstream.cut_off()

    async def _watch(self, upstream: Upstream) -> None:
        while True:
            await asyncio.sleep(self.settings.health_interval)
            await self.look_at(upstream)

    def _note(self, upstream: Upstream, trouble: str | None) -> None:
        if (trouble is None) != (upstream.trouble is None):
            if trouble is None:
                logger.info("The %s server %s answers again", upstream.role, upstream.url)
            else:
                logger.warning("The %s server %s is not asked: %s", upstream.role, upstream.url, trouble)
        upstream.trouble = trouble


def _parsed(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        raise MinivllmError("the body is not JSON") from None


def _json(body: Body) -> bytes:
    return json.dumps(body).encode()


def _prefilled_of(said: bytes, asked: Asked) -> Prefilled:
    """What a prefill server's reply says.

    Raises:
        RequestError: it is no completion.
    """
    try:
        reply = json.loads(said)
        params = reply.get("kv_transfer_params")
        num_tokens = (reply.get("usage") or {}).get("prompt_tokens")
    except (ValueError, AttributeError):
        raise bad_gateway("the prefill server's answer is not a completion") from None
    if params is not None and not isinstance(params, dict):
        raise bad_gateway("the prefill server's kv_transfer_params are no object")
    return Prefilled(params, num_tokens if isinstance(num_tokens, int) else asked.num_tokens)


def _headers_of(given: Mapping[str, str]) -> dict[str, str]:
    """What both servers are sent: the same id, by which their logs can be read together, and the client's key."""
    request_id = given.get("x-request-id") or str(uuid.uuid4())
    headers = {"X-Request-Id": request_id[:MAX_ID_CHARACTERS], "Content-Type": "application/json"}
    authorization = given.get("authorization")
    return headers | ({"Authorization": authorization} if authorization else {})


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
