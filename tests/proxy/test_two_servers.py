"""Two real servers and a proxy in front of them give the answers of one server."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import httpx
import pytest
from patience import eventually
from server.serving import CHAT_TEMPLATE, Server, answers, free_port

from minivllm.config import EMBEDDED_MODEL, ModelConfig
from minivllm.memory import kv_bytes_per_token

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_processes")]
SECRET = {"secret": "two servers of one test"}
CONNECTOR = {"kv_connector": "TCPConnector", "kv_role": "kv_both", "kv_connector_extra_config": SECRET}
CODE = "def add(a, b):\n    return a + b\n\n\ndef "
PROMPTS = ["x", CODE, "import os\n" * 30, [5, 17, 300] * 20]
CHAT = {"messages": [{"role": "user", "content": "add two numbers"}], "max_completion_tokens": 12, "temperature": 0}


class Pair(NamedTuple):
    """A prefill server, a decode server, and a client of the proxy."""

    prefill: Server
    decode: Server
    client: httpx.Client


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    flags = ("--kv-transfer-config", json.dumps(CONNECTOR), "--chat-template", str(CHAT_TEMPLATE))
    with ExitStack() as stack:
        prefill, decode = servers = [Server(flags) for _ in range(2)]
        for server in servers:
            stack.callback(server.stop)
        client = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{free_port()}", timeout=60))
        command = [sys.executable, "-P", "-m", "minivllm", "proxy", "--port", str(client.base_url.port)]
        addresses = ["--prefill", prefill.url, "--decode", decode.url, "--health-interval", "0.1"]
        proxy = subprocess.Popen([*command, *addresses], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        stack.callback(proxy.wait)
        stack.callback(proxy.terminate)
        for server in servers:
            server.wait_until_ready()
        assert eventually(lambda: answers(client), 120), "the proxy finds no pair of servers that is healthy"
        yield Pair(prefill, decode, client)


def tokens_of(client: httpx.Client, body: dict[str, Any]) -> list[list[int]]:
    reply = client.post("/v1/completions", json={"temperature": 0, "return_token_ids": True} | body)
    assert reply.status_code == 200, reply.text
    return [choice["token_ids"] for choice in reply.json()["choices"]]


@pytest.mark.parametrize("prompt", PROMPTS, ids=["short", "code", "long", "ids"])
def test_completions(pair: Pair, prompt: Any):
    """Each request runs twice: the second time the decode server has the prompt in its cache."""
    wanted = tokens_of(pair.prefill.client, {"prompt": prompt})
    for _ in range(2):
        assert tokens_of(pair.client, {"prompt": prompt}) == wanted


@pytest.mark.parametrize(
    "further",
    [
        {"n": 2, "seed": 7, "temperature": 0.7},
        {"echo": True, "logprobs": 1},
        {"prompt": ["x", CODE]},
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"min_tokens": 8, "max_tokens": 8},
    ],
    ids=lambda further: next(iter(further)),
)
def test_requests_of_every_sort(pair: Pair, further: dict[str, Any]):
    body = {"prompt": CODE + "\n", **further}
    assert tokens_of(pair.client, body) == tokens_of(pair.prefill.client, body)


def test_a_chat(pair: Pair):
    said = [client.post("/v1/chat/completions", json=CHAT).json() for client in (pair.client, pair.prefill.client)]
    assert said[0]["choices"][0]["message"] == said[1]["choices"][0]["message"]
    assert said[0]["usage"] == said[1]["usage"]


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        ("/v1/completions", {"prompt": PROMPTS[3], "max_tokens": 100_000}),
        ("/v1/completions", {"prompt": PROMPTS[3], "max_tokens": -1}),
        ("/v1/chat/completions", {"messages": CHAT["messages"], "max_completion_tokens": 100_000}),
    ],
    ids=["a rule", "the schema", "a chat"],
)
def test_what_the_decode_server_refuses_is_not_kept_for_it(pair: Pair, path: str, wrong: dict[str, Any]):
    """The prefill server was asked for one token, and has no reason to refuse. Its lease is 30 s."""
    before = pair.prefill.metric("vllm:request_success_total")
    reply = pair.client.post(path, json=wrong)
    assert reply.status_code == 400, reply.text
    assert pair.prefill.metric("vllm:request_success_total") == before + 1
    assert eventually(lambda: pair.prefill.metric("vllm:kv_cache_usage_perc") == 0.0)


def test_prompts_came_over_the_wire_and_are_counted(pair: Pair):
    """Otherwise the decode server might have computed everything itself, and the tokens would be
    equal anyway.
    """
    prompt = [7, 300, 21, 9] * 12
    assert tokens_of(pair.client, {"prompt": prompt}) == tokens_of(pair.prefill.client, {"prompt": prompt})
    num_bytes = len(prompt) * kv_bytes_per_token(ModelConfig.from_pretrained(EMBEDDED_MODEL), "float32")
    num_tokens = pair.decode.metric("vllm:external_prefix_cache_hits_total")
    assert num_tokens >= len(prompt)
    assert pair.decode.metric("vllm:tcp_xfer_time_seconds_count") > 0
    assert pair.decode.metric("vllm:tcp_bytes_transferred_sum") >= num_bytes
