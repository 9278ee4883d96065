"""Turn an answer that is constrained to calls of tools into these calls. `tool_parsers.py` finds
those that a model makes freely.

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
        self.num_calls = 0

    def whole(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """Return the content and the calls of a complete answer. A list of calls that a stop string
        has cut off is content.
        """
        if self._name is not None:
            self.num_calls = 1
            return "", [call_of(self._name, text)]
        try:
            calls = json.loads(text)
        except ValueError:
            return text, []
        self.num_calls = len(calls)
        return "", [call_of(call["name"], as_text(call["parameters"])) for call in calls]

    def new(self, text: str, is_last: bool) -> tuple[str, list[dict[str, Any]]]:
        """Return what this piece of the answer adds: a named tool's arguments as they arrive, other
        calls only once complete. None of it is content.
        """
        if self._name is None:
            calls = self._completed_by(text)
            return "", [self._next(call["name"], as_text(call["parameters"])) for call in calls]
        # The first piece opens the call, the others only add to its arguments.
        if self.num_calls == 0:
            return "", [self._next(self._name, text)]
        return "", [{"index": 0, "function": {"arguments": text}}] if text else []

    def _next(self, name: str, arguments: str) -> dict[str, Any]:
        self.num_calls += 1
        return {"index": self.num_calls - 1, **call_of(name, arguments)}

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


def call_of(name: str, arguments: str) -> dict[str, Any]:
    """Return a call as clients see it, with an id of its own."""
    return {
        "id": f"chatcmpl-tool-{uuid.uuid4().hex[:16]}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def as_text(arguments: Any) -> str:
    """Return arguments as the text that clients parse."""
    return json.dumps(arguments, ensure_ascii=False)
