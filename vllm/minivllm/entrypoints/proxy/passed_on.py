"""A decode server's stream on its way to the client."""

from collections.abc import Callable

import aiohttp
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from minivllm.entrypoints.openai.errors import RequestError, error_response
from minivllm.entrypoints.openai.stream import disconnected, until_disconnected
from minivllm.entrypoints.proxy.metrics import Turn

NOT_PASSED = {
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding",
    "upgrade", "date", "server", "content-length",
}  # fmt: skip
"""Headers of a connection, not of a reply, and those that every server writes itself."""
END_OF_EVENT = b"\n\n"


def passed_headers(reply: aiohttp.ClientResponse) -> dict[str, str]:
    """Return the headers of a server's reply that the client gets."""
    return {name: value for name, value in reply.headers.items() if name.lower() not in NOT_PASSED}


class PassedOn(Response):
    """Server-sent events, byte for byte as they come.

    When the server ends before its answer does, the client is told so by an event of the proxy's, and then [DONE]. When
    the client leaves, the connection to the server is closed.
    """

    def __init__(self, reply: aiohttp.ClientResponse, turn: Turn, last_words: Callable[[], RequestError]) -> None:
        self._reply = reply
        self._turn = turn
        self._last_words = last_words
        super().__init__(status_code=reply.status, headers=passed_headers(reply))
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends what comes."""
        outcome, self._turn.outcome = self._turn.outcome, "left"
        try:
            is_whole = await until_disconnected(self._send(send), disconnected(receive))
            if is_whole is not None:
                self._turn.outcome = outcome if is_whole else "failed"
                self._turn.observe("decode")
        finally:
            self._reply.close()
            self._turn.end()

    async def _send(self, send: Send) -> bool:
        """Sends it; returns whether it came to its end."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        before, is_whole = END_OF_EVENT, True
        try:
            async with self._turn.upstream.patience():
                async for piece in self._reply.content.iter_any():
                    before = (before + piece)[-len(END_OF_EVENT) :]
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
        except (aiohttp.ClientError, TimeoutError, OSError):
            is_whole = False
            ended = b"" if before == END_OF_EVENT else END_OF_EVENT
            error = error_response(self._last_words()).model_dump_json()
            words = ended + f"data: {error}\n\ndata: [DONE]\n\n".encode()
            await send({"type": "http.response.body", "body": words, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return is_whole
