"""Responses are chats in another form: whole and streamed alike, with tools, and never stored."""

import json
from typing import Any

import pytest
from server.serving import Server
from server.test_tool_parsers import ROME, hermes

QUESTION = "def add(a, b):\n    return"
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}


def respond(server: Server, **fields: Any) -> dict[str, Any]:
    """Return a response, after a check that its stream ends with the same one."""
    body = {"input": QUESTION, "temperature": 0, "max_output_tokens": 200} | fields
    reply = server.client.post("/v1/responses", json=body)
    assert reply.status_code == 200, reply.text
    whole, events = reply.json(), stream(server, **body)
    assert comparable(events[-1]["response"]) == comparable(whole)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert from_events(events) == comparable(whole)["output"]
    return whole


def stream(server: Server, **body: Any) -> list[dict[str, Any]]:
    text = server.client.post("/v1/responses", json=body | {"stream": True}).text
    pairs = [block.split("\n") for block in text.split("\n\n") if block]
    events = [json.loads(data.removeprefix("data: ")) for _, data in pairs]
    assert [kind for kind, _ in pairs] == [f"event: {event['type']}" for event in events]
    return events


def comparable(value: Any) -> Any:
    """Return a value without ids and times, its floats rounded."""
    if isinstance(value, float):
        return round(value, 2)
    if isinstance(value, dict):
        own = ("id", "call_id", "created_at", "item_id", "cached_tokens")
        return {key: comparable(each) for key, each in value.items() if key not in own}
    return [comparable(each) for each in value] if isinstance(value, list) else value


def from_events(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put the items together from the deltas, as a client does."""
    items: list[dict[str, Any]] = []
    for event in events:
        match event["type"].removeprefix("response."):
            case "output_item.added":
                assert event["output_index"] == len(items)
                items.append(event["item"])
            case "content_part.added":
                items[-1]["content"].append(event["part"])
            case "output_text.delta":
                items[-1]["content"][event["content_index"]]["text"] += event["delta"]
            case "function_call_arguments.delta":
                items[-1]["arguments"] += event["delta"]
            case "output_item.done":
                shown = comparable(event["item"])
                for part in shown.get("content", ()):
                    part["logprobs"] = []
                assert comparable(items[-1]) | {"status": shown["status"]} == shown
                items[-1] = event["item"]
    return comparable(items)


def test_a_text(chat: Server):
    response = respond(chat, instructions="x = 1", max_output_tokens=6, metadata={"a": "b"})
    [item] = response["output"]
    messages = [{"role": "system", "content": "x = 1"}, {"role": "user", "content": QUESTION}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 6}
    as_chat = chat.client.post("/v1/chat/completions", json=body).json()
    assert item["content"][0]["text"] == as_chat["choices"][0]["message"]["content"]
    assert response["usage"]["input_tokens"] == as_chat["usage"]["prompt_tokens"]
    assert (response["status"], item["status"]) == ("incomplete", "incomplete")
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["metadata"] == {"a": "b"}
    assert (response["max_output_tokens"], response["temperature"], response["tool_choice"]) == (6, 0.0, "none")


def test_calls_that_the_model_makes_freely(chat: Server):
    says = f"I look. {hermes(ROME)}{hermes(ROME)}"
    response = respond(chat, tools=[TOOL], structured_outputs={"choice": [says]})
    message, *calls = response["output"]
    assert message["content"][0]["text"] == "I look. "
    rome = ("function_call", "weather", {"city": "Rome"})
    assert [(call["type"], call["name"], json.loads(call["arguments"])) for call in calls] == [rome, rome]
    assert response["status"] == "completed"
    [_, call] = respond(chat, tools=[TOOL], structured_outputs={"choice": [says]}, parallel_tool_calls=False)["output"]
    assert call["status"] == "completed"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_a_call_that_must_be_made(chat: Server, choice: Any):
    parameters = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    [call, *_] = respond(chat, tools=[TOOL | {"parameters": parameters}], tool_choice=choice)["output"]
    assert (call["type"], call["name"]) == ("function_call", "weather")
    assert json.loads(call["arguments"]).keys() == {"ok"}


def test_a_schema_and_log_probabilities(chat: Server):
    form = {"format": {"type": "json_schema", "name": "verdict", "schema": SCHEMA, "strict": True}}
    response = respond(chat, text=form, include=["message.output_text.logprobs"], top_logprobs=2)
    [part] = response["output"][0]["content"]
    assert json.loads(part["text"]).keys() == {"ok"}
    *tokens, end = [entry["token"] for entry in part["logprobs"]]
    assert ("".join(tokens), end) == (part["text"], "<|endoftext|>")
    assert {len(entry["top_logprobs"]) for entry in part["logprobs"]} == {2}
    assert response["text"] == form


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"tools": [{"type": "custom", "name": "f"}]}, 400, "tools"),
        ({"previous_response_id": "resp_1"}, 404, "response_id"),
        ({"model": "nope"}, 404, "model"),
    ],
)
def test_what_is_not_served_is_refused(chat: Server, fields: dict[str, Any], status: int, param: str):
    for more in ({}, {"stream": True}):
        reply = chat.client.post("/v1/responses", json={"input": "a", **fields, **more})
        assert (reply.status_code, reply.json()["error"]["param"]) == (status, param), reply.text


def test_without_a_parser_calls_are_text_and_hosted_tools_are_ignored(chat: Server, base: Server):
    says = hermes(ROME)
    search = {"type": "web_search"}
    [item] = respond(chat, tools=[search], structured_outputs={"choice": [says]})["output"]
    assert item["content"][0]["text"] == says
    assert base.client.post("/v1/responses", json={"input": "a"}).status_code == 400  # it has no template


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": ["function"]}]},
        {"tools": [{"type": "function", "name": 5}]},
        {"tools": [TOOL], "tool_choice": {"type": {}}},
        {"input": [{"type": "reasoning", "content": 5}, {"role": "user", "content": "a"}]},
        {"input": [{"type": ["message"], "role": "user", "content": "a"}]},
        {"input": [{"role": "assistant", "content": "a", "tool_calls": 5}, {"type": "function_call"}]},
        {"input": [{"role": "assistant", "tool_calls": "a"}, {"role": "assistant", "tool_calls": {}}]},
        {"input": [{"type": "function_call_output", "output": {"a": 1}}]},
        {"input": [{"role": ["user"], "content": "a"}]},
        {"reasoning": {"effort": []}},
        {"text": {"format": {"type": "json_schema", "schema": 5}}},
    ],
)
def test_what_makes_no_sense_is_no_fault_of_the_servers(chat: Server, fields: dict[str, Any]):
    reply = chat.client.post("/v1/responses", json={"input": "a", "max_output_tokens": 1} | fields)
    assert reply.status_code in (200, 400), reply.text


@pytest.mark.parametrize(
    ("field", "value"),
    [("user", '"\\ud800"'), ("metadata", '{"a": "\\udfff"}'), ("reasoning", '{"a":' * 300 + "1" + "}" * 300)],
)
def test_what_no_answer_can_repeat_is_refused_before_it_is_computed(chat: Server, field: str, value: str):
    body = f'{{"input": "a", "{field}": {value}}}'.encode()
    reply = chat.client.post("/v1/responses", content=body, headers={"content-type": "application/json"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)
    assert "cannot be repeated" in reply.json()["error"]["message"]
