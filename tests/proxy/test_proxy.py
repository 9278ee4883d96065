"""The proxy in front of servers that only record: what each is sent, what the client gets, and what
happens if one fails.
"""

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from patience import PATIENCE, eventually
from proxy import fakes
from proxy.fakes import WHOLE, Fake, Setting, begins, completes, json_reply, never, prefills, proxied, until
from server.serving import answers, free_port

from minivllm.entrypoints.cli.main import main
from minivllm.entrypoints.proxy.bodies import ASK_TO_KEEP, prefill_body

GOLDEN = json.loads((Path(__file__).parent / "pd_exchanges.json").read_text())
BODY = {"model": "tiny-python", "prompt": "def add(a, b):", "temperature": 0, "max_tokens": 16}
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_completion_tokens": 9}


def test_the_bodies_are_those_that_vllm_was_sent():
    assert prefill_body(GOLDEN["plain on D"]["body"]) == GOLDEN["P"]["body"]


@proxied()
async def test_both_servers_are_sent_the_same_id_and_key_and_the_client_gets_the_decode_servers_bytes(cluster: Setting):
    headers = {"X-Request-Id": "req-1", "Authorization": "Bearer secret", "X-Other": "1"}
    assert await cluster.post(BODY, **headers) == (200, WHOLE)
    (to_prefill,), (to_decode,) = cluster.prefill[0].got, cluster.decode[0].got
    assert to_prefill.body == BODY | {"stream": False, "max_tokens": 1, "kv_transfer_params": ASK_TO_KEEP}
    assert to_decode.body == BODY | {"kv_transfer_params": fakes.PARAMS}
    for got in (to_prefill, to_decode):
        assert got.path == "/v1/completions"
        assert {"x-request-id": "req-1", "authorization": "Bearer secret"}.items() <= got.headers.items()
        assert got.headers["content-type"] == "application/json"
        assert "x-other" not in got.headers


@proxied()
async def test_without_an_id_both_get_the_same_new_one_and_no_key_and_models_are_the_decode_servers(cluster: Setting):
    for _ in range(2):
        await cluster.post(CHAT, "/v1/chat/completions")
    ids = [[got.headers["x-request-id"] for got in item.got] for item in (*cluster.prefill, *cluster.decode)]
    assert ids[0] == ids[1]
    assert len(set(ids[0])) == 2
    assert {got.path for got in cluster.decode[0].got} == {"/v1/chat/completions"}
    assert all("authorization" not in got.headers for got in cluster.prefill[0].got)
    assert cluster.prefill[0].got[0].body["max_completion_tokens"] == 1
    async with cluster.client.get(cluster.url + "/v1/models") as reply:
        assert (await reply.json())["data"][0]["id"] == cluster.decode[0].url


@pytest.mark.parametrize(
    ("further", "to_prefill"),
    [
        ({"stream": True, "stream_options": {"include_usage": True}}, {}),
        ({"min_tokens": 4}, {}),
        ({"n": 3, "temperature": 1}, {"n": 1, "temperature": 1}),
        ({"echo": True}, {"echo": True}),
        ({"logprobs": 2, "stop": ["\n"], "seed": 1}, {"logprobs": 2, "stop": ["\n"], "seed": 1}),
        ({"prompt": [[1, 2, 3]]}, {"prompt": [[1, 2, 3]]}),
        ({"prompt": [1, 2, 3]}, {"prompt": [1, 2, 3]}),
        ({"prompt": ["one"]}, {"prompt": ["one"]}),
    ],
)
@proxied()
async def test_what_the_prefill_server_is_asked_for(cluster: Setting, further: dict, to_prefill: dict):
    status, _ = await cluster.post(BODY | further)
    assert status == 200
    wanted = BODY | to_prefill | {"stream": False, "max_tokens": 1, "kv_transfer_params": ASK_TO_KEEP}
    assert cluster.prefill[0].got[0].body == wanted
    assert cluster.decode[0].got[0].body == BODY | further | {"kv_transfer_params": fakes.PARAMS}


