"""Find the calls of tools in text that a model generates freely, whole or while it is streamed.

In vLLM v0.33.0: `vllm/tool_parsers/hermes_tool_parser.py` (`Hermes2ProToolParser`),
`vllm/tool_parsers/llama_tool_parser.py` (`Llama3JsonToolParser`). There one malformed call makes
text of the whole answer; here only the malformed call is text.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from minivllm.entrypoints.openai.tool_calls import as_text, call_of

HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)+")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
"""A call up to its arguments, with its keys in the order in which models are trained to write them."""
PYTHON_TAG = "<|python_tag|>"
BEFORE_JSON = re.compile(rf"\s*(?:{re.escape(PYTHON_TAG)})?\s*;?\s*(?=\{{)")
MARKS = re.compile(r'\\.|\\\Z|["{}]', re.DOTALL)
"""The signs that decide where JSON ends; a backslash at the end of the text stands alone."""
MAX_HEAD_CHARACTERS = 512
"""A call that has not begun by then is read at its end."""
decode = json.JSONDecoder().raw_decode


@dataclass(frozen=True)
class Call:
    """A call of a tool. Its `arguments` are the beginning of JSON until it is `complete`."""

    name: str
    arguments: str
    complete: bool = True
    is_open: bool = False
    """True while its arguments have not ended either."""


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
        if not self.opener:
            bare = rest.lstrip()
            begins = PYTHON_TAG.startswith(bare) or bare.removeprefix(PYTHON_TAG).strip() in ("", ";")
            return len(rest) if begins else 0
        if behind_call and self.closer.startswith(rest.lstrip()):
            return len(rest)
        longest = min(len(self.opener), len(rest))
        return next(size for size in range(longest, -1, -1) if self.opener.startswith(rest[len(rest) - size :]))

    def end(self, text: str, position: int) -> int:
        """Return where a call's closer ends that may begin here."""
        if not self.closer:
            return position
        after = len(text) - len(text[position:].lstrip())
        return after + len(self.closer) if text.startswith(self.closer, after) else position


PARSERS = {"hermes": Syntax("<tool_call>", "</tool_call>"), "llama3_json": Syntax()}
"""The syntax of each parser, by vLLM's names."""


