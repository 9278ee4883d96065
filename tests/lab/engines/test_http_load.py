"""Requests one after another while chats are running: the order, the tokens, and chats that end
early.
"""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
from patience import eventually

from minivllm.errors import MinivllmError
from minivllm_lab.engines.http_load import Answer, Ask, ask, load_beside

LAST = 10_000


class Streamer:
    """A server that streams `max_tokens` events, the tokens 0, 1, 2 …, one per millisecond, and
    records which clients left early.
    """

    def __init__(self) -> None:
        self.left: list[str] = []

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        size = int(head.lower().split(b"content-length:")[1].split()[0])
        body = json.loads(await reader.readexactly(size))
        try:
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            for token in range(body["max_tokens"]):
                writer.write(b"data: " + json.dumps({"choices": [{"token_ids": [token]}]}).encode() + b"\n\n")
                await writer.drain()
                await asyncio.sleep(0.001)
            writer.write(b'data: {"choices": [], "usage": {}}\n\ndata: [DONE]\n\n')
            await writer.drain()
        except ConnectionError:
            self.left.append(body["name"])
        writer.close()


@contextmanager
def streaming() -> Iterator[tuple[int, Streamer]]:
    """Run the server in a thread; yield its port and the server."""
    loop, streamer = asyncio.new_event_loop(), Streamer()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    starting = asyncio.run_coroutine_threadsafe(asyncio.start_server(streamer.handle, "127.0.0.1", 0), loop)
    try:
        yield starting.result(10).sockets[0].getsockname()[1], streamer
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)


def asks(name: str, count: int, tokens: int) -> list[Ask]:
    return [Ask({"name": f"{name} {i}", "max_tokens": tokens, "return_token_ids": True}) for i in range(count)]


def test_the_others_come_one_after_another_among_chats_that_then_leave():
    with streaming() as (port, streamer):
        chats, answers = load_beside(port, asks("chat", 2, LAST), asks("long", 3, 5), quiet=10)
        assert eventually(lambda: len(streamer.left) == 2, pause=0.01)
    assert sorted(streamer.left) == ["chat 0", "chat 1"]
    assert [answer.token_ids for answer in answers] == [[0, 1, 2, 3, 4]] * 3
    for chat in chats:
        assert chat.token_ids == list(range(len(chat.token_ids))), "what a chat had got when it left is kept"
        assert alone(chat, 0.0, answers[0].sent) >= 10
        for before, after in pairwise(answers):
            assert alone(chat, before.events[-1], after.sent) >= 10
        assert alone(chat, answers[-1].events[-1], float("inf")) >= 10


def test_bursts_come_at_once():
    with streaming() as (port, _):
        _, answers = load_beside(port, asks("chat", 1, LAST), asks("long", 5, 40), quiet=3, burst=2)
    pairs = [answers[:2], answers[2:4], answers[4:]]
    for together in pairs[:2]:
        assert max(answer.sent for answer in together) < min(answer.events[-1] for answer in together)
    for before, after in pairwise(pairs):
        assert max(answer.events[-1] for answer in before) < min(answer.sent for answer in after)


def alone(chat: Answer, begin: float, end: float) -> int:
    """Count a chat's events between these times."""
    return sum(begin <= event <= end for event in chat.events)


def test_a_chat_that_ends_before_the_others_are_answered():
    with streaming() as (port, _), pytest.raises(MinivllmError, match=r"1 of 2 .* must be longer"):
        load_beside(port, asks("chat", 1, 12), asks("long", 1, 3), quiet=10)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            b'HTTP/1.1 503 Service Unavailable\r\nserver: x\r\n\r\n{"error":\n"full"}',
            '503 Service Unavailable: {"error": "full"}',
        ),
        (b"", "no answer"),
    ],
    ids=["a refusal", "nothing"],
)
def test_a_refusal_is_told_in_one_line(said, told):
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(said)
        writer.close()

    async def asked() -> Answer:
        async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
            return await ask(server.sockets[0].getsockname()[1], "/v1/completions", {}, 0.0)

    assert asyncio.run(asked()).failed == f"ConnectionError: {told}"
