"""Lesson 06's clients that break a naive server: one does not read, others leave."""

from __future__ import annotations

import argparse
import socket
import time
from collections.abc import Mapping
from typing import Any

from minivllm.engine.core import EngineCore
from minivllm_lab.engines.http_load import Ask, answers_of, post, start_load
from minivllm_lab.serving.loads import prompts, sizes, to_lesson
from minivllm_lab.tables import heading, record_table

NUM_LEAVING, TOKENS_OF_LEAVING = 6, 200


class RawClient:
    """A connection that reads only on request; the operating system buffers only a few bytes for
    it.
    """

    def __init__(self, port: int, body: dict[str, Any]) -> None:
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        self.socket.connect(("127.0.0.1", port))
        self.socket.sendall(post("/", body))

    def read_events(self, number: int | None = None) -> int:
        """Read to the end, or until `number` events have arrived; return how many did."""
        seen, text = 0, b""
        while (number is None or seen < number) and (text := self.socket.recv(1 << 16)):
            seen += text.count(b"data: ")
        return seen


def measure_slow_client(servers: Mapping[str, tuple[int, Any]], arguments: argparse.Namespace) -> dict:
    """Serve four clients and one that asks for 400 tokens but reads only when nothing has moved for
    a while.
    """
    heading("3. Break the naive server")
    results, seconds = {}, sizes(arguments).seconds_unread
    slow, *others = prompts(5, seed=2)
    for name, (port, server) in servers.items():
        core = core_of(server)
        process = start_load(port, [Ask(to_lesson(token_ids, 200)) for token_ids in others], clients=4)
        while process.poll() is None and len(core.scheduler.requests) < 4:
            time.sleep(0.001)
        client = RawClient(port, to_lesson(slow, 400))
        _wait_until_still(core, seconds)
        events = client.read_events()
        gap = max(gap for answer in answers_of(process) for gap in answer.itls)
        client.socket.close()
        results[name] = {"longest_gap_ms": 1e3 * gap, "events": events, "gap": gap}
    title = f"A client that reads nothing until nothing has moved for {seconds:g} s, among four others"
    columns = "server {name} | the others' longest gap, ms {gap:ms} | events with its 400 tokens {events}"
    record_table(title, results, columns)
    return {"unread_seconds": seconds, "servers": results}


def _wait_until_still(core: EngineCore, seconds: float) -> None:
    """Wait until the core has computed nothing for this many seconds."""
    before, since = -1, time.monotonic()
    while time.monotonic() < since + seconds:
        computed = sum(request.num_computed_tokens for request in list(core.scheduler.requests.values()))
        if computed != before:
            before, since = computed, time.monotonic()
        time.sleep(0.01)


def measure_leaving(servers: Mapping[str, tuple[int, Any]]) -> dict:
    """Let clients leave after their third event; count the tokens computed in vain and the blocks
    held meanwhile.
    """
    results = {}
    for name, (port, server) in servers.items():
        core, before = core_of(server), server.unread
        bodies = [to_lesson(token_ids, TOKENS_OF_LEAVING) for token_ids in prompts(NUM_LEAVING, seed=3)]
        clients = [RawClient(port, body) for body in bodies]
        for client in clients:
            client.read_events(3)
        for client in clients:
            client.socket.close()
        most = blocks = held(core)
        while blocks:
            time.sleep(0.005)
            blocks = held(core)
            most = max(most, blocks)
        results[name] = {"in_vain": server.unread - before, "most_blocks": most}
    title = f"\n{NUM_LEAVING} clients ask for {TOKENS_OF_LEAVING} tokens each, and leave after three"
    columns = "server {name} | tokens in vain {in_vain:,} | most unused blocks {most_blocks}"
    record_table(title, results, columns)
    return results


def core_of(server: Any) -> EngineCore:
    """Return the core of one of the lesson's servers, which runs in this process."""
    return getattr(server.core, "core", server.core)


def held(core: EngineCore) -> int:
    """Count the blocks that requests hold."""
    pool = core.scheduler.kv_cache_manager.block_pool
    return pool.num_usable_blocks - pool.get_num_free_blocks()
