"""Test a request's constraints on its answer, and the tools that the answer calls."""

import json
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import pytest
from refusals import assert_refused
from server.serving import Server, events_of, refusal

from minivllm import StructuredOutputsParams
from minivllm.entrypoints.openai.constraints import constraint_of
from minivllm.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
from minivllm.entrypoints.openai.tool_parsers import REQUIRED, NamedTool, ToolParser
from minivllm.structured_output.grammar_text import check_grammar

MESSAGES = [{"role": "user", "content": "def add(a, b):\n    return"}]
CITY = {"type": "object", "properties": {"city": {"$ref": "#/$defs/city"}}, "required": ["city"]}
CITIES = {"city": {"enum": ["Rome", 'a "b" {']}}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY | {"$defs": CITIES}}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED = {"type": "function", "function": {"name": "weather"}}


def tool_with(parameters) -> dict:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def asked(**fields) -> StructuredOutputsParams | None:
    return constraint_of(ChatCompletionRequest(messages=MESSAGES, **fields))


def test_each_form_of_a_constraint():
    schema = {"type": "object"}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert asked() is None
    assert asked(response_format={"type": "text"}) is None
    assert asked(response_format={"type": "json_object"}) == StructuredOutputsParams(json_object=True)
    assert asked(response_format=form) == StructuredOutputsParams(json=schema)
    assert asked(structured_outputs={"json": schema}) == StructuredOutputsParams(json=schema)
    assert asked(structured_outputs={"json": True}) == StructuredOutputsParams(json={})
    choice = constraint_of(CompletionRequest(prompt="a", structured_outputs={"choice": ["a"]}))
    assert choice == StructuredOutputsParams(choice=["a"])
    spaced = asked(response_format=form, structured_outputs={"whitespace_pattern": " "})
    assert spaced == StructuredOutputsParams(json=schema, whitespace_pattern=" ")
    assert asked(tools=TOOLS, tool_choice="none") is asked(tools=TOOLS) is None
    assert asked(tools=TOOLS, tool_choice=NAMED).json == CITY | {"$defs": CITIES}
    assert asked(tools=TOOLS, tool_choice=NAMED, response_format={"type": "json_object"}).json_object is None


@pytest.mark.parametrize("number", [-(2**63), 1 - 2**63, -1e300, 2**64])
def test_a_schemas_number_that_no_integer_of_64_bits_holds_is_refused(number):
    for schema in ({"const": number}, {"items": {"enum": [1, {"maximum": number}]}}):
        for given in (schema, json.dumps(schema)):
            assert_refused("its numbers must be above", check_grammar, StructuredOutputsParams(json=given))
    check_grammar(StructuredOutputsParams(json={"enum": [2**64 - 1, 1024 - 2**63, 1e300]}))


def test_a_schemas_number_inside_a_grammar_is_refused():
    params = StructuredOutputsParams(grammar='start: %json {"const": -9223372036854775809}')
    assert_refused("its numbers must be above", check_grammar, params)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"structured_outputs": {}}, "no constraint"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "only one of them"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "only one of them"),
        ({"structured_outputs": {"json": {}}, "tools": TOOLS, "tool_choice": NAMED}, "give only one"),
        ({"tools": [tool_with({"$defs": 5})], "tool_choice": "required"}, r"\$defs of a tool"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "has no schema"),
    ],
)
def test_what_is_no_constraint_is_refused(fields, message):
    assert_refused(message, asked, **fields)


def test_a_required_tool_is_a_list_of_calls_of_any():
    schema = asked(tools=TOOLS, tool_choice="required").json
    for fits in (
        [{"name": "now", "parameters": {}}],
        [{"name": "weather", "parameters": {"city": "Rome"}}, {"name": "now", "parameters": {"a": 1}}],
    ):
        jsonschema.validate(fits, schema)
    for wrong in ([], [{"name": "other", "parameters": {}}], [{"name": "weather", "parameters": {"city": "Oslo"}}]):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)
    assert asked(tools=TOOLS, tool_choice="required", parallel_tool_calls=False).json["maxItems"] == 1
    other = {"type": "function", "function": {"name": "x", "parameters": {"$defs": {"city": {"enum": ["Oslo"]}}}}}
    assert_refused("two tools define 'city' differently", asked, tools=[TOOLS[0], other], tool_choice="required")


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_calls_come_out_of_pieces_of_the_text(size):
    text = '[{"name": "weather", "parameters": {"city": "a \\"b\\" {}\\\\"}}, {"name":"now","parameters":{}}]'
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    tools = ToolParser(REQUIRED)
    calls = [call for piece in pieces for call in tools.new(piece, is_last=False)[1]]
    assert [(call["index"], call["function"]["name"]) for call in calls] == [(0, "weather"), (1, "now")]
    assert json.loads(calls[0]["function"]["arguments"]) == {"city": 'a "b" {}\\'}
    content, whole = ToolParser(REQUIRED).whole(text)
    assert content == ""
    assert [call["function"] for call in whole] == [call["function"] for call in calls]
    assert len({call["id"] for call in calls}) == 2


