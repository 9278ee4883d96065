"""Find the calls of tools in text that a model generates freely, whole or while it is streamed.

In vLLM v0.33.0: `vllm/tool_parsers/hermes_tool_parser.py` (`Hermes2ProToolParser`),
`vllm/tool_parsers/llama_tool_parser.py` (`Llama3JsonToolParser`). There one malformed call makes
text of the whole answer; here only the malformed call is text.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from minivllm.entrypoints.openai.tool_calls import as_text, call_of

HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)+")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
"""A call up to its arguments, with its keys in the order in which models are trained to write them."""
PYTHON_TAG = "<|python_tag|>"
BEFORE_JSON = re.compile(rf"\s*(?:{re.escape(PYTHON_TAG)})?\s*;?\s*(?=\{{)")
decode = json.JSONDecoder().raw_decode


@dataclass(frozen=True)
class Call:
    """A call of a tool. Its `arguments` are the beginning of JSON until it is `complete`."""

    name: str
    arguments: str
    complete: bool = True


@dataclass(frozen=True)
class Syntax:
    """The text around each call. An empty `opener` stands for calls that are the whole answer."""

    opener: str = ""
    closer: str = ""

    def start(self, text: str, position: int) -> tuple[int, int] | None:
        """Return where the next call begins, with its opener and without, or None."""
        if not self.opener:
            match = BEFORE_JSON.match(text, position)
            return (position, match.end()) if match else None
        start = text.find(self.opener, position)
        return None if start < 0 else (start, start + len(self.opener))

    def held(self, rest: str, behind_call: bool) -> int:
        """Return how many characters at the end of a text may still become an opener, or behind a
        call its closer.
        """
        if behind_call and (self.closer.startswith(rest.lstrip()) if self.closer else rest.strip() in ("", ";")):
            return len(rest)
        if not self.opener and not rest.strip():
            return len(rest)
        opener = self.opener or PYTHON_TAG
        longest = min(len(opener), len(rest))
        return next(length for length in range(longest, -1, -1) if opener.startswith(rest[len(rest) - length :]))

    def end(self, text: str, position: int) -> int:
        """Return where a call's closer ends that may begin here."""
        if not self.closer:
            return position
        after = len(text) - len(text[position:].lstrip())
        return after + len(self.closer) if text.startswith(self.closer, after) else position


PARSERS = {"hermes": Syntax("<tool_call>", "</tool_call>"), "llama3_json": Syntax()}
"""The syntax of each parser, by vLLM's names."""


class ToolParser:
    """The calls and the other text of one answer, read as it grows."""

    def __init__(self, name: str) -> None:
        self._syntax = PARSERS[name]
        self._text = ""
        self._num_sent = 0
        self._arguments_sent: list[int] = []

    @property
    def num_calls(self) -> int:
        """Return how many calls have begun."""
        return len(self._arguments_sent)

    def whole(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """Return the content and the calls of a complete answer. A call that is cut off is content."""
        content, calls = _read(text, self._syntax, is_last=True, keeps_begun=False)
        self._arguments_sent = [len(call.arguments) for call in calls]
        return content, [call_of(call.name, as_text(json.loads(call.arguments))) for call in calls]

    def new(self, text: str, is_last: bool) -> tuple[str, list[dict[str, Any]]]:
        """Return the content, and the deltas of calls, that this piece of the answer adds."""
        self._text += text
        content, calls = _read(self._text, self._syntax, is_last, keeps_begun=True)
        piece, self._num_sent = content[self._num_sent :], len(content)
        deltas: list[dict[str, Any]] = []
        for index, call in enumerate(calls):
            if index == len(self._arguments_sent):
                self._arguments_sent.append(len(call.arguments))
                deltas.append({"index": index, **call_of(call.name, call.arguments)})
            elif added := call.arguments[self._arguments_sent[index] :]:
                self._arguments_sent[index] = len(call.arguments)
                deltas.append({"index": index, "function": {"arguments": added}})
        return piece, deltas


def _read(text: str, syntax: Syntax, is_last: bool, keeps_begun: bool) -> tuple[str, list[Call]]:
    """Return the content and the calls of a text that may still grow.

    Both only grow with the text, so what has been sent stays true. `keeps_begun`: a call whose name
    has been sent remains one, whatever follows.
    """
    content = ""
    calls: list[Call] = []
    position = 0
    behind_call = False
    while start := syntax.start(text, position):
        content += _between(text[position : start[0]], calls)
        call, end = _read_call(text, start[1])
        if call is None and end is None and not is_last:
            return content, calls
        if call is None or not (call.complete or keeps_begun):
            position = _closed(text, syntax, start[1]) if end is None else end
            content += text[start[0] : position]
            behind_call = False
            continue
        calls.append(call)
        end = len(text) if end is None else end
        position = syntax.end(text, end)
        behind_call = position == end
    rest = text[position:]
    held = 0 if is_last else syntax.held(rest, behind_call)
    return content + _between(rest[: len(rest) - held], calls), calls


def _read_call(text: str, position: int) -> tuple[Call | None, int | None]:
    """Return the call that begins here, if it is one, and where its JSON ends, if it does."""
    try:
        call, end = decode(text, len(text) - len(text[position:].lstrip()))
    except (ValueError, RecursionError):
        return _read_begun(text, position), None
    arguments = call.get("arguments", call.get("parameters")) if isinstance(call, dict) else None
    if not isinstance(arguments, dict) or not isinstance(call.get("name"), str):
        return None, end
    head = HEAD.match(text, position)
    exact = text[head.end() : decode(text, head.end())[1]] if head else as_text(arguments)
    return Call(call["name"], exact), end


def _read_begun(text: str, position: int) -> Call | None:
    head = HEAD.match(text, position)
    if head is None:
        return None
    try:
        end = decode(text, head.end())[1]
    except (ValueError, RecursionError):
        end = len(text)
    return Call(json.loads(head[1]), text[head.end() : end], complete=False)


def _closed(text: str, syntax: Syntax, position: int) -> int:
    """Return where something that is no call ends: behind its closer, if it has one."""
    end = text.find(syntax.closer, position) if syntax.closer else -1
    return len(text) if end < 0 else end + len(syntax.closer)


def _between(text: str, calls: list[Call]) -> str:
    return "" if calls and not text.strip() else text
