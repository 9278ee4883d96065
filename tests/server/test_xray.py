"""`/xray` on a server: off unless requested, with its events behind the key."""

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import httpx
import pytest
from e2e.xray_run import Alive
from server.serving import Server

from minivllm.engine.step_recorder import FORMAT
from minivllm.entrypoints.xray.page import page
from minivllm.entrypoints.xray.routes import MOST_UNSENT, StepFeed

pytestmark = pytest.mark.usefixtures("warm_processes")
SECRET = "def zebra_crossing(umbrella):"


def lines_of(server: Server) -> Iterator[dict]:
    """Yield the events as they arrive."""
    with server.client.stream("GET", "/xray/events") as stream:
        assert stream.status_code == 200
        for line in stream.iter_lines():
            if line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))


def test_there_is_no_xray_unless_it_is_asked_for(base: Server) -> None:
    for path in ("/xray", "/xray/events"):
        answer = base.client.get(path)
        assert (answer.status_code, answer.json()) == (404, {"detail": "Not Found"})


def test_the_page_needs_nothing_from_elsewhere_and_no_key(chat: Server) -> None:
    answer = httpx.get(f"{chat.url}/xray")
    assert answer.status_code == 200
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "http://" not in answer.text
    assert "https://" not in answer.text


def test_the_events_ask_for_a_key(chat: Server) -> None:
    assert httpx.get(f"{chat.url}/xray/events").status_code == 401
    assert httpx.get(f"{chat.url}/xray/events", headers={"Authorization": "Bearer wrong"}).status_code == 401
    assert chat.client.get("/xray/recorded").text.startswith('{"xray"')


def test_a_request_is_seen_by_its_id_and_lengths_and_not_by_its_text(chat: Server) -> None:
    lines = lines_of(chat)
    assert next(lines) == {"xray": FORMAT, "model": "tiny-python", "core": 0, "cores": 1}
    assert next(lines)["num_blocks"] == 600, "the state comes at once, though nothing runs"
    body = {"prompt": SECRET, "max_tokens": 5, "ignore_eos": True, "request_id": "crossing"}
    usage = chat.client.post("/v1/completions", json=body).json()["usage"]
    seen, text = [], ""
    while not seen or seen[-1]["running"]:
        line = next(lines)
        text += json.dumps(line)
        seen += [line] if seen or line["running"] else []
    (request,) = seen[0]["running"]
    assert "crossing" in request["id"]
    assert (request["prompt"], request["max"]) == (usage["prompt_tokens"], 5)
    assert len(seen) == 5
    assert "zebra" not in text


def test_steps_are_described_only_while_a_page_is_open() -> None:
    engine: Any = Alive(2)
    feed = StepFeed(engine, "m")

    async def run() -> None:
        pages = [feed.events(core) for core in (0, 1)]
        waits = [await begin(page) for page in pages]
        assert engine.pages == 2
        feed.put(1, '{"step":1}')
        assert await waits[1] == b'data: {"step":1}\n\n'
        assert not waits[0].done(), "it shows the other core"
        engine.errored = True
        assert await waits[0] == b": ping\n\n"
        assert [event async for event in pages[0]] == [], "the stream ends with the engine"
        assert engine.pages == 2
        await pages[1].aclose()
        await asyncio.sleep(0)
        assert engine.pages == 0

    asyncio.run(run())


async def begin(page: AsyncGenerator[bytes, None]) -> asyncio.Task[bytes]:
    """Read the header; return a task that waits for the next event."""
    assert json.loads((await anext(page)).removeprefix(b"data: "))["xray"] == FORMAT
    waiting = asyncio.ensure_future(anext(page))
    await asyncio.sleep(0)
    return waiting


def test_a_page_that_reads_slowly_gets_the_last_steps() -> None:
    engine: Any = Alive(2)
    feed = StepFeed(engine, "m")

    async def run() -> list[bytes]:
        page = feed.events(0)
        waiting = await begin(page)
        for step in range(MOST_UNSENT + 50):
            feed.put(0, str(step))
        got = [await waiting] + [await anext(page) for _ in range(MOST_UNSENT - 1)]
        await page.aclose()
        return got

    assert asyncio.run(run())[-1] == b"data: %d\n\n" % (MOST_UNSENT + 49)


def test_the_page_holds_its_script_as_its_policy_says() -> None:
    html, policy = page()
    assert "{{" not in html
    assert html.count("<script") == 1
    assert "sha256-" in policy
    assert "unsafe-inline'; connect-src" in policy
