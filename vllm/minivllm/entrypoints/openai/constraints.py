"""Derive the constraint on a request's answer from `structured_outputs`, OpenAI's
`response_format`, or a forced tool call.

In vLLM v0.33.0: `to_sampling_params` in `vllm/entrypoints/openai/chat_completion/protocol.py`,
`get_json_schema_from_tools` in `vllm/tool_parsers/utils.py`.
"""

from collections.abc import Sequence
from typing import Any

from minivllm.config import StructuredOutputsParams
from minivllm.entrypoints.openai.protocol import (
    ChatCompletionNamedToolChoiceParam,
    ChatCompletionRequest,
    ChatCompletionToolsParam,
    GenerationRequest,
    ResponseFormat,
)
from minivllm.errors import MinivllmError


def constraint_of(request: GenerationRequest) -> StructuredOutputsParams | None:
    """Return the request's constraint, if any; a forced tool call takes precedence over
    `response_format`.

    Raises:
        MinivllmError: there are several, or one that is not served.
    """
    own = request.structured_outputs
    fields = own.model_dump(exclude_none=True, by_alias=True) if own is not None else {}
    schema = _schema_of_tools(request) if isinstance(request, ChatCompletionRequest) else None
    further = _of_format(request.response_format) if schema is None else {"json": schema}
    if doubled := fields.keys() & further.keys():
        raise MinivllmError(f"structured_outputs and response_format both set {', '.join(doubled)}; give only one")
    fields |= further
    if isinstance(fields.get("json"), bool):
        # JSON Schema: true allows anything, false nothing.
        fields["json"] = {} if fields["json"] else {"not": {}}
    return StructuredOutputsParams(**fields) if fields or own is not None else None


def forced_tools(request: ChatCompletionRequest) -> list[ChatCompletionToolsParam]:
    """Return the tools that the answer must call: the named tool, or with "required" all of them,
    any of which will do.
    """
    choice, tools = request.tool_choice, request.tools or []
    if isinstance(choice, ChatCompletionNamedToolChoiceParam):
        return [tool for tool in tools if tool.function.name == choice.function.name][:1]
    return tools if choice == "required" else []


def _of_format(form: ResponseFormat | None) -> dict[str, Any]:
    if form is None or form.type == "text":
        return {}
    if form.type == "json_object":
        return {"json_object": True}
    if form.type != "json_schema":
        raise MinivllmError(f"response_format {form.type} is not served here", "response_format")
    schema = form.json_schema.json_schema if form.json_schema is not None else None
    if schema is None:
        raise MinivllmError("the json_schema of response_format has no schema", "response_format")
    return {"json": schema}


def _schema_of_tools(request: ChatCompletionRequest) -> dict[str, Any] | None:
    """Return the schema of a named tool's arguments, or of a list of calls; None if no tool call is
    forced.
    """
    tools = forced_tools(request)
    if not tools:
        return None
    if request.tool_choice != "required":
        return _arguments_of(tools[0])
    calls = [_call_of(tool) for tool in tools]
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if request.parallel_tool_calls is False:
        schema["maxItems"] = 1
    # References such as "#/$defs/x" are resolved from the root.
    definitions = _definitions(calls)
    return schema | {"$defs": definitions} if definitions else schema


def _arguments_of(tool: ChatCompletionToolsParam) -> dict[str, Any]:
    return dict(tool.function.parameters or {"type": "object"})


def _call_of(tool: ChatCompletionToolsParam) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": tool.function.name}, "parameters": _arguments_of(tool)},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _definitions(calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Move the tools' definitions out of their schemas, since references to them start at the root."""
    found: dict[str, Any] = {}
    for call in calls:
        definitions = call["properties"]["parameters"].pop("$defs", {})
        if not isinstance(definitions, dict):
            raise MinivllmError("the $defs of a tool's parameters must be an object", "tools")
        for name, definition in definitions.items():
            if found.setdefault(name, definition) != definition:
                raise MinivllmError(f"two tools define {name!r} differently in their $defs", "tools")
    return found
