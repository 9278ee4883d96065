"""Derive the constraint on a request's answer from `structured_outputs`, OpenAI's
`response_format`, or a forced tool call.

In vLLM v0.33.0: `to_sampling_params` in `vllm/entrypoints/openai/chat_completion/protocol.py`,
`get_json_schema_from_tools` in `vllm/tool_parsers/utils.py`.
"""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from minivllm.config import StructuredOutputsParams
from minivllm.config.checks import require
from minivllm.entrypoints.openai import protocol

KNOWN = {field.name for field in fields(StructuredOutputsParams)}


def constraint_of(request: protocol.GenerationRequest) -> StructuredOutputsParams | None:
    """Return the request's constraint, if any; a forced tool call takes precedence over
    `response_format`.

    Raises:
        MinivllmError: there are several, or one that is not served.
    """
    own = request.structured_outputs
    settings = {name: value for name, value in (own or {}).items() if value is not None and name in KNOWN}
    further = _of_format(request.response_format)
    if isinstance(request, protocol.ChatCompletionRequest) and request.forced_tools:
        further = {"json": _schema_of_tools(request)}
    doubled = settings.keys() & further.keys()
    require(not doubled, f"structured_outputs and response_format both set {', '.join(doubled)}; give only one")
    settings |= further
    if isinstance(settings.get("json"), bool):
        # JSON Schema: true allows anything, false nothing.
        settings["json"] = {} if settings["json"] else {"not": {}}
    return StructuredOutputsParams(**settings) if settings or own is not None else None


def _of_format(form: protocol.ResponseFormat | None) -> dict[str, Any]:
    if form is None or form.type != "json_schema":
        return {"json_object": True} if form and form.type == "json_object" else {}
    schema = (form.json_schema or {}).get("schema")
    require(schema is not None, "the json_schema of response_format has no schema", "response_format")
    return {"json": schema}


def _schema_of_tools(request: protocol.ChatCompletionRequest) -> dict[str, Any]:
    """Return the schema of a named tool's arguments, or of a list of calls."""
    if request.tool_choice != "required":
        return _arguments_of(request.forced_tools[0])
    calls = [_call_of(tool) for tool in request.forced_tools]
    most = {"maxItems": 1} if request.parallel_tool_calls is False else {}
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}, **most}
    # References such as "#/$defs/x" are resolved from the root.
    definitions = _definitions(calls)
    return schema | {"$defs": definitions} if definitions else schema


def _arguments_of(tool: protocol.ChatCompletionToolsParam) -> dict[str, Any]:
    return dict(tool.function.parameters or {"type": "object"})


def _call_of(tool: protocol.ChatCompletionToolsParam) -> dict[str, Any]:
    fields = {"name": {"const": tool.function.name}, "parameters": _arguments_of(tool)}
    return {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}


def _definitions(calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Move the tools' definitions out of their schemas, since references to them start at the root."""
    merged: dict[str, Any] = {}
    for call in calls:
        definitions = call["properties"]["parameters"].pop("$defs", {})
        require(isinstance(definitions, dict), "the $defs of a tool's parameters must be an object", "tools")
        for name, definition in definitions.items():
            is_same = merged.setdefault(name, definition) == definition
            require(is_same, f"two tools define {name!r} differently in their $defs", "tools")
    return merged
