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


def damaged(entry: dict) -> list[tuple[int, str, str]]:
    """Make wrong answers that are close to the right one."""
    status, kind, body = entry["status"], entry["content_type"], entry["response"]
    wrong = [(status + 100, kind, body), (status, "text/html", body)]
    for old, new in (
        ('"finish_reason":"length"', '"finish_reason":"stop"'),
        ('"total_tokens":', '"total_tokens":1'),
        ('"type":"', '"type":"Not'),
        ('"index":0', '"index":1'),
        ("[DONE]", '{"choices": [], "usage": {}, "id": 1, "object": 1, "model": 1}'),
        ("# TYPE vllm:num_requests_running gauge", "# TYPE vllm:num_requests_running counter"),
        ('"count":', '"count":1'),
    ):
        if old in body and not (entry.get("free_usage") and old in ('"total_tokens":', '"type":"')):
            wrong.append((status, kind, body.replace(old, new)))
    return wrong


def test_the_comparison_notices_damage():
    for entry in EXCHANGES:
        assert not differences(entry, entry["status"], entry["content_type"], entry["response"])
        if entry.get("free_text"):
            continue
        for wrong in damaged(entry):
            assert differences(entry, *wrong), (entry["name"], wrong[2][:300])
