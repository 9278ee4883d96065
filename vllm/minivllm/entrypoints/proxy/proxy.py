"""Two servers for each request: one computes the prompt, the other generates.

The prefill server gets a request for one token. It keeps the prompt's keys and values, and replies
where they are. The decode server gets that location with the client's request, fetches them and
answers, and its bytes are passed on to the client as they arrive. Servers take turns. Nothing is
sent to the client before the decode server answers, so if a server does not answer, the next one is
tried.

A client that leaves closes its connection to whichever server is working for it, and thereby aborts
its request there. A decode server that aborts or refuses a request tells the prefill server. If no
decode server ever hears of a request, the prefill server frees its blocks when the lease ends.

In vLLM v0.33.0: `tests/v1/kv_connector/nixl_integration/toy_proxy_server.py`. That proxy has no
health checks, tries no other server, and answers every failure with a bare 500.
"""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence

import aiohttp
from starlette.responses import Response

from minivllm.entrypoints.openai.errors import RequestError, error_body
from minivllm.entrypoints.openai.middleware import ServerState
from minivllm.entrypoints.openai.stream import EventStream, as_event
from minivllm.entrypoints.proxy.bodies import Body, has_two_steps, kept_params, parse, prefill_body
from minivllm.entrypoints.proxy.settings import ProxyArgs
from minivllm.logger import init_logger

logger = init_logger(__name__)
SECONDS_TO_CONNECT = 5.0
SECONDS_KEPT_ALIVE = 2.0
"""How long an idle connection to a server is used again: less than the 5 s after which uvicorn
closes it.
"""
SECONDS_TO_SAY_HEALTHY = 5.0
LOST_AFTER = 3
"""After this many checks of its health in a row have timed out, a server counts as lost."""
NO_ANSWER = (aiohttp.ClientError, TimeoutError, OSError)
NO_CONNECTION = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
"""The server was not sent anything."""
NOT_PASSED = {
    "connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "date", "server", "content-length",
}  # fmt: skip
"""Headers of a connection, not of a reply, and those that every server writes itself."""


class Upstream:
    """A server behind the proxy. `trouble` is the reason why it gets no requests now, or None."""

    def __init__(self, role: str, url: str) -> None:
        self.role = role
        self.url = url.rstrip("/")
        self.trouble: str | None = None
        self.num_late = 0
        """How many checks of its health in a row have timed out."""
        self.session = _session()
        self.streams: set[aiohttp.StreamReader] = set()

    async def cut_off(self) -> None:
        """End all requests that wait for this server: they fail with one of the errors in
        `NO_ANSWER`.
        """
        for stream in self.streams:
            # Closing the session alone would leave readers of open streams waiting.
            stream.set_exception(aiohttp.ServerDisconnectedError())
        # A new session first, so that the next request does not meet a closed one.
        before, self.session = self.session, _session()
        await before.close()

    async def check_health(self) -> None:
        """Check the server's health. A server that answers late may only be busy, so it keeps its
        requests for a few checks.
        """
        try:
            async with asyncio.timeout(SECONDS_TO_SAY_HEALTHY), self.session.get(f"{self.url}/health") as reply:
                self.num_late = 0
                self.note(None if reply.status == 200 else f"its /health says {reply.status}")
        except TimeoutError:
            self.num_late += 1
            if self.num_late >= LOST_AFTER:
                self.note(f"its /health has not answered within {SECONDS_TO_SAY_HEALTHY:g} s")
                await self.cut_off()
        except NO_ANSWER as error:
            self.note(str(error) or type(error).__name__)

    def note(self, trouble: str | None) -> None:
        """Record why the server gets no requests, or None if it does."""
        if (trouble is None) != (self.trouble is None):
            words = "answers again" if trouble is None else f"is unavailable: {trouble}"
            logger.warning("The %s server %s %s", self.role, self.url, words)
        self.trouble = trouble