class ToolParser:
    """The calls and the other text of one answer, read as it grows.

    `_rest` is the part of the answer that is not settled: text that may begin a call, or a call that
    has not ended. Inside a call, the text is parsed again only where a brace closes.
    """

    def __init__(self, name: str) -> None:
        self._syntax = PARSERS[name]
        self._rest = ""
        self._is_text = self._drops_blanks = False
        self._num_complete = 0
        self._arguments_sent: list[int] = []
        self._open: OpenCall | None = None

    @property
    def num_calls(self) -> int:
        """Return how many calls have begun."""
        return len(self._arguments_sent)

    def whole(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """Return the content and the calls of a complete answer. A call that is cut off is content."""
        read = _read(text, self._syntax, is_last=True, keeps_begun=False)
        self._arguments_sent = [len(call.arguments) for call in read.calls]
        return read.content, [call_of(call.name, as_text(json.loads(call.arguments))) for call in read.calls]

    def new(self, text: str, is_last: bool) -> tuple[str, list[dict[str, Any]]]:
        """Return the content, and the deltas of calls, that this piece of the answer adds."""
        if self._is_text:
            return text, []
        self._rest += text
        if self._open is not None and not is_last and not self._open.may_change(self._rest):
            return "", [self._added(text)] if text and self._open.sends else []
        read = _read(self._rest, self._syntax, is_last, keeps_begun=True, drops_blanks=self._drops_blanks)
        deltas: list[dict[str, Any]] = []
        for index, call in enumerate(read.calls, self._num_complete):
            if index == len(self._arguments_sent):
                self._arguments_sent.append(len(call.arguments))
                deltas.append({"index": index, **call_of(call.name, call.arguments)})
            elif added := call.arguments[self._arguments_sent[index] :]:
                deltas.append(self._added(added))
        self._settle(read)
        return read.content, deltas

    def _added(self, arguments: str) -> dict[str, Any]:
        self._arguments_sent[-1] += len(arguments)
        return {"index": len(self._arguments_sent) - 1, "function": {"arguments": arguments}}

    def _settle(self, read: Read) -> None:
        """Drop what no later text can change."""
        self._num_complete += read.num_settled_calls
        self._is_text = read.is_text
        self._drops_blanks = not read.ends_in_content and (self._drops_blanks or read.num_settled_calls > 0)
        self._rest = self._rest[read.settled :]
        if read.open_at is None:
            self._open = None
            return
        if self._open is None or read.settled:
            self._open = OpenCall(read.open_at - read.settled)
            self._open.may_change(self._rest)
        self._open.is_begun = bool(read.calls) and not read.calls[-1].complete
        self._open.sends = self._open.is_begun and read.calls[-1].is_open


class OpenCall:
    """A call that has not ended: how far its braces are counted. `sends`: all further text belongs
    to its arguments until a brace closes.
    """

    def __init__(self, start: int) -> None:
        self.is_begun = self.sends = False
        self._counted = start
        self._depth = 0
        self._in_string = False
        self._is_over = False

    def may_change(self, text: str) -> bool:
        """Count the braces up to the end of the text. Return whether the call, or its arguments, may
        have ended or begun there.
        """
        was_over, closes = self._is_over, False
        end = len(text)
        for match in MARKS.finditer(text, self._counted):
            if match[0] == "\\":  # what it escapes is still to come
                end = match.start()
            elif match[0] == '"':
                self._in_string = not self._in_string
            elif not self._in_string and match[0] in "{}":
                self._depth += 1 if match[0] == "{" else -1
                closes = closes or (match[0] == "}" and self._depth <= 1)
                self._is_over = self._is_over or self._depth <= 0
        self._counted = end
        return (closes and not was_over) or not (self.is_begun or len(text) > MAX_HEAD_CHARACTERS)


@dataclass
class Read:
    """The result of reading a text: its content and calls; how much of it, and how many of its
    calls, no later text can change; and where the JSON of a call begins that has not ended.
    """

    content: str = ""
    calls: list[Call] = field(default_factory=list)
    settled: int = 0
    num_settled_calls: int = 0
    open_at: int | None = None
    is_text: bool = False
    ends_in_content: bool = False


def _read(text: str, syntax: Syntax, is_last: bool, keeps_begun: bool, drops_blanks: bool = False) -> Read:
    """Return the content and the calls of a text that may still grow.

    Both only grow with the text, so what has been sent stays true. `keeps_begun`: a call whose name
    has been sent remains one, whatever follows. `drops_blanks`: the text follows a call directly.
    """
    read = Read()
    position = 0
    behind_call = False
    while start := syntax.start(text, position):
        read.content += _between(text[position : start[0]], drops_blanks)
        read.settled, read.num_settled_calls = start[0], len(read.calls)
        call, end = _read_call(text, start[1])
        if not is_last and end is None:
            read.open_at = start[1]
        if call is None and end is None and not is_last:
            return read
        if call is None or not (call.complete or keeps_begun):
            position = _closed(text, syntax, start[1]) if end is None else end
            read.content += text[start[0] : position]
            read.settled = position
            behind_call = False
            continue
        read.calls.append(call)
        drops_blanks = True
        if end is None:
            return read
        position = syntax.end(text, end)
        behind_call = position == end
    rest = text[position:]
    held = 0 if is_last else syntax.held(rest, behind_call)
    added = _between(rest[: len(rest) - held], drops_blanks)
    read.content += added
    read.ends_in_content = bool(added)
    read.is_text = not syntax.opener and bool(added.strip())
    if added or not behind_call:
        read.settled, read.num_settled_calls = position + len(added), len(read.calls)
    return read


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
        return Call(json.loads(head[1]), text[head.end() :], complete=False, is_open=True)
    return Call(json.loads(head[1]), text[head.end() : end], complete=False)


def _closed(text: str, syntax: Syntax, position: int) -> int:
    """Return where something that is no call ends: behind its closer, if it has one."""
    end = text.find(syntax.closer, position) if syntax.closer else -1
    return len(text) if end < 0 else end + len(syntax.closer)


def _between(text: str, drops_blanks: bool) -> str:
    return "" if drops_blanks and not text.strip() else text
