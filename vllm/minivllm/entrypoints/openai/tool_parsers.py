"""Find the calls of tools in an answer, whole or while it is streamed: those that a model makes
freely, and those that the request demands.

In vLLM v0.33.0: `vllm/tool_parsers/hermes_tool_parser.py` (`Hermes2ProToolParser`),
`vllm/tool_parsers/llama_tool_parser.py` (`Llama3JsonToolParser`), `vllm/parser/`. There one
malformed call makes text of the whole answer; here only the malformed call is text.
"""

import json
import re
import uuid
from dataclasses import dataclass, field
from typing import Any

HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\\x00-\x1f]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
"""A call up to its arguments, with its keys in the order in which models are trained to write them."""
MAX_HEAD_CHARACTERS = 512
"""A call whose arguments have not begun by then is sent once it is complete."""
MARKS = re.compile(r'\\.|\\\Z|["{}<]', re.DOTALL)
"""The signs that decide where JSON ends; a backslash at the end of the text stands alone."""
TAG = r"<\|python_tag\|>"
decode = json.JSONDecoder().raw_decode


def _beginning_of(text: str) -> str:
    """Return a pattern for the end of a text that may still become this one."""
    return rf"(?:{'|'.join(re.escape(text[:size]) for size in range(len(text), 0, -1))})\Z"


@dataclass(frozen=True)
class Syntax:
    """The text around each call: patterns for what opens it, and for the beginning of that at the
    end of a text; and what may close it. In some, an answer is either calls or text; in some, a
    call is sent only once it is complete.
    """

    opener: re.Pattern[str]
    begun: re.Pattern[str]
    closer: str = ""
    is_calls_only: bool = False
    is_sent_whole: bool = False


PARSERS = {
    "hermes": Syntax(re.compile("<tool_call>"), re.compile(_beginning_of("<tool_call>")), "</tool_call>"),
    "llama3_json": Syntax(
        re.compile(rf"\A\s*(?:{TAG})?\s*;?\s*(?=\{{)"),
        re.compile(rf"\A\s*(?:(?:{TAG})?\s*;?\s*\Z|{_beginning_of('<|python_tag|>')})"),
        is_calls_only=True,
    ),
}
"""The syntax of each parser, by vLLM's names."""
REQUIRED = Syntax(re.compile(r"[\[,\s]+(?=\{)"), re.compile(r"[\[,\s]+\Z"), "]", True, is_sent_whole=True)
"""The JSON list of calls that an answer is constrained to by the tool choice "required"."""


@dataclass
class OpenCall:
    """A call that may not have ended. Positions are those in the parser's unsettled text, which
    begins with the call's opener.
    """

    start: int
    counted: int
    depth: int = 0
    in_string: bool = False
    ends: dict[int, int] = field(default_factory=dict)
    """Depth -> where the braces first closed to it: at 0 the call ends, at 1 its arguments do."""
    head: re.Match[str] | None = None
    sent: int | None = None
    """The end of the arguments that were sent; None while not even the name was."""

    def read(self, text: str, is_sent_whole: bool) -> None:
        """Read on up to the end of the text, or of the call."""
        if self.head is None and self.counted < MAX_HEAD_CHARACTERS and not is_sent_whole:
            self.head = HEAD.match(text, self.start)
        end = len(text)
        for match in MARKS.finditer(text, self.counted):
            if match[0] == "\\":  # what it escapes is still to come
                end = match.start()
            elif match[0] == '"':
                self.in_string = not self.in_string
            elif not self.in_string and match[0] == "{":
                self.depth += 1
            elif not self.in_string and match[0] == "}":
                self.depth = max(0, self.depth - 1)
                self.ends.setdefault(self.depth, match.end())
            elif not self.in_string and match[0] == "<":  # never JSON
                self.ends[0] = match.start()
            if 0 in self.ends:
                break
        self.counted = end

    def parsed(self, text: str) -> tuple[str, str] | None:
        """Return the name and the arguments of a call that has ended; None if it is malformed."""
        try:
            call, _ = decode(text, len(text) - len(text[self.start :].lstrip()))
        except (ValueError, RecursionError):
            return None
        arguments = call.get("arguments", call.get("parameters")) if isinstance(call, dict) else None
        is_call = isinstance(arguments, dict) and isinstance(call.get("name"), str)
        return (call["name"], as_text(arguments)) if is_call else None


