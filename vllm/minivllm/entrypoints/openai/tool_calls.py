"""Turn a constrained answer into the tools that it calls. Text that the model generates freely
stays text.

In vLLM v0.33.0: `vllm/entrypoints/openai/chat_completion/serving.py`, `vllm/parser/`.
"""

import json
import uuid
from typing import Any

from minivllm.entrypoints.openai.protocol import FunctionCall, ToolCall


class CalledTools:
    """The tool calls of one answer. With a name, the answer's text is the arguments of that tool;
    without one, it is a list of calls.
    """

    def __init__(self, name: str | None) -> None:
        self._name = name
        self._calls = _Objects()
        self._number = 0

    def whole(self, text: str) -> list[ToolCall]:
        """Return the calls in a complete text."""
        if self._name is not None:
            return [_call(self._name, text)]
        return [_call(call["name"], _as_text(call["parameters"])) for call in json.loads(text)]

    def new(self, text: str) -> list[dict[str, Any]]:
        """Return what this piece of the text adds: a named tool's arguments as they arrive, other
        calls only once complete.
        """
        if self._name is None:
            return [self._next(call["name"], _as_text(call["parameters"])) for call in self._calls.completed_by(text)]
        # The first piece opens the call, the others only add to its arguments.
        if self._number == 0:
            return [self._next(self._name, text)]
        return [{"index": 0, "function": {"arguments": text}}] if text else []

    def _next(self, name: str, arguments: str) -> dict[str, Any]:
        self._number += 1
        return {"index": self._number - 1, **_call(name, arguments).model_dump()}


class _Objects:
    """A parser that extracts the objects of a JSON list from pieces of its text."""

    def __init__(self) -> None:
        self._piece: list[str] = []
        self._depth = 0
        self._in_string = self._escaped = False

    def completed_by(self, text: str) -> list[dict[str, Any]]:
        """Return the objects that end in this piece."""
        completed = []
        for character in text:
            self._take(character)
            if character == "}" and not self._in_string and self._depth == 0:
                completed.append(json.loads("".join(self._piece)))
                self._piece = []
        return completed

    def _take(self, character: str) -> None:
        if self._in_string:
            # A quote that is not escaped ends the string.
            self._in_string = self._escaped or character != '"'
            self._escaped = character == "\\" and not self._escaped
        elif character == '"':
            self._in_string = True
        else:
            # Braces inside of strings do not count.
            self._depth += (character == "{") - (character == "}")
        # Skip what stands between the objects: brackets, commas, spaces.
        if self._piece or character == "{":
            self._piece.append(character)


def _call(name: str, arguments: str) -> ToolCall:
    return ToolCall(id=f"chatcmpl-tool-{uuid.uuid4().hex[:16]}", function=FunctionCall(name=name, arguments=arguments))


def _as_text(arguments: Any) -> str:
    return json.dumps(arguments, ensure_ascii=False)
