"""Test clients that leave, read slowly, send nonsense or arrive in crowds."""

import asyncio
import contextlib
import json
import random
import socket
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from patience import eventually, reaches
from server.conftest import KEYS
from server.serving import Server, events_of, refusal

PROMPT = "def add(a, b):\n    return"
LONG = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "temperature": 0}
JSON = {"Content-Type": "application/json"}
COMPLETIONS = "/v1/completions"


def request_bytes(body: bytes, *further: str, length: int | None = None) -> bytes:
    lines = (f"POST {COMPLETIONS} HTTP/1.1", "Host: x", "Content-Type: application/json", *further)
    return "\r\n".join((*lines, f"Content-Length: {length or len(body)}", "", "")).encode() + body


def raw_request(server: Server, body: bytes, *further: str, length: int | None = None) -> socket.socket:
    """Open a connection and send this request, without reading anything."""
    connection = socket.create_connection(("127.0.0.1", server.port), 20)
    connection.sendall(request_bytes(body, *further, length=length))
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_blocks(base: Server, stream: bool):
    aborted = base.num_aborted()
    many_seconds = LONG | {"stream": stream, "n": 64, "temperature": 1}  # or it might be over before it is seen to run
    connection = raw_request(base, json.dumps(many_seconds).encode())
    assert eventually(lambda: base.metric("vllm:num_requests_running") > 0)
    connection.close()
    assert eventually(base.is_idle)
    assert base.num_aborted() >= aborted + 1
    assert base.client.get("/load").json() == {"server_load": 0}


def test_a_client_that_reads_slowly_holds_up_nobody_and_loses_nothing(base: Server):
    slow = raw_request(base, json.dumps(LONG | {"stream": True, "logprobs": 5}).encode(), "Connection: close")
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
    first = slow.recv(1)
    quick = base.client.post(COMPLETIONS, json=LONG).json()
    read = first + b"".join(iter(lambda: slow.recv(65536), b""))
    slow.close()
    assert "".join(event["choices"][0]["text"] for event in events_of(read.decode())) == quick["choices"][0]["text"]
    assert b"data: [DONE]" in read


def test_a_crowd_of_which_a_third_leaves(base: Server):
    """Half of the clients stream, and a third leaves before or after receiving anything."""
    chance = random.Random(7)

    async def visit(index: int, leaves: bool, seconds: float) -> bytes | None:
        body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "stream": bool(index % 2)}
        if leaves:
            body |= {"max_tokens": 400, "ignore_eos": True}
        reader, writer = await asyncio.open_connection("127.0.0.1", base.port)
        writer.write(request_bytes(json.dumps(body).encode(), "Connection: close"))
        try:
            if leaves:
                await asyncio.sleep(seconds)
                writer.transport.abort()
                return None
            return await reader.read()
        finally:
            writer.close()

    async def all_of_them() -> list[bytes | None]:
        visitors = [(index, chance.random() < 1 / 3, chance.uniform(0, 1.0)) for index in range(90)]
        return await asyncio.gather(*(visit(*visitor) for visitor in visitors))

    answers = [answer for answer in asyncio.run(all_of_them()) if answer is not None]
    assert 45 < len(answers) < 75
    assert all(answer.startswith(b"HTTP/1.1 200 OK") for answer in answers)
    streams = [answer for answer in answers if b"text/event-stream" in answer]
    assert len(streams) > 15
    assert all(b"data: [DONE]" in stream for stream in streams)
    assert eventually(base.is_idle)