@pytest.mark.parametrize(
    "further",
    [{"prompt": ["one", "two"]}, {"prompt": [[1], [2]]}, {"prompt_logprobs": 0}, {"echo": True, "logprobs": 0}],
)
@proxied()
async def test_the_decode_server_computes_alone_what_cannot_be_kept(cluster: Setting, further: dict[str, Any]):
    assert await cluster.post(BODY | further) == (200, WHOLE)
    assert cluster.prefill[0].got == []
    assert cluster.decode[0].got[0].body == BODY | further


@proxied(lambda: {"prefill": [Fake(json_reply({"kv_transfer_params": None}))]})
async def test_a_prefill_server_that_keeps_nothing_leaves_it_to_the_decode_server(cluster: Setting):
    assert await cluster.post(BODY) == (200, WHOLE)
    assert cluster.decode[0].got[0].body == BODY


@proxied()
async def test_a_stream_comes_byte_for_byte_and_at_once(cluster: Setting):
    pieces, whole = [], BODY | {"stream": True}
    async with cluster.client.post(cluster.url + "/v1/completions", json=whole) as reply:
        assert reply.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        async for piece in reply.content.iter_any():
            pieces.append(piece)
    assert b"".join(pieces) == b"".join(fakes.EVENTS)
    assert len(pieces) > 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "JSON object"),
        (b'{"prompt": "a", "kv_transfer_params": {"remote_host": "10.0.0.1"}}', "kv_transfer_params"),
    ],
)
@proxied()
async def test_nonsense_is_a_400_and_goes_to_nobody(cluster: Setting, content: bytes, words: str):
    headers = {"Content-Type": "application/json"}
    async with cluster.client.post(cluster.url + "/v1/completions", data=content, headers=headers) as reply:
        error = (await reply.json())["error"]
        assert (reply.status, error["code"], error["type"]) == (400, 400, "BadRequestError")
        assert words in error["message"]
    assert cluster.prefill[0].got == cluster.decode[0].got == []


# Failures, phase by phase


def error_of(content: bytes) -> tuple[int, str]:
    error = json.loads(content)["error"]
    assert "\n" not in error["message"]
    return error["code"], error["type"]


@proxied(lambda: {"prefill": [Fake(json_reply({"error": "its"}, 422)), Fake(prefills)]})
async def test_what_the_prefill_server_refuses_is_the_reply(cluster: Setting):
    assert await cluster.post(BODY) == (422, b'{"error": "its"}')
    assert [len(server.got) for server in cluster.prefill] == [1, 0]
    assert cluster.decode[0].got == []


@pytest.mark.parametrize("first", [fakes.dies, json_reply({}, 500), json_reply({}, 503)])
@proxied(lambda first: {"prefill": [Fake(first), Fake(prefills)]})
async def test_another_prefill_server_is_asked_where_one_fails(cluster: Setting, first):
    assert await cluster.post(BODY) == (200, WHOLE)
    assert [len(server.got) for server in cluster.prefill] == [1, 1]


@proxied(lambda: {"prefill": [Fake(json_reply({"of": 1}, 500)), Fake(json_reply({"of": 2}, 503))]})
async def test_the_last_prefill_servers_error_is_the_reply_where_all_fail(cluster: Setting):
    assert await cluster.post(BODY) == (503, b'{"of": 2}')


@proxied(lambda: {"prefill": [Fake(prefills, runs=False)]})
async def test_without_a_prefill_server_the_reply_is_a_503_in_openais_form(cluster: Setting):
    for _ in range(2):
        status, content = await cluster.post(BODY)
        assert (status, error_of(content)) == (503, (503, "ServiceUnavailableError"))
    async with cluster.client.get(cluster.url + "/health") as reply:
        assert reply.status == 503
    assert cluster.decode[0].got == []


@pytest.mark.parametrize("answer", [json_reply([1]), json_reply({"kv_transfer_params": [1]})])
@proxied(lambda answer: {"prefill": [Fake(answer)]})
async def test_a_prefill_server_that_answers_nonsense_is_a_502(cluster: Setting, answer):
    status, content = await cluster.post(BODY)
    assert (status, error_of(content)) == (502, (502, "BadGatewayError"))