class ToolParser:
    """The calls and the other text of one answer, read as it grows.

    `_rest` is the part of the answer that is not settled: text that may begin a call, or a call that
    has not ended. A call is parsed once, at its end; until then its braces are counted.
    """

    def __init__(self, syntax: Syntax) -> None:
        self._syntax = syntax
        self._rest = self._closer = ""
        self._open: OpenCall | None = None
        self._is_text = self._is_behind_call = False
        self.num_calls = 0

    def whole(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """Return the content and the calls of a complete answer. A call that is cut off is content."""
        content, deltas = self.new(text, is_last=True, keeps_begun=False)
        functions = [delta["function"] for delta in deltas]
        return content, [call_of(each["name"], as_text(json.loads(each["arguments"]))) for each in functions]

    def new(self, text: str, is_last: bool, keeps_begun: bool = True) -> tuple[str, list[dict[str, Any]]]:
        """Return the content, and the deltas of calls, that this piece of the answer adds.

        Both only grow with the text, so what has been sent stays true. `keeps_begun`: a call whose
        name has been sent remains one, whatever follows.
        """
        self._rest += text
        content = "" if self._open else self._text(is_last)
        deltas: list[dict[str, Any]] = []
        while (call := self._open) is not None:
            call.read(self._rest, self._syntax.is_sent_whole)
            end = call.ends.get(0)
            if end is None and not is_last:
                return content, deltas + self._begun(call)
            if (parsed := call.parsed(self._rest)) is None and not (call.head and keeps_begun):
                # Only the opener is sure to be text.
                content += self._rest[: call.start]
                end = call.start
                self._is_text, self._is_behind_call = self._syntax.is_calls_only, False
            else:
                deltas += self._begun(call) if call.head or parsed is None else [self._first(*parsed)]
                self._closer, self._is_behind_call = self._syntax.closer, True
            self._rest = self._rest[len(self._rest) if end is None else end :]
            self._open = None
            content += self._text(is_last)
        return content, deltas

    def _first(self, name: str, arguments: str) -> dict[str, Any]:
        self.num_calls += 1
        return {"index": self.num_calls - 1, **call_of(name, arguments)}

    def _begun(self, call: OpenCall) -> list[dict[str, Any]]:
        """Return the deltas of what has come of a call's arguments."""
        if call.head is None:
            return []
        start = call.head.end() if call.sent is None else call.sent
        end = call.ends.get(1, call.ends.get(0, len(self._rest)))
        arguments = self._rest[start:end]
        is_first, call.sent = call.sent is None, max(start, end)
        if is_first:
            return [self._first(call.head[1], arguments)]
        return [{"index": self.num_calls - 1, "function": {"arguments": arguments}}] if arguments else []

    def _text(self, is_last: bool) -> str:
        """Take the text in front of the next call, and open that call. Blanks behind a call are
        dropped if no other text follows them.
        """
        bare = self._rest.lstrip()
        if self._closer and self._closer.startswith(bare) and not is_last:
            return ""
        if self._closer and bare.startswith(self._closer):
            self._rest = bare.removeprefix(self._closer)
        self._closer = ""
        opener = None if self._is_text else self._syntax.opener.search(self._rest)
        begun = None if self._is_text or is_last else self._syntax.begun.search(self._rest)
        following = opener or begun
        text = self._rest[: following.start()] if following else self._rest
        is_blank = self._is_behind_call and not text.strip()
        if is_blank and opener is None and not is_last:
            return ""
        self._rest = self._rest[len(text) :]
        if opener is not None:
            self._open = OpenCall(len(opener[0]), len(opener[0]))
        if is_blank or not text:
            return ""
        self._is_behind_call = False
        self._is_text = self._is_text or (self._syntax.is_calls_only and bool(text.strip()))
        return text


class NamedTool:
    """The one call of an answer that is constrained to the arguments of the tool that the request
    names.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.num_calls = 0

    def whole(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """Return no content, and the call."""
        return "", [call_of(self._name, text)]

    def new(self, text: str, is_last: bool) -> tuple[str, list[dict[str, Any]]]:
        """Return no content, and what a piece of the answer adds. The first piece opens the call."""
        if self.num_calls == 0:
            self.num_calls = 1
            return "", [{"index": 0, **call_of(self._name, text)}]
        return "", [{"index": 0, "function": {"arguments": text}}] if text else []


def call_of(name: str, arguments: str) -> dict[str, Any]:
    """Return a call as clients see it, with an id of its own."""
    call_id = f"chatcmpl-tool-{uuid.uuid4().hex[:16]}"
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def as_text(arguments: Any) -> str:
    """Return arguments as the text that clients parse."""
    return json.dumps(arguments, ensure_ascii=False)
