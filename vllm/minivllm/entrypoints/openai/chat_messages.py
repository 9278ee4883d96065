"""Normalize messages into the form that chat templates expect.

Clients write messages in several ways: the content is a text, a list of parts or null, and the
arguments of a tool call are JSON. A template always gets the same form.

In vLLM v0.33.0: `vllm/renderers/chat_utils/chat_message.py` (`parse_chat_messages`).
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal

from minivllm.config.checks import require
from minivllm.logger import init_logger

logger = init_logger(__name__)
ContentFormat = Literal["string", "openai"]
"""What a template gets as a message's content: one text, or a list of parts such as {"type":
"text", "text": …}.
"""
TEXT_KEYS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
"""The types of parts that are texts, and the key that each has its text under."""


def normalize(message: Any, content_format: ContentFormat) -> dict[str, Any]:
    """Return the message with its content in this format, the arguments of tool calls as
    dictionaries, and no empty lists.

    Raises:
        MinivllmError: the message, a part of its content or a tool call has a form that is not
            served.
    """
    wrong = f"a message is {type(message).__name__}; it must be a dictionary with role and content"
    require(isinstance(message, Mapping), wrong)
    parts = _parts(message.get("content"))
    normalized = {**message, "content": parts}
    if content_format == "string":
        normalized["content"] = "\n".join(part["text"] for part in parts if part["text"])
    elif message.get("role") == "tool":  # most templates that loop over parts expect a text here
        normalized["content"] = _text_of(parts)
    calls = normalized.pop("tool_calls", None)
    if calls and message.get("role") == "assistant":
        wrong = f"a message's tool_calls are {type(calls).__name__}; they must be a list"
        require(isinstance(calls, list | tuple), wrong)
        normalized["tool_calls"] = [_normalize_call(call) for call in calls]
    return normalized


def without_developers(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with developers' as the system's, all of them merged into the first: most
    templates know no developer, and take a system message at the beginning only.
    """
    if not any(message.get("role") == "developer" for message in messages):
        return messages
    instructions = [message for message in messages if message.get("role") in ("developer", "system")]
    others = [message for message in messages if message.get("role") not in ("developer", "system")]
    if len(instructions) == 1 and instructions[0] is messages[0]:
        return [{**instructions[0], "role": "system"}, *others]
    texts = [text for message in instructions if (text := _text_of(message["content"]))]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others]


def _text_of(content: str | list[dict[str, Any]]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _parts(content: Any) -> list[dict[str, Any]]:
    content = [content] if isinstance(content, str) else content or []
    wrong = f"a message's content is {type(content).__name__}; it must be a string, a list of parts or null"
    require(isinstance(content, list | tuple), wrong)
    return [part for entry in content if (part := _part(entry)) is not None]


def _part(part: Any) -> dict[str, Any] | None:
    """Return the part's text; None if it has none."""
    part = {"text": part} if isinstance(part, str) else part
    kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
    is_text = isinstance(part, Mapping) and isinstance(kind, str) and kind in TEXT_KEYS
    require(is_text, f"a part of a message's content is {str(kind)[:100]!r}; only text parts are served")
    text = part.get(TEXT_KEYS[kind])
    wrong = f"the text of a message's content part is {type(text).__name__}; it must be a string"
    require(isinstance(text, str | None), wrong)
    # Templates may read further keys, such as cache hints.
    others = {key: value for key, value in part.items() if key not in TEXT_KEYS}
    return None if text is None else {**others, "type": "text", "text": text}


def _normalize_call(call: Any) -> dict[str, Any]:
    function: Any = call.get("function") if isinstance(call, Mapping) else None
    is_call = isinstance(function, Mapping) and call.get("type", "function") == "function"
    require(is_call, 'a message\'s tool call must be {"type": "function", "function": {"name": …}}', "messages")
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}}


def _arguments(arguments: Any) -> Mapping[str, Any]:
    """Return a tool call's arguments as a dictionary.

    Arguments that do not parse become an empty dictionary: the call is part of the conversation's
    history, so refusing it would break every later turn.
    """
    with suppress(ValueError, RecursionError):
        parsed = json.loads(arguments or "{}") if isinstance(arguments, str | None) else arguments
        if isinstance(parsed, Mapping):
            return parsed
    logger.warning("A tool call's arguments are no JSON object; using {} in their place")
    return {}