@proxied(lambda: {"decode": [Fake(completes, runs=False), Fake(json_reply({}, 503)), Fake(completes)]})
async def test_another_decode_server_is_asked_where_one_is_gone_or_full(cluster: Setting):
    for server in cluster.proxy.servers:
        server.trouble = None  # as if it had died a moment ago
    assert await cluster.post(BODY) == (200, WHOLE)
    assert [len(server.got) for server in cluster.decode] == [0, 1, 1]
    assert len(cluster.prefill[0].got) == 1  # what it keeps was fetched by nobody, so it is asked once
    assert cluster.decode[2].got[0].body["kv_transfer_params"] == fakes.PARAMS


@proxied(lambda: {"decode": [Fake(fakes.dies), Fake(completes)]})
async def test_a_decode_server_that_dies_with_the_request_is_a_502_and_no_other_is_asked(cluster: Setting):
    status, content = await cluster.post(BODY)
    assert (status, error_of(content)) == (502, (502, "BadGatewayError"))
    assert [len(server.got) for server in cluster.decode] == [1, 0]
    assert await cluster.post(BODY) == (200, WHOLE)  # and until it is seen to be healthy, the other one is asked
    assert [len(server.got) for server in cluster.decode] == [1, 1]


@pytest.mark.parametrize("status", [400, 500])
@proxied(lambda status: {"decode": [Fake(json_reply({"error": "its"}, status))]})
async def test_what_the_decode_server_answers_is_the_reply(cluster: Setting, status: int):
    assert await cluster.post(BODY | {"stream": True}) == (status, b'{"error": "its"}')


@proxied(lambda: {"decode": [Fake(fakes.breaks_off)]})
async def test_a_stream_that_breaks_off_ends_with_an_error_and_done(cluster: Setting):
    status, content = await cluster.post(BODY | {"stream": True})
    *_, broken, error, done, rest = content.split(b"\n\n")
    assert status == 200
    assert content.startswith(fakes.EVENTS[0])
    assert broken == fakes.EVENTS[1]
    assert error_of(error.removeprefix(b"data: ")) == (502, "BadGatewayError")
    assert (done, rest) == (b"data: [DONE]", b"")


# Clients that leave


@pytest.mark.parametrize(("stage", "waits"), [("prefill", never), ("decode", never), ("decode", begins)])
@proxied(lambda stage, waits: {stage: [Fake(waits)]})
async def test_a_client_that_leaves_ends_its_request_on_the_server(cluster: Setting, stage: str, waits):
    [server] = getattr(cluster, stage)

    async def ask() -> None:
        async with cluster.client.post(cluster.url + "/v1/completions", json=BODY | {"stream": True}) as reply:
            assert await reply.content.readany() == fakes.EVENTS[0]
            began.set()
            await reply.read()

    began, asking = asyncio.Event(), asyncio.create_task(ask())
    await (began.wait() if waits is begins else until(lambda: bool(server.got)))
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await until(lambda: server.num_left == 1)
    assert all(cluster.upstream(item).trouble is None for item in (*cluster.prefill, *cluster.decode))


# Health, limits, the end


