"""The body of `POST /v1/responses`, which is turned into that of a chat.

Responses are not stored, so whatever refers to an earlier one is refused. Hosted tools, such as web
search, are ignored, as in vLLM without a tool server.

In vLLM v0.33.0: `vllm/entrypoints/openai/responses/protocol.py` (`ResponsesRequest`),
`vllm/entrypoints/openai/responses/utils.py` (`construct_input_messages`).
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi.exceptions import RequestValidationError
from pydantic import ConfigDict, Field, ValidationError

from minivllm.config.checks import require
from minivllm.entrypoints.openai.errors import RequestError
from minivllm.entrypoints.openai.protocol import ChatCompletionRequest, Data, GenerationRequest, Many, OpenAIBaseModel
from minivllm.entrypoints.openai.stream import as_json

SAME_AS_A_CHATS = {*GenerationRequest.model_fields, "parallel_tool_calls", "chat_template_kwargs"}
NOT_IN_RESPONSES = (
    "n", "stream_options", "response_format", "min_tokens", "allowed_token_ids", "prompt_logprobs", "bad_words",
    "return_token_ids", "return_tokens_as_token_ids",
)  # fmt: skip
"""Fields of completions and chats that are ignored here."""
ECHOED = (
    "instructions", "metadata", "max_tool_calls", "reasoning", "safety_identifier", "text", "tools", "tool_choice",
    "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention", "service_tier", "truncation", "user",
)  # fmt: skip
"""Fields that a response repeats from its request."""
Includable = Literal[
    "code_interpreter_call.outputs", "computer_call_output.output.image_url", "file_search_call.results",
    "message.input_image.image_url", "message.output_text.logprobs", "reasoning.encrypted_content",
]  # fmt: skip
INVALID = "invalid_request_error"
Penalty = Annotated[float, Field(ge=-2, le=2)]


def not_stored(response_id: str) -> RequestError:
    """Return the error for a response that is looked for after it was sent."""
    message = f"Response with id '{response_id[:200]}' not found: responses are not stored here; send the whole input."
    return RequestError(message, 404, INVALID, "response_id")


class TextFormat(OpenAIBaseModel):
    """The form of the answer. A schema has its name beside it, and is not nested as in a chat."""

    model_config = ConfigDict(extra="allow")

    type: Literal["text", "json_object", "json_schema"]


class TextConfig(OpenAIBaseModel):
    """Options of the answer's text."""

    model_config = ConfigDict(extra="allow")

    format: TextFormat | None = None