class Proxy:
    """The servers behind the proxy. Call `start` and `close` in the event loop that serves."""

    dead_error = None

    def __init__(self, settings: ProxyArgs) -> None:
        self.settings = settings
        self.state = ServerState()
        self.servers: list[Upstream] = []
        self._stopped = False
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Check each server's health now and at regular intervals."""
        self.servers = [Upstream(role, url) for role in ("prefill", "decode") for url in getattr(self.settings, role)]
        # Before the first request comes, so that it does not meet a server that is down.
        await asyncio.gather(*(server.check_health() for server in self.servers))
        self._tasks = [asyncio.create_task(self._watch(server)) for server in self.servers]

    async def close(self) -> None:
        """Close all connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, *(server.session.close() for server in self.servers), return_exceptions=True)

    async def wait_until_dead(self) -> None:
        """Never return: servers may come back."""
        await asyncio.Event().wait()

    def end_requests(self) -> None:
        """End unfinished requests with an error."""
        self._stopped = True
        self._tasks += [asyncio.create_task(server.cut_off()) for server in self.servers]

    @property
    def is_healthy(self) -> bool:
        """Return whether at least one server of each kind is available."""
        return len({server.role for server in self.servers if server.trouble is None}) == 2

    async def answer(self, path: str, content: bytes, headers: Mapping[str, str]) -> Response:
        """Return the reply to a client's request: a decode server's, or another server's refusal.

        Raises:
            MinivllmError: the request is malformed.
            RequestError: no server answers.
        """
        body = parse(content)
        passed = headers_for_servers(headers)
        if has_two_steps(body):
            reply = await self.ask("prefill", path, prefill_body(body), passed)
            # A refusal is the client's to read; the decode server would refuse the same request.
            if reply.status_code != 200:
                return reply
            if params := kept_params(bytes(reply.body)):
                body["kv_transfer_params"] = params
        return await self.ask("decode", path, body, passed)

    async def ask(self, role: str, path: str, body: Body | None, headers: Mapping[str, str]) -> Response:
        """Send a request, a GET if it has no body, to the servers of one kind in turn until one
        accepts or refuses it; if one refuses, all would.

        A decode server that received the request may have fetched the keys and values, which exist
        only once: no other server is tried then, unless this one says that it has not begun (503).
        """
        last: Response | None = None
        for upstream in self._in_turn(role):
            try:
                last = await self._reply_of(upstream, path, body, headers)
            except NO_ANSWER as error:
                if self._stopped:
                    break
                upstream.note(str(error) or type(error).__name__)
                if role == "decode" and not isinstance(error, NO_CONNECTION):
                    message = "the decode server has not answered; the request may be sent again"
                    raise RequestError(message, 502) from None
                continue
            if last.status_code < 500 or (role == "decode" and last.status_code != 503):
                return last
        if last is None or self._stopped:
            raise self._stopping() or RequestError(f"no {role} server answers; try again later", 503)
        return last

    async def _reply_of(self, upstream: Upstream, path: str, body: Body | None, headers: Mapping[str, str]) -> Response:
        method = "GET" if body is None else "POST"
        reply = await upstream.session.request(method, upstream.url + path, json=body, headers=headers)
        passed = {name: value for name, value in reply.headers.items() if name.lower() not in NOT_PASSED}
        if reply.content_type != "text/event-stream":
            async with reply:  # which closes the connection if the client leaves
                return Response(await reply.read(), reply.status, passed)
        stream = EventStream(self._forwarded(upstream, reply), reply.close)
        stream.headers.update(passed)
        return stream

    async def _forwarded(self, upstream: Upstream, reply: aiohttp.ClientResponse) -> AsyncGenerator[bytes, None]:
        """Yield a stream byte for byte; if it breaks off, end it with an error event and [DONE]."""
        upstream.streams.add(reply.content)
        try:
            async for piece in reply.content.iter_any():
                yield piece
        except NO_ANSWER:
            error = self._stopping() or RequestError("the decode server has ended before the end of its answer", 502)
            # The last piece may have ended in the middle of an event, which a blank line ends.
            yield b"\n\n%bdata: [DONE]\n\n" % as_event(error_body(error))
        finally:
            upstream.streams.discard(reply.content)

    def _in_turn(self, role: str) -> Sequence[Upstream]:
        """Return the available servers in order of their turns, and move the first to the end of
        the rotation.
        """
        healthy = [server for server in self.servers if server.role == role and server.trouble is None]
        if healthy:
            self.servers.remove(healthy[0])
            self.servers.append(healthy[0])
        return healthy

    def _stopping(self) -> RequestError | None:
        return RequestError("the server is shutting down", 503) if self._stopped else None

    async def _watch(self, upstream: Upstream) -> None:
        while True:
            await asyncio.sleep(self.settings.health_interval)
            await upstream.check_health()


def _session() -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=SECONDS_KEPT_ALIVE)
    # An answer may take as long as it takes to generate; only connecting is limited.
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=SECONDS_TO_CONNECT)
    # A compressed reply could not be cut into events.
    as_it_is = {"Accept-Encoding": "identity"}
    return aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False, headers=as_it_is)


def headers_for_servers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers for both servers: the same id, so that their logs can be matched, and the
    client's key.
    """
    passed = {"X-Request-Id": headers.get("x-request-id") or str(uuid.uuid4())}
    if "authorization" in headers:
        passed["Authorization"] = headers["authorization"]
    return passed