@proxied(lambda: {"prefill": [Fake(prefills), Fake(prefills, health=503)], "health_interval": 0.05})
async def test_a_server_is_not_asked_until_it_is_healthy_again(cluster: Setting):
    _, second = cluster.prefill
    for _ in range(3):
        await cluster.post(BODY)
    assert [len(server.got) for server in cluster.prefill] == [3, 0]
    second.health = 200
    await until(lambda: cluster.upstream(second).trouble is None)
    for _ in range(4):
        await cluster.post(BODY)
    assert [len(server.got) for server in cluster.prefill] == [5, 2]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give servers only 0.25 s to report that they are healthy."""
    monkeypatch.setattr("minivllm.entrypoints.proxy.proxy.SECONDS_TO_SAY_HEALTHY", 0.25)


@pytest.mark.usefixtures("impatient")
@proxied(lambda: {"prefill": [Fake(prefills, health_delay=PATIENCE)]})
async def test_a_server_that_is_late_with_its_health_is_asked_on_for_a_while(cluster: Setting):
    [late] = cluster.prefill
    upstream = cluster.upstream(late)
    assert (upstream.num_late, upstream.trouble) == (1, None)
    await upstream.check_health()
    assert (await cluster.post(BODY))[0] == 200, "it may only be busy"
    await upstream.check_health()
    assert upstream.trouble is not None, "busy for too long"
    late.health_delay = 0
    await upstream.check_health()
    assert (upstream.num_late, upstream.trouble) == (0, None)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("stream", [False, True])
@proxied(lambda stream: {"decode": [Fake(begins if stream else never)]})
async def test_whoever_waits_for_a_server_that_has_fallen_silent_is_told(cluster: Setting, stream: bool):
    [hangs] = cluster.decode
    upstream = cluster.upstream(hangs)
    asking = asyncio.create_task(cluster.post(BODY | {"stream": stream}))
    await until(lambda: bool(hangs.got))
    await asyncio.sleep(0.05)
    hangs.health_delay = PATIENCE
    for _ in range(3):
        assert not asking.done()
        await upstream.check_health()
    status, content = await asking
    assert status == (200 if stream else 502)
    assert b"BadGatewayError" in content
    assert content.endswith(b"data: [DONE]\n\n") == stream


@proxied(lambda: {"decode": [Fake(begins)]})
async def test_at_the_end_every_client_is_answered(cluster: Setting):
    streamed = asyncio.create_task(cluster.post(BODY | {"stream": True}))
    await until(lambda: bool(cluster.decode[0].got))
    cluster.prefill[0].answer = never
    whole = asyncio.create_task(cluster.post(BODY))
    await until(lambda: len(cluster.prefill[0].got) == 2)
    cluster.proxy.end_requests()
    assert error_of((await whole)[1]) == (503, "ServiceUnavailableError")
    *_, error, done, _ = (await streamed)[1].split(b"\n\n")
    assert error_of(error.removeprefix(b"data: ")) == (503, "ServiceUnavailableError")
    assert done == b"data: [DONE]"


def test_the_process_ends_at_a_signal_and_loads_no_torch():
    port = free_port()
    flags = ("--prefill", "http://127.0.0.1:9", "--decode", "http://127.0.0.1:9", "--port", str(port))
    code = (
        "import sys\nfrom minivllm.entrypoints.cli.main import main\n"
        "code = main(sys.argv[1:])\nassert not {'torch', 'numba', 'triton', 'transformers'} & set(sys.modules)\n"
        "sys.exit(code)"
    )
    process = subprocess.Popen([sys.executable, "-P", "-c", code, "proxy", *flags], stderr=subprocess.PIPE, text=True)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        assert eventually(lambda: answers(client, 503))
        reply = client.post("/v1/completions", json=BODY)
        assert (reply.status_code, error_of(reply.content)[0]) == (503, 503)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, said
    assert "Traceback" not in said


WRONG = {
    "no server": ("--prefill", "http://a:1"),
    "no address": ("--prefill", "a:1", "--decode", "http://b:1"),
    "a path": ("--prefill", "http://a:1/v1", "--decode", "http://b:1"),
    "a key": ("--prefill", "http://me:secret@a:1", "--decode", "http://b:1"),
    "twice": ("--prefill", "http://a:1", "--prefill", "http://a:1", "--decode", "http://b:1"),
    "no time": ("--prefill", "http://a:1", "--decode", "http://b:1", "--health-interval", "0"),
    "a flag": ("--prefill", "http://a:1", "--decode", "http://b:1", "--prefiller", "http://c:1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_flag_is_one_line_and_exit_code_2(name: str, capsys: pytest.CaptureFixture[str]):
    assert main(["proxy", *WRONG[name]]) == 2
    said = capsys.readouterr().err
    assert said.startswith("minivllm: ")
    assert said.count("\n") == 1