class ResponsesRequest(GenerationRequest):
    """The body of `POST /v1/responses`."""

    NOT_SERVED = (*GenerationRequest.NOT_SERVED, "prompt", "previous_input_messages", "enable_response_messages")

    background: bool | None = False
    input: str | Many[dict[str, Any]]
    include: Many[Includable] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    parallel_tool_calls: bool | None = True
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    reasoning: dict[str, Any] | None = None
    safety_identifier: str | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] = "auto"
    store: bool | None = True
    text: TextConfig | None = None
    tool_choice: str | dict[str, Any] = "auto"
    tools: Many[dict[str, Any]] = Field(default_factory=list)
    top_logprobs: int | None = 0
    truncation: Literal["auto", "disabled"] | None = "disabled"
    chat_template_kwargs: dict[str, Any] | None = None

    @classmethod
    def check(cls, data: Data) -> None:
        for name in NOT_IN_RESPONSES:
            data.pop(name, None)
        super().check(data)

    def as_chat(self) -> "ResponsesChatRequest":
        """Return the chat that answers this request.

        Raises:
            MinivllmError: the request asks for something that is not served.
            RequestValidationError: a message of the input has a wrong type.
        """
        if self.previous_response_id is not None:
            raise not_stored(self.previous_response_id)
        if self.background:
            raise RequestError("background needs stored responses; none are stored here", 400, INVALID, "background")
        functions = [_function(tool) for tool in self.tools if str(tool.get("type")) not in HOSTED]
        require(functions or self.tool_choice in ("auto", "none"), "tool_choice needs function tools", "tool_choice")
        messages = [{"role": "system", "content": self.instructions}] if self.instructions else []
        last = self.input[-1] if isinstance(self.input, list) and self.input else {}
        goes_on = last.get("type", "message") == "message" and last.get("status") in ("in_progress", "incomplete")
        echoed = self.model_dump(include=set(ECHOED)) | ({} if self.tools else {"tool_choice": "none"})
        for name, value in echoed.items():
            try:
                as_json(value)
            except ValueError:
                message = f"{name} cannot be repeated in the answer: it has half a character, or is nested too deeply"
                raise RequestError(message, 400, INVALID, name) from None
        fields = {name: getattr(self, name) for name in SAME_AS_A_CHATS & self.model_fields_set} | {
            "messages": messages + messages_of(self.input),
            "max_output_tokens": self.max_output_tokens,
            "reasoning_effort": (self.reasoning or {}).get("effort"),
            "continue_final_message": goes_on,
            "add_generation_prompt": not goes_on,
            "echoed": echoed,
        }
        if functions:
            fields |= {"tools": functions, "tool_choice": _choice(self.tool_choice)}
        if "message.output_text.logprobs" in (self.include or ()):
            fields |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        if self.text and (form := self.text.format):
            require(self.structured_outputs is None, "give structured_outputs or text.format", "structured_outputs")
            fields["response_format"] = {"type": form.type, "json_schema": form.model_extra}
        try:
            return ResponsesChatRequest.model_validate(fields)
        except ValidationError as error:
            # The client knows the messages as its input.
            errors = error.errors(include_url=False)
            for each in errors:
                each["loc"] = ("body", *("input" if part == "messages" else part for part in each["loc"]))
            errors[0]["loc"] = errors[0]["loc"][:2]  # vLLM's first error is always that the input is no string
            raise RequestValidationError(errors) from None


class ResponsesChatRequest(ChatCompletionRequest):
    """The chat behind a response, and the fields that the response repeats."""

    LIMITS = ("max_output_tokens",)

    max_output_tokens: int | None
    echoed: Data


HOSTED = {
    "web_search", "web_search_preview", "file_search", "code_interpreter", "image_generation", "mcp",
    "computer_use_preview", "local_shell", "shell", "apply_patch", "tool_search",
}  # fmt: skip
"""Types of tools that the server itself would have to run."""


def _function(tool: Data) -> Data:
    kind = tool.get("type")
    require(kind == "function", f"a tool's type is {str(kind)[:60]!r}; only functions are served", "tools")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _choice(choice: str | Data) -> str | Data:
    """Return a chat's form of a tool choice."""
    if isinstance(choice, str):
        return choice
    is_function = choice.get("type") == "function"
    require(is_function, 'tool_choice must be "none", "auto", "required" or name a function', "tool_choice")
    return {"type": "function", "function": {"name": choice.get("name")}}


def messages_of(items: str | Sequence[Data]) -> list[Data]:
    """Return the messages of a conversation that is given as a text or as items; one message of the
    assistant spans its reasoning, text and calls.

    Raises:
        MinivllmError: an item is of a type that is not served.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[Data] = []
    for item in items:
        message, last = _message(item), messages[-1] if messages else {}
        joins = message["role"] == last.get("role") == "assistant"
        calls, before = message.get("tool_calls"), last.get("tool_calls", [])
        if joins and isinstance(calls, list) and isinstance(before, list):
            last["tool_calls"] = [*before, *calls]
        elif joins and message.keys() & last.keys() == {"role"}:
            last |= message
        else:
            messages.append(message)
    return messages


def _message(item: Data) -> Data:
    """Return the message, or the part of one, that an item stands for."""
    kind = item.get("type", "message")
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "tool_calls": [call]}
    if kind == "function_call_output":
        return {"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")}
    if kind == "reasoning" and not item.get("encrypted_content"):
        parts = item.get("content") or item.get("summary")
        texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
        return {"role": "assistant", "reasoning": "".join(map(str, texts))}
    require(kind == "message" and "role" in item, f"an input item of type {str(kind)[:60]!r} is not served", "input")
    return {name: value for name, value in item.items() if name not in ("id", "status", "type", "phase")}