DEEP = b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
NONSENSE = {
    "empty": b"", "not JSON": b"{", "not UTF-8": b'{"prompt": "\xff\xfe"}',
    "half a character": b'{"prompt": "\\ud800", "max_tokens": 1}', "deep": DEEP,
    "a huge number": b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
    "not a number": b'{"prompt": "a", "temperature": NaN}',
    "infinite": b'{"prompt": "a", "temperature": 1, "top_p": Infinity, "n": 2}',
    "a token beyond 64 bits": b'{"prompt": [99999999999999999999999]}', "empty texts": b'{"prompt": ["", ""]}',
    "an empty stop string": b'{"prompt": "a", "stop": [""]}',
    "many prompts": b'{"prompt": ' + json.dumps(["a"] * 20_000).encode() + b"}",
    "n beyond all": b'{"prompt": ["a", "b"], "n": 16384, "temperature": 1}',
    "a transfer": b'{"prompt": "a", "kv_transfer_params": {"do_remote_prefill": true}}',
}  # fmt: skip


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_is_a_400(base: Server, name: str):
    reply = base.client.post(COMPLETIONS, content=NONSENSE[name], headers=JSON)
    assert reply.status_code == 400, reply.text[:300]
    assert reply.json()["error"]["code"] == 400
    assert len(reply.content) < 20_000
    assert base.client.get("/health").status_code == 200


def test_a_name_that_is_no_text_is_quoted_readably(base: Server):
    reply = base.client.post(COMPLETIONS, content=b'{"prompt": "a", "model": "\\ud800"}', headers=JSON)
    assert reply.status_code == 404
    assert "ud800" in reply.json()["error"]["message"]


@pytest.mark.parametrize("headers", [{}, {"Content-Type": "text/plain"}, {"Content-Type": "multipart/form-data"}])
def test_a_body_must_say_that_it_is_json(base: Server, headers: dict[str, str]):
    reply = base.client.post(COMPLETIONS, content=b'{"prompt": "a"}', headers=headers)
    assert refusal(reply)[:2] == (400, "Bad Request")


def test_values_are_counted_in_utf_8_alone(base: Server):
    body = json.dumps({"x": '"', "prompt": [1] * 300_000})
    for encoding in ("utf-8", "utf-16", "utf-32-be"):
        assert base.client.post(COMPLETIONS, content=body.encode(encoding), headers=JSON).status_code == 413
    small = json.dumps(LONG | {"max_tokens": 1}).encode("utf-16")
    assert base.client.post(COMPLETIONS, content=small, headers=JSON).status_code == 200


def test_a_huge_body_is_refused_before_it_is_read(base: Server):
    with raw_request(base, b"", length=104857600) as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 413")
    pieces = (b" " * 2**20 for _ in range(40))
    assert base.client.post(COMPLETIONS, content=pieces, headers=JSON).status_code == 413


def test_many_wait_and_all_are_answered(base: Server):
    """One request has more prompts than the engine computes at the same time."""
    body = {"prompt": [[index + 1] for index in range(300)], "max_tokens": 1, "temperature": 0}
    reply = base.client.post(COMPLETIONS, json=body).json()
    assert [choice["index"] for choice in reply["choices"]] == list(range(300))


def test_hundreds_wait_and_leave(base: Server):
    """The server answers other clients meanwhile, and drops these as soon as they are gone."""
    body = json.dumps(LONG | {"prompt": [[index + 1] for index in range(300)], "stream": True}).encode()
    anywhere = "vllm:(num_requests_running|num_requests_waiting|request_success_total)"
    before = base.metric(anywhere)  # on a slow machine the first have ended when the last are there
    with contextlib.ExitStack() as leaving:
        for _ in range(2):
            leaving.enter_context(raw_request(base, body))
        assert reaches(lambda: base.metric(anywhere), before + 600)
        assert base.metric("vllm:num_requests_waiting") > 150
        assert base.client.get("/health").status_code == 200
        assert base.client.post("/tokenize", json={"prompt": "a"}).status_code == 200
    assert eventually(base.is_idle)
    assert base.client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1}).status_code == 200


PROMPTS = [PROMPT, "import os\n"]
CHAT = [{"role": "user", "content": PROMPT}]


@pytest.mark.parametrize(
    ("name", "path", "asked", "number"),
    [("base", "completions", {"prompt": PROMPTS}, 6), ("chat", "chat/completions", {"messages": CHAT}, 3)],
)
def test_choices_of_n_are_numbered_by_prompt_and_seeded_one_by_one(name, path, asked, number, request):
    """A stream and a whole reply say the same."""
    server: Server = request.getfixturevalue(name)
    body = asked | {"n": 3, "seed": 5, "max_tokens": 6, "temperature": 1.0}
    whole = server.client.post(f"/v1/{path}", json=body).json()["choices"]
    assert [choice["index"] for choice in whole] == list(range(number))
    texts = [choice.get("text") or choice["message"]["content"] for choice in whole]
    assert len(set(texts)) > 1
    streamed, ends = [""] * number, []
    for choice in streamed_choices(server, path, body):
        streamed[choice["index"]] += choice.get("text") or choice.get("delta", {}).get("content") or ""
        ends += [choice["index"]] if choice["finish_reason"] else []
    assert streamed == texts
    assert sorted(ends) == list(range(number))