def test_arguments_of_a_named_tool_come_as_they_are_written():
    tools = NamedTool("weather")
    pieces = ('{"city', "", '": "Rome"}')
    first, second = [call for piece in pieces for call in tools.new(piece, is_last=False)[1]]
    assert (first["function"]["name"], first["index"], second["index"]) == ("weather", 0, 0)
    assert first["function"]["arguments"] + second["function"]["arguments"] == '{"city": "Rome"}'
    assert second.keys() == {"index", "function"}, "a client would take a second id for a second call"


def post(server: Server, **fields):
    body = {"messages": MESSAGES, "max_tokens": 60, "temperature": 0, "tools": TOOLS} | fields
    return server.client.post("/v1/chat/completions", json=body)


def streamed(server: Server, **fields) -> list[dict]:
    return [event["choices"][0] for event in events_of(post(server, stream=True, **fields).text)]


def test_a_tool_that_must_be_called_is_called(chat: Server):
    [choice] = post(chat, tool_choice=NAMED).json()["choices"]
    [call] = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", None)
    assert (call["type"], call["function"]["name"]) == ("function", "weather")
    assert json.loads(call["function"]["arguments"])["city"] in CITIES["city"]["enum"]
    required = {"tool_choice": "required", "tools": TOOLS[:1], "parallel_tool_calls": False}
    forced = post(chat, **required).json()["choices"][0]
    assert forced["finish_reason"] == "tool_calls"
    assert forced["message"]["tool_calls"][0]["function"]["name"] == "weather"
    events = streamed(chat, **required)
    [delta] = [call for event in events for call in event["delta"].get("tool_calls", ())]
    assert delta["function"] == forced["message"]["tool_calls"][0]["function"]
    assert [event["finish_reason"] for event in events if event["finish_reason"]] == ["tool_calls"]


def test_calls_that_a_stop_string_cuts_off_are_text(chat: Server):
    cut_off = {"tool_choice": "required", "tools": TOOLS[:1], "stop": ["city"]}
    choices = streamed(chat, **cut_off)
    assert not any(choice["delta"].get("tool_calls") for choice in choices)
    assert "".join(choice["delta"].get("content") or "" for choice in choices).startswith("[")
    [whole] = post(chat, **cut_off).json()["choices"]
    assert whole["message"].keys() == {"role", "content"}
    assert whole["message"]["content"].startswith("[")
    for choice in (choices[-1], whole):
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "city")


def test_auto_needs_its_flags(base: Server):
    reply = post(base)
    assert refusal(reply)[:2] == (400, "BadRequestError")
    assert "--enable-auto-tool-choice and --tool-call-parser" in reply.json()["error"]["message"]


TOO_WIDE = {"grammar": "start: " + " | ".join(f'"w{number}"' for number in range(3000))}
"""Valid, and too large for the parser as soon as a token is accepted."""


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_exceeds_its_limits_at_work_is_the_requests_error(base: Server, stream):
    with ThreadPoolExecutor(1) as beside:
        fields = {"prompt": "def add(a, b):", "temperature": 0, "max_tokens": 60, "ignore_eos": True}
        other = beside.submit(base.client.post, "/v1/completions", json=fields)
        reply = base.client.post("/v1/completions", json=fields | {"structured_outputs": TOO_WIDE, "stream": stream})
        if stream:
            assert reply.status_code == 200, "its headers were sent before the grammar was at work"
            event, done = reply.text.strip().split("\n\n")
            assert done == "data: [DONE]"
            error = json.loads(event.removeprefix("data: "))["error"]
        else:
            assert reply.status_code == 400
            error = reply.json()["error"]
        assert (error["type"], error["code"]) == ("BadRequestError", 400)
        assert "Current row has 3001 items" in error["message"]
        assert other.result().json()["usage"]["completion_tokens"] == 60
    assert base.client.get("/health").status_code == 200
