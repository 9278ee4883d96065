"""Normalize messages into the form that chat templates expect.

Clients write messages in several ways: the content is a text, a list of parts or null, and the
arguments of a tool call are JSON. A template always gets the same form.

In vLLM v0.33.0: `vllm/renderers/chat_utils/chat_message.py` (`parse_chat_messages`).
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from minivllm.errors import MinivllmError
from minivllm.logger import init_logger

logger = init_logger(__name__)
ContentFormat = Literal["string", "openai"]
"""What a template gets as a message's content: one text, or a list of parts such as {"type":
"text", "text": …}.
"""
TEXT_KEYS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
"""The types of parts that are texts, and the key that each has its text under."""


def normalize(messages: Sequence[Any], content_format: ContentFormat) -> list[dict[str, Any]]:
    """Return the messages with contents in this format, the arguments of tool calls as
    dictionaries, and no empty lists.

    Raises:
        MinivllmError: a message, a part of its content or a tool call has a form that is not
            served.
    """
    return [_normalize(message, content_format) for message in messages]


def without_developers(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with developers' as the system's, all of them merged into the first: most
    templates know no developer, and take a system message at the beginning only.
    """
    roles = [role if isinstance(role := message.get("role"), str) else None for message in messages]
    if "developer" not in roles:
        return messages
    instructions = [each for each, role in zip(messages, roles, strict=True) if role in ("developer", "system")]
    others = [each for each, role in zip(messages, roles, strict=True) if role not in ("developer", "system")]
    if len(instructions) == 1 and instructions[0] is messages[0]:
        return [{**instructions[0], "role": "system"}, *others]
    texts = [text for message in instructions if (text := _text_of(message["content"]))]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others]


def _text_of(content: str | list[dict[str, Any]]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _normalize(message: Any, content_format: ContentFormat) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise MinivllmError(f"a message is {type(message).__name__}; it must be a dictionary with role and content")
    parts = _parts(message.get("content"))
    normalized = {**message, "content": parts}
    if content_format == "string":
        normalized["content"] = "\n".join(part["text"] for part in parts if part["text"])
    elif message.get("role") == "tool":  # most templates that loop over parts expect a text here
        normalized["content"] = "\n".join(part["text"] for part in parts)
    tool_calls = normalized.pop("tool_calls", None)
    if tool_calls and message.get("role") == "assistant":
        if not isinstance(tool_calls, Sequence) or isinstance(tool_calls, str):
            raise MinivllmError(f"a message's tool_calls are {type(tool_calls).__name__}; they must be a list")
        normalized["tool_calls"] = [_normalize_call(call) for call in tool_calls]
    return normalized


def _parts(content: Any) -> list[dict[str, Any]]:
    if content is None:
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, Sequence) or isinstance(content, bytes | bytearray):
        raise MinivllmError(
            f"a message's content is {type(content).__name__}; it must be a string, a list of parts or null"
        )
    return [part for entry in content if (part := _part(entry)) is not None]


def _part(part: Any) -> dict[str, Any] | None:
    """Return the part's text; None if it has none."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
    if not isinstance(part, Mapping) or not isinstance(kind, str) or kind not in TEXT_KEYS:
        raise MinivllmError(f"a part of a message's content is {str(kind)[:100]!r}; only text parts are served")
    text = part.get(TEXT_KEYS[kind])
    if text is None:
        return None
    if not isinstance(text, str):
        raise MinivllmError(f"the text of a message's content part is {type(text).__name__}; it must be a string")
    # Templates may read further keys, such as cache hints.
    others = {key: value for key, value in part.items() if key not in TEXT_KEYS}
    return {**others, "type": "text", "text": text}


def _normalize_call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or call.get("type", "function") != "function":
        raise MinivllmError('a message\'s tool call must be {"type": "function", "function": {"name": …}}', "messages")
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}}


def _arguments(arguments: Any) -> Mapping[str, Any]:
    """Return a tool call's arguments as a dictionary.

    Arguments that do not parse become an empty dictionary: the call is part of the conversation's
    history, so refusing it would break every later turn.
    """
    if not arguments:
        return {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            logger.warning(
                "A tool call's arguments (%d characters) are not JSON; using {} in their place", len(arguments)
            )
            return {}
    if isinstance(arguments, Mapping):
        return arguments
    logger.warning("A tool call's arguments are %s, not an object; using {} in their place", type(arguments).__name__)
    return {}
