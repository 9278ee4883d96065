"""Calls that a model makes freely are found, whole and in a stream, and all other text is kept."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import assert_refused
from server.serving import Server

from minivllm.entrypoints.openai import tool_parsers
from minivllm.entrypoints.openai.settings import FrontendArgs
from minivllm.entrypoints.openai.tool_parsers import PARSERS, ToolParser

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
ROME = '{"name": "weather", "arguments": {"city": "Rome"}}'
Found = tuple[str, list[tuple[str, Any]]]
"""The content, and the name and arguments of each call."""


def streamed(name: str, text: str, size: int) -> Found:
    """Return what a client puts together from the deltas, where the text comes in pieces of this size."""
    pieces = [text[start : start + size] for start in range(0, len(text), size)] or [""]
    parser = ToolParser(PARSERS[name])
    content = ""
    calls: list[tuple[str, str]] = []
    for index, piece in enumerate(pieces):
        added, deltas = parser.new(piece, is_last=index == len(pieces) - 1)
        content += added
        for delta in deltas:
            function = delta["function"]
            if "id" in delta:
                assert delta["index"] == len(calls)
                calls.append((function["name"], function["arguments"]))
            else:
                name, arguments = calls[delta["index"]]
                calls[delta["index"]] = name, arguments + function["arguments"]
    return content, [(name, json.loads(arguments)) for name, arguments in calls]


def whole(name: str, text: str) -> Found:
    content, calls = ToolParser(PARSERS[name]).whole(text)
    return content, [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


def hermes(call: str) -> str:
    return f"<tool_call>\n{call}\n</tool_call>"


@pytest.mark.parametrize(
    ("name", "text", "content", "num_calls"),
    [
        ("hermes", hermes(ROME), "", 1),
        ("hermes", f"I look.\n{hermes(ROME)}\n{hermes(ROME)}\n", "I look.\n", 2),
        ("hermes", f"{hermes(ROME)} That was all.", " That was all.", 1),
        ("hermes", f"<tool_call>{ROME}", "", 1),
        ("hermes", "no call, and 1 < 2 <tool", "no call, and 1 < 2 <tool", 0),
        ("hermes", hermes('{"arguments": {"a": 1}, "name": "f"}'), "", 1),
        ("hermes", hermes('{"name": "f"}'), hermes('{"name": "f"}'), 0),
        ("hermes", hermes("{bad") + hermes(ROME), hermes("{bad"), 1),
        ("hermes", hermes("3"), hermes("3"), 0),
        ("hermes", hermes('{"name": "f", "arguments": {"a": "</tool_call> \\" {"}}'), "", 1),
        ("llama3_json", ROME, "", 1),
        ("llama3_json", f"<|python_tag|>{ROME}; {ROME}", "", 2),
        ("llama3_json", '{"name": "f", "parameters": {}}', "", 1),
        ("llama3_json", '{"answer": 42}', '{"answer": 42}', 0),
        ("llama3_json", "It rains. {}", "It rains. {}", 0),
        ("llama3_json", "<|python", "<|python", 0),
    ],
)
def test_content_and_calls(name: str, text: str, content: str, num_calls: int) -> None:
    found = whole(name, text)
    assert (found[0], len(found[1])) == (content, num_calls)
    for size in (1, 2, 3, 7, len(text)):
        assert streamed(name, text, size) == found, size


def test_the_name_is_sent_before_the_arguments_are_complete() -> None:
    parser = ToolParser(PARSERS["hermes"])
    assert parser.new('<tool_call>{"name": "f", "arg', is_last=False) == ("", [])
    [first] = parser.new('uments": {"a": ', is_last=False)[1]
    assert first["function"] == {"name": "f", "arguments": '{"a": '}
    assert parser.new("1}", is_last=False)[1] == [{"index": 0, "function": {"arguments": "1}"}}]
    assert parser.new("}</tool_call>", is_last=True) == ("", [])


LONG_CALLS = ['{"name": "f", "arguments": %s}', '{"arguments": %s, "name": "f"}', '{"name": f, %s}']


@pytest.mark.parametrize("call", LONG_CALLS)
def test_a_long_call_is_not_parsed_again_for_each_piece(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    decode, parsed = tool_parsers.decode, 0

    def counted(text: str, start: int) -> tuple[object, int]:
        nonlocal parsed
        parsed += len(text) - start
        return decode(text, start)

    monkeypatch.setattr(tool_parsers, "decode", counted)
    text = hermes(call % json.dumps({"code": 'x = {"a": {1}}\\n' * 1000}))
    streamed("hermes", text, 4)
    assert parsed < 10 * len(text)


def test_a_call_that_is_cut_off_is_text_in_a_whole_answer() -> None:
    text = f'{hermes(ROME)}<tool_call>{{"name": "f", "arguments": {{"a'
    assert whole("hermes", text) == ('<tool_call>{"name": "f", "arguments": {"a', [("weather", {"city": "Rome"})])


SCALARS, KEYS = st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=6), st.text(max_size=4)
JSON = st.recursive(SCALARS, lambda of: st.lists(of, max_size=2) | st.dictionaries(KEYS, of, max_size=2), max_leaves=4)
CALL = {"name": st.text("abc_", min_size=1, max_size=4), "arguments": st.dictionaries(KEYS, JSON, max_size=3)}
CALLS = st.fixed_dictionaries(CALL).map(lambda call: json.dumps(call, ensure_ascii=False))
MALFORMED = ["<tool_call>", "</tool_call>", '{"name": "f"}', '"']
PARTS = st.lists(st.text("ab <\n>{}", max_size=5) | CALLS.map(hermes) | st.sampled_from(MALFORMED), max_size=5)


@given(PARTS, st.integers(1, 9))
def test_a_stream_adds_up_to_the_whole(parts: list[str], size: int) -> None:
    assert streamed("hermes", "".join(parts), size) == whole("hermes", "".join(parts))


def test_a_parser_that_is_not_there_is_refused_with_the_list() -> None:
    assert_refused("must be one of hermes, llama3_json", FrontendArgs, tool_call_parser="nope")
    assert_refused("needs a tool_call_parser: one of hermes, llama3_json", FrontendArgs, enable_auto_tool_choice=True)
    assert list(PARSERS) == ["hermes", "llama3_json"]


def test_no_parser_reads_an_answer_that_may_not_call(chat: Server) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "tools": TOOLS, "tool_choice": "none", "max_tokens": 200}
    body["structured_outputs"] = {"choice": [hermes(ROME)]}
    [choice] = chat.client.post("/v1/chat/completions", json=body).json()["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", hermes(ROME))
