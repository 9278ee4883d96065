"""Every recorded exchange with vLLM's own server gets the same answer here."""

import pytest
from server.replay import EXCHANGES, differences
from server.serving import Server


def answer(server: Server, entry: dict) -> tuple[int, str, str]:
    reply = server.client.request(entry["method"], entry["path"], content=entry["body"], headers=entry["headers"])
    return reply.status_code, reply.headers.get("content-type", ""), reply.text


@pytest.mark.parametrize("entry", EXCHANGES, ids=[f"{entry['set']}-{entry['name']}" for entry in EXCHANGES])
def test_as_vllm_answers(entry, request):
    server: Server = request.getfixturevalue(entry["set"])
    assert not differences(entry, *answer(server, entry))
