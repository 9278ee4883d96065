"""Test the comparison of two servers: what counts as a difference, and what the requests cover."""

import json
import random
from typing import Any

import httpx
import pytest


def reply(value: Any, status: int = 200) -> httpx.Response:
    return httpx.Response(status, json=value)


def streamed(*events: dict[str, Any]) -> httpx.Response:
    text = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    return httpx.Response(200, text=text, headers={"content-type": "text/event-stream"})


def delta(text: str, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, **more}]}


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (reply({"id": "a", "n": 1, "x": None}), reply({"id": "b", "n": 1, "y": []})),
        (reply({"logprob": -1.0}), reply({"logprob": -1.001})),
        (reply({"error": {"message": "a", "param": "p"}}, 400), reply({"error": {"message": "b", "param": "p"}}, 400)),
        (
            streamed(delta("ab"), delta("c", finish_reason="stop")),
            streamed(delta("a"), delta("bc", finish_reason="stop")),
        ),
        (reply({"output": [{"status": "completed"}]}), reply({"output": [{"status": "incomplete"}]})),
    ],
)
def test_answers_that_are_equal(bench, theirs: httpx.Response, ours: httpx.Response):
    assert [*bench.differences(theirs, ours, free=False)] == []


@pytest.mark.parametrize(
    ("theirs", "ours", "place"),
    [
        (reply({}), reply({}, 400), "status"),
        (reply({"error": {"param": "p"}}, 400), reply({"error": {"param": None}}, 400), ".error.param"),
        (reply({"usage": {"total_tokens": 1}}), reply({"usage": {"total_tokens": 2}}), ".usage.total_tokens"),
        (streamed(delta("ab")), streamed(delta("ac")), ".text.content 0"),
        (streamed(delta("ab"), {"usage": {"a": 1}}), streamed({"usage": {"a": 1}}, delta("ab")), ".kinds[]"),
    ],
)
def test_answers_that_are_not(bench, theirs: httpx.Response, ours: httpx.Response, place: str):
    assert [where for where, _ in bench.differences(theirs, ours, free=False)][:1] == [place]


def test_a_grammar_leaves_the_text_free_and_nothing_else(bench):
    theirs, ours = reply({"text": "{ }", "object": "a"}), reply({"text": "{}", "object": "b"})
    assert [where for where, _ in bench.differences(theirs, ours, free=True)] == [".object"]


def test_the_requests_reach_every_path_and_field_and_are_the_same_for_a_seed(bench):
    draw = random.Random(5)
    requests = [bench.random_request(draw) for _ in range(6000)]
    for path, fields in bench.FIELDS.items():
        sent = {name for each, body in requests if each == path for name in body}
        assert sent >= fields.keys()
    again = random.Random(5)
    assert requests[:50] == [bench.random_request(again) for _ in range(50)]