def streamed_choices(server: Server, path: str, body: dict) -> list[dict]:
    events = events_of(server.client.post(f"/v1/{path}", json=body | {"stream": True}).text)
    return [choice for event in events for choice in event["choices"]]


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ({"use_beam_search": True}, "use_beam_search"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"prompt": [5] * 513}, "input_tokens"),
        ({"prompt": [5] * 512}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ],
)
def test_what_would_change_the_answer_has_no_room_or_is_too_much_is_refused(base: Server, field: dict, param: str):
    reply = base.client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1} | field)
    assert refusal(reply) == (400, "BadRequestError", param)


def test_the_same_id_may_come_twice(base: Server):
    """A client that retries must not be told that its first attempt is still running."""

    def ask(_: int) -> httpx.Response:
        body, headers = LONG | {"max_tokens": 60}, {"X-Request-Id": "twin"}
        return httpx.post(f"{base.url}{COMPLETIONS}", json=body, headers=headers, timeout=60)

    with ThreadPoolExecutor(3) as threads:
        replies = [*threads.map(ask, range(3))]
    assert [(reply.status_code, reply.json()["id"]) for reply in replies] == [(200, "cmpl-twin")] * 3


def test_keys(chat: Server):
    with httpx.Client(base_url=chat.url) as stranger:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEYS[0]}):
            for path in ("/v1/models", "/v1/nope"):
                reply = stranger.get(path, headers=headers)
                assert (reply.status_code, reply.json()) == (401, {"error": "Unauthorized"})
        for path in ("/health", "/metrics", "/version", "/ping", "/load"):
            assert stranger.get(path).status_code == 200
        for key in KEYS:
            assert stranger.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200
    assert chat.client.post("/reset_prefix_cache").status_code == 404, "development mode is off"


URL = "http://127.0.0.1:1/"


@pytest.mark.parametrize("kind", ["image_url", "video_url", "input_audio", "file"])
def test_a_request_reaches_neither_files_nor_addresses(chat: Server, kind: str):
    part = {"type": kind, kind: {"url": URL, "data": URL, "file_data": URL}}
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "see"}, part]}], "max_tokens": 1}
    reply = chat.client.post("/v1/chat/completions", json=body)
    assert refusal(reply)[:2] == (400, "BadRequestError")
    assert "only text parts are served" in reply.json()["error"]["message"]


def test_a_chat_brings_no_template(chat: Server):
    reply = chat.client.post("/v1/chat/completions", json={"messages": CHAT, "chat_template": "{{ 1 }}"})
    assert refusal(reply) == (400, "BadRequestError", "chat_template")


def test_an_echo_in_a_stream_repeats_the_message_that_is_continued(chat: Server):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "def f(x):"}]
    body = {"messages": messages, "max_tokens": 3, "temperature": 0, "add_generation_prompt": False, "echo": True}
    choices = streamed_choices(chat, "chat/completions", body | {"continue_final_message": True, "top_logprobs": None})
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    alone = {"prompt": "### user\na\n### assistant\ndef f(x):", "max_tokens": 3, "temperature": 0}
    assert text == "def f(x):" + chat.client.post(COMPLETIONS, json=alone).json()["choices"][0]["text"]


def test_http_requests_are_counted_by_route_and_not_by_path(base: Server):
    def counted() -> list[float]:
        handlers = ("none", "/v1/models", "/health")
        return [base.metric("http_requests_total", f'handler="{handler}"') for handler in handlers]

    before = counted()
    base.client.get("/any/path")
    base.client.get("/v1/models")
    assert counted() == [before[0] + 1, before[1] + 1, 0]
