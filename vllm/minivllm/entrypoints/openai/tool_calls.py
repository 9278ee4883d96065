"""Turn a constrained answer into the tools that it calls. Text that the model generates freely
stays text.

In vLLM v0.33.0: `vllm/entrypoints/openai/chat_completion/serving.py`, `vllm/parser/`.
"""

import json
import uuid
from typing import Any


class CalledTools:
    """The tool calls of one answer. With a name, the answer's text is the arguments of that tool;
    without one, it is a list of calls.
    """

    def __init__(self, name: str | None) -> None:
        self._name = name
        self._unread = ""
        self._number = 0

    def whole(self, text: str) -> list[dict[str, Any]]:
        """Return the calls in a complete text."""
        if self._name is not None:
            return [_call(self._name, text)]
        return [_call(call["name"], _as_text(call["parameters"])) for call in json.loads(text)]

    def new(self, text: str) -> list[dict[str, Any]]:
        """Return what this piece of the text adds: a named tool's arguments as they arrive, other
        calls only once complete.
        """
        if self._name is None:
            calls = self._completed_by(text)
            return [self._next(call["name"], _as_text(call["parameters"])) for call in calls]
        # The first piece opens the call, the others only add to its arguments.
        if self._number == 0:
            return [self._next(self._name, text)]
        return [{"index": 0, "function": {"arguments": text}}] if text else []

    def _next(self, name: str, arguments: str) -> dict[str, Any]:
        self._number += 1
        return {"index": self._number - 1, **_call(name, arguments)}

    def _completed_by(self, text: str) -> list[dict[str, Any]]:
        """Return the objects of a JSON list that end in this piece of its text."""
        self._unread += text
        calls = []
        # Only a brace can end an object, so most pieces are not parsed.
        while "}" in text and (start := self._unread.find("{")) >= 0:
            try:
                call, end = json.JSONDecoder().raw_decode(self._unread, start)
            except ValueError:
                break
            calls.append(call)
            self._unread = self._unread[end:]
        return calls


def _call(name: str, arguments: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-tool-{uuid.uuid4().hex[:16]}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _as_text(arguments: Any) -> str:
    return json.dumps(arguments, ensure_ascii=False)
