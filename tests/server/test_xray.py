"""`/xray` on a server: off unless asked for, its events behind the key, and a file of all steps."""

import asyncio
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from server.serving import Server, running

from minivllm.core.step_events import FORMAT, HeaderLine
from minivllm.engine.arg_utils import EngineArgs
from minivllm.entrypoints.openai.settings import FrontendArgs
from minivllm.entrypoints.xray.page import page
from minivllm.entrypoints.xray.recorder import RecordingFile, StepRing
from minivllm.entrypoints.xray.routes import add_xray, headers_for, step_events
from minivllm.errors import MinivllmError
from minivllm_lab.step_recording import MOST_BYTES, replay

pytestmark = pytest.mark.usefixtures("warm_processes")
SECRET = "def zebra_crossing(umbrella):"


def lines_of(server: Server) -> Iterator[dict]:
    """The lines as they come."""
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


def test_a_request_is_seen_by_its_id_and_lengths_and_not_by_its_text(chat: Server) -> None:
    lines = lines_of(chat)
    assert next(lines) == {"xray": FORMAT, "model": "tiny-python"}
    assert next(lines)["num_blocks"] == 600
    body = {"prompt": SECRET, "max_tokens": 5, "ignore_eos": True, "request_id": "crossing"}
    usage = chat.client.post("/v1/completions", json=body).json()["usage"]
    seen, number = [], None
    for line in lines:
        seen.append(json.dumps(line))
        for one, request_id, prompt, max_tokens, _ in line.get("named", []):
            if "crossing" in request_id:
                number = one
                assert (prompt, max_tokens) == (usage["prompt_tokens"], 5)
        if any(one == number for one, _ in line.get("ended", [])):
            break
    assert "zebra" not in "".join(seen)
    assert len(seen) >= 5


def test_all_steps_are_in_the_file(chat: Server, recording: Path) -> None:
    chat.client.post("/v1/completions", json={"prompt": SECRET, "max_tokens": 5, "ignore_eos": True})
    *_, last = replay(recording)
    assert last.step >= 5
    assert not last.requests
    assert last.num_blocks == 600
    assert b"zebra" not in recording.read_bytes()


def test_a_recording_is_whole_when_the_server_is_stopped(tmp_path: Path) -> None:
    """Its last line tells of the requests that were under way."""
    path = tmp_path / "run.jsonl"
    body = {"prompt": "x", "max_tokens": 490, "ignore_eos": True, "stream": True}
    with running("--record", str(path)) as server:
        with server.client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            for _ in range(20):
                next(lines)
            server.process.send_signal(signal.SIGTERM)
            for _ in lines:
                pass
        server.process.wait(20)
    *_, last = replay(path)
    assert last.step >= 10
    assert last.requests == {}


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(MinivllmError, match=r"cannot record to .*missing.*No such file"):
        RecordingFile(tmp_path / "missing" / "file", HeaderLine(xray=FORMAT))


def test_a_recording_ends_where_readers_would_refuse_it(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with RecordingFile(path, HeaderLine(xray=FORMAT), most_bytes=89) as file:
        for _ in range(9):
            file.write([b"x" * 29])
    assert path.read_bytes() == b'{"xray":1}\n' + (b"x" * 29 + b"\n") * 2
    assert RecordingFile.__init__.__defaults__ == (MOST_BYTES,)


def test_a_ring_keeps_the_last_steps_from_a_key_on() -> None:
    ring = StepRing(most_lines=10)
    for index in range(100):
        ring.put([b'{"key":%d}' % index] if index % 4 == 0 else [b'{"step":%d}' % index])
    end, kept = ring.read(0)
    assert end == 100
    assert kept[0].startswith(b'{"key"')
    assert 10 <= len(kept) <= 14
    assert ring.read(97) == (100, [b'{"step":97}', b'{"step":98}', b'{"step":99}'])
    assert ring.read(5000)[1] == kept, "a reader of another ring gets all"


def test_a_ring_keeps_no_more_bytes_than_it_may() -> None:
    ring = StepRing(most_lines=1000, most_bytes=300)
    for _ in range(50):
        ring.put([b'{"key":1}', b"x" * 91])
    assert sum(map(len, ring.read(0)[1])) <= 300


def test_events_catch_up_then_follow_and_end_with_the_engine() -> None:
    class Engine:
        errored = False

    async def run() -> list[str]:
        ring, engine, got = StepRing(), Engine(), []
        ring.put([b'{"key":0}', b'{"step":1}'])
        async for event in step_events(ring, HeaderLine(xray=FORMAT), engine):
            got.append(event)
            if len(got) == 2:
                asyncio.get_running_loop().call_later(0.1, ring.put, [b'{"step":2}'])
            engine.errored = len(got) == 3
        return got

    assert asyncio.run(run()) == [
        'data: {"xray":1}\n\n',
        'data: {"key":0}\ndata: {"step":1}\n\n',
        'data: {"step":2}\n\n',
    ]


def test_each_core_has_its_events() -> None:
    class Engine:
        errored = True

    async def get(query: str) -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
            return await client.get(f"/xray/events{query}")

    headers = headers_for(FrontendArgs(), EngineArgs(data_parallel_size=2, multiprocess=True))
    app = FastAPI()
    add_xray(app, [StepRing(), StepRing()], headers, Engine())
    for query, core in (("", 0), ("?core=0", 0), ("?core=1", 1)):
        line = json.loads(asyncio.run(get(query)).text.removeprefix("data: "))
        assert (line.get("core", 0), line["cores"]) == (core, 2)
    assert asyncio.run(get("?core=2")).status_code == 422


def test_the_page_holds_its_script_as_its_policy_says() -> None:
    html, policy = page()
    assert "{{" not in html
    assert html.count("<script") == 1
    assert "sha256-" in policy
    assert "unsafe-inline'; connect-src" in policy
