"""Requests and replies on the wire, in the form that OpenAI's and vLLM's clients expect.

Unknown fields of a request are ignored. What pydantic finds wrong and what the checks below find
wrong are two types of error on the wire (`errors.py`). Null fields of a whole reply are sent; a
stream's event has only those that are set.

In vLLM v0.33.0: `protocol.py` in `vllm/entrypoints/openai/completion/` and `.../chat_completion/`,
`vllm/entrypoints/generate/base/protocol.py`, `vllm/entrypoints/serve/tokenize/protocol.py`.
"""

import time
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NotRequired

from pydantic import BaseModel, ConfigDict, Field, model_validator
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from minivllm.errors import MinivllmError
from minivllm.sampling_params import RequestOutputKind, SamplingParams

Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
TokenId = Annotated[int, Field(ge=0, lt=2**63)]
Data = dict[str, Any]


class OpenAIBaseModel(BaseModel):
    """A request or a reply. Unknown fields from a client are ignored."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class CheckedRequest(OpenAIBaseModel):
    """A request whose combinations of fields are checked before pydantic checks the types of the
    fields.
    """

    @model_validator(mode="before")
    @classmethod
    def _check_combinations(cls, data: Any) -> Any:
        if isinstance(data, dict):
            cls.check(data)
        return data

    @classmethod
    def check(cls, data: Data) -> None:
        """Check combinations of fields, and everything that vLLM checks before types.

        Raises:
            MinivllmError: two fields do not go together, or one has a value that is never served.
        """


# What both kinds of requests share


class StreamOptions(OpenAIBaseModel):
    """The events in which a stream reports usage: a last one, or each event too."""

    include_usage: bool | None = True
    continuous_usage_stats: bool | None = False


class JsonSchemaResponseFormat(OpenAIBaseModel):
    """A schema that the answer must fit."""

    name: str
    description: str | None = None
    json_schema: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(OpenAIBaseModel):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaResponseFormat | None = None


class StructuredOutputsParams(OpenAIBaseModel):
    """A constraint on the answer; only one kind may be set."""

    json_: str | dict[str, Any] | bool | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None


class GenerationRequest(CheckedRequest):
    """The fields that completions and chat completions share. None means the model's default, or
    that the feature is off.
    """

    DEFAULTS: ClassVar[Mapping[str, float]] = {
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
    }

    model: str | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    n: int | None = 1
    presence_penalty: float | None = None
    seed: Int64 | None = None
    stop: str | list[str] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    user: str | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsParams | None = None

    use_beam_search: bool = False
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: Annotated[Int64, Field(ge=-1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    allowed_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    bad_words: list[str] = []

    priority: Int64 = 0
    request_id: str | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    repetition_detection: dict[str, Any] | None = None
    thinking_token_budget: int | None = None

    @property
    def num_logprobs(self) -> int | None:
        """How many of the most likely tokens to show at each position, besides the chosen one."""
        raise NotImplementedError

    @property
    def num_prompt_logprobs(self) -> int | None:
        """How many of the most likely tokens to show at each position of the prompt."""
        return self.prompt_logprobs

    @property
    def include_usage(self) -> bool:
        """Return whether a stream ends with an event that reports its usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Return whether each event of a stream reports usage."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def to_sampling_params(self, max_tokens: int, defaults: Mapping[str, Any], vocab_size: int) -> SamplingParams:
        """Return the engine's parameters; the model's `defaults` take precedence over OpenAI's.

        Raises:
            MinivllmError: a value is outside its range.
        """
        chosen = {name: getattr(self, name) for name in self.DEFAULTS}
        # The request's own value, else the model's default, else OpenAI's.
        known = {
            name: defaults.get(name, self.DEFAULTS[name]) if value is None else value for name, value in chosen.items()
        }
        return SamplingParams(
            **known | {"top_k": min(known["top_k"], vocab_size)},
            n=1 if self.n is None else self.n,
            seed=self.seed,
            stop=self.stop or None,
            stop_token_ids=self.stop_token_ids or None,
            bad_words=self.bad_words or None,
            ignore_eos=self.ignore_eos,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            logprobs=self.num_logprobs,
            prompt_logprobs=self.num_prompt_logprobs,
            skip_special_tokens=self.skip_special_tokens,
            include_stop_str_in_output=self.include_stop_str_in_output,
            logit_bias=_token_ids_of(self.logit_bias),
            allowed_token_ids=self.allowed_token_ids,
            output_kind=RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY,
            extra_args={"kv_transfer_params": self.kv_transfer_params} if self.kv_transfer_params else None,
        )

    @classmethod
    def check(cls, data: Data) -> None:
        super().check(data)
        _check_counts(data, "prompt_logprobs")
        if data.get("stream_options") and not data.get("stream"):
            raise MinivllmError("stream_options need `stream: true`", "stream_options")
        # They come with the first event only, and that form has no field for them.
        if data.get("stream") and (data.get("prompt_logprobs") or 0) != 0:
            raise MinivllmError("prompt_logprobs are not available with `stream: true`", "prompt_logprobs")
        form = data.get("response_format")
        if isinstance(form, dict) and form.get("type") == "json_schema" and form.get("json_schema") is None:
            raise MinivllmError("a response_format of the type json_schema needs a json_schema", "response_format")


def _check_counts(data: Data, *names: str) -> None:
    for name in names:
        value = data.get(name)
        if value is None:
            continue
        if not isinstance(value, int | float):
            raise MinivllmError(f"{name} is {value!r}; it must be a whole number", name)
        if value < 0 and value != -1:
            raise MinivllmError(f"{name} is {value!r}; it must be 0 or more, or -1 for the whole vocabulary", name)


def _token_ids_of(biases: Mapping[str, float] | None) -> dict[int, float] | None:
    if not biases:
        return None
    # JSON has no other keys than strings.
    wrong = [key for key in biases if not key.strip().lstrip("+-").isdecimal() or len(key) > 20]
    if wrong:
        raise MinivllmError(f"logit_bias has the keys {wrong[:10]}, which are not token ids", "logit_bias")
    return {int(key): bias for key, bias in biases.items()}


class UsageInfo(OpenAIBaseModel):
    """The token counts of a request."""

    prompt_tokens: int = 0
    total_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: dict[str, int] | None = None
    completion_tokens_details: dict[str, int] | None = None


class PromptLogprob(OpenAIBaseModel):
    """The log probability of a token of the prompt."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class Reply(OpenAIBaseModel):
    """Fields that whole replies and events of a stream share."""

    id: str
    created: int = Field(default_factory=lambda: int(time.time()))
    model: str


class WholeReply(Reply):
    """A reply that is not a stream. Its fields after `usage` are vLLM's."""

    service_tier: str | None = None
    system_fingerprint: str | None = None
    usage: UsageInfo
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    metrics: dict[str, Any] | None = None


class StreamEvent(Reply):
    """One event of a stream. The last one has `system_fingerprint`; `usage` is set where the client
    requested it.
    """

    system_fingerprint: str | None = None
    usage: UsageInfo | None = None


# Completions

Prompts = list[TokenId] | list[list[TokenId]] | str | list[str]


class CompletionRequest(GenerationRequest):
    """The body of `POST /v1/completions`."""

    prompt: Prompts | None = None
    echo: bool | None = False
    logprobs: int | None = None
    max_tokens: int | None = 16
    suffix: str | None = None
    prompt_embeds: Any = None
    add_special_tokens: bool = True

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """How many of the most likely tokens to show at each position of the prompt; `logprobs` if
        an echo shows the prompt.
        """
        return self.logprobs if self.prompt_logprobs is None and self.echo else self.prompt_logprobs

    @property
    def only_echoes(self) -> bool:
        """Return whether only the prompt is to be returned, and nothing generated."""
        return bool(self.echo) and self.max_tokens == 0

    @classmethod
    def check(cls, data: Data) -> None:
        super().check(data)
        _check_counts(data, "logprobs")
        if data.get("max_tokens") is None:
            # An explicit null means the default of this API, 16 tokens.
            data.pop("max_tokens", None)
        if data.get("prompt") in (None, ""):
            raise MinivllmError("there is no prompt; give a text or token ids", "prompt")


class CompletionLogProbs(OpenAIBaseModel):
    """Log probabilities of a completion, one entry per token. `text_offset` counts characters of
    the tokens' texts.
    """

    text_offset: list[int] = []
    token_logprobs: list[float | None] = []
    tokens: list[str] = []
    top_logprobs: list[dict[str, float] | None] = []


class CompletionResponseStreamChoice(OpenAIBaseModel):
    """The new part of one completion."""

    index: int
    text: str
    logprobs: CompletionLogProbs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class CompletionResponseChoice(CompletionResponseStreamChoice):
    """One whole completion."""

    prompt_logprobs: list[dict[int, PromptLogprob] | None] | None = None
    routed_experts: str | None = None


class CompletionResponse(WholeReply):
    """The reply to a `CompletionRequest`."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionResponseChoice]


class CompletionStreamResponse(StreamEvent):
    """An event of the reply to a `CompletionRequest`."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionResponseStreamChoice]


# Chat. A message keeps the fields that we do not know: its template may.


class _Message(TypedDict):
    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    name: NotRequired[str]


class ChatCompletionDeveloperMessageParam(_Message):
    """Instructions from the application's developer."""

    content: str | list[Any]
    role: Literal["developer"]


class ChatCompletionSystemMessageParam(_Message):
    """A system message."""

    content: str | list[Any]
    role: Literal["system"]


class ChatCompletionUserMessageParam(_Message):
    """A message from the user."""

    content: str | list[Any]
    role: Literal["user"]


class ChatCompletionAssistantMessageParam(_Message):
    """A message from the model, or the tools that it has called."""

    role: Literal["assistant"]
    content: NotRequired[str | list[Any] | None]
    tool_calls: NotRequired[list[Any] | None]


class ChatCompletionToolMessageParam(_Message):
    """The result of a tool call."""

    content: str | list[Any]
    role: Literal["tool"]
    tool_call_id: str


class CustomChatCompletionMessageParam(_Message):
    """A message with any other role, which only the template interprets."""

    role: str
    content: NotRequired[str | list[Any]]


ChatCompletionMessageParam = (
    ChatCompletionDeveloperMessageParam
    | ChatCompletionSystemMessageParam
    | ChatCompletionUserMessageParam
    | ChatCompletionAssistantMessageParam
    | ChatCompletionToolMessageParam
    | CustomChatCompletionMessageParam
)


class FunctionDefinition(OpenAIBaseModel):
    """A function that the model may call, and the schema of its arguments."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatCompletionToolsParam(OpenAIBaseModel):
    """A tool that the model may call: a function."""

    type: Literal["function"] = "function"
    function: FunctionDefinition


class ChatCompletionNamedFunction(OpenAIBaseModel):
    """A reference to a function by its name."""

    name: str


class ChatCompletionNamedToolChoiceParam(OpenAIBaseModel):
    """The tool that must be called."""

    function: ChatCompletionNamedFunction
    type: Literal["function"] = "function"


class ChatTemplateRequest(CheckedRequest):
    """Messages, and the options for turning them into a prompt."""

    model: str | None = None
    messages: list[ChatCompletionMessageParam]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    documents: list[dict[str, str]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[ChatCompletionToolsParam] | None = None

    @classmethod
    def check(cls, data: Data) -> None:
        super().check(data)
        if data.get("continue_final_message") and data.get("add_generation_prompt"):
            raise MinivllmError("continue_final_message and add_generation_prompt cannot both be true")


class ChatCompletionRequest(ChatTemplateRequest, GenerationRequest):
    """The body of `POST /v1/chat/completions`."""

    logprobs: bool | None = False
    top_logprobs: int | None = 0
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    tool_choice: Literal["none", "auto", "required"] | ChatCompletionNamedToolChoiceParam | None = "none"
    parallel_tool_calls: bool | None = True
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    echo: bool = False
    return_prompt_text: bool | None = None

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @classmethod
    def check(cls, data: Data) -> None:
        super().check(data)
        _check_counts(data, "top_logprobs")
        if data.get("top_logprobs") and not data.get("logprobs"):
            raise MinivllmError("top_logprobs need `logprobs: true`", "top_logprobs")
        _check_tools(data)


def _check_tools(data: Data) -> None:
    tools = data.get("tools")
    if tools == []:
        raise MinivllmError("tools is an empty list; name a tool, or leave it out", "tools")
    # OpenAI's default depends on whether there are tools.
    choice = data.setdefault("tool_choice", "auto" if tools else "none")
    if choice in ("none", None):
        return
    if tools is None:
        raise MinivllmError("tool_choice needs tools", "tool_choice")
    if isinstance(choice, dict):
        _check_named_tool(tools, choice.get("function"))
    elif choice not in ("auto", "required"):
        raise MinivllmError("tool_choice must be none, auto, required or a tool's name", "tool_choice")


def _check_named_tool(tools: Any, function: Any) -> None:
    shape = '{"type": "function", "function": {"name": …}}'
    if not isinstance(function, dict):
        raise MinivllmError(f"a tool_choice that names a tool is {shape}", "tool_choice.function")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise MinivllmError(f"a tool_choice that names a tool is {shape}", "tool_choice.function.name")
    functions = [tool.get("function") for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    if name not in [function.get("name") for function in functions if isinstance(function, dict)]:
        raise MinivllmError(f"tool_choice names {name!r}, which is not among the tools", "tool_choice")


class ChatCompletionLogProb(OpenAIBaseModel):
    """A token's text, its log probability, and its text as UTF-8 bytes."""

    token: str
    logprob: float = -9999.0
    bytes: list[int] | None = None


class ChatCompletionLogProbsContent(ChatCompletionLogProb):
    """The chosen token at one position, and the most likely ones."""

    top_logprobs: list[ChatCompletionLogProb] = []


class ChatCompletionLogProbs(OpenAIBaseModel):
    """Log probabilities of an answer, one entry per token."""

    content: list[ChatCompletionLogProbsContent] | None = None


class FunctionCall(OpenAIBaseModel):
    """A function and its arguments, as JSON."""

    name: str
    arguments: str


class ToolCall(OpenAIBaseModel):
    """A call of a tool by the model."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(OpenAIBaseModel):
    """The model's message. Without tool calls, `tool_calls` is absent rather than null or empty."""

    role: str
    content: str | None = None
    refusal: str | None = None
    annotations: dict[str, Any] | None = None
    audio: dict[str, Any] | None = None
    function_call: FunctionCall | None = None
    tool_calls: list[ToolCall] | None = Field(default=None, exclude_if=lambda calls: not calls)
    reasoning: str | None = None


class DeltaMessage(OpenAIBaseModel):
    """The new part of a message. `tool_calls` has the next piece of a call's arguments."""

    role: str | None = None
    content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ChatCompletionResponseChoice(OpenAIBaseModel):
    """One whole answer."""

    index: int
    message: ChatMessage
    logprobs: ChatCompletionLogProbs | None = None
    finish_reason: str | None = "stop"
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    routed_experts: str | None = None


class ChatCompletionResponse(WholeReply):
    """The reply to a `ChatCompletionRequest`."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatCompletionResponseChoice]
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None


class ChatCompletionResponseStreamChoice(OpenAIBaseModel):
    """The new part of one answer."""

    index: int
    delta: DeltaMessage
    logprobs: ChatCompletionLogProbs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletionStreamResponse(StreamEvent):
    """An event of the reply to a `ChatCompletionRequest`."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatCompletionResponseStreamChoice]
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None


# Models and tokens


class ModelCard(OpenAIBaseModel):
    """A model name that requests may use. `root` is the model's path or its name on the Hub."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "vllm"
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None
    permission: list[dict[str, Any]] = []
    """What older clients read."""


class ModelList(OpenAIBaseModel):
    """The reply to `GET /v1/models`."""

    object: str = "list"
    data: list[ModelCard] = []


class LoadLoRAAdapterRequest(OpenAIBaseModel):
    """The body of `POST /v1/load_lora_adapter`. With `load_inplace`, this adapter replaces another
    of the same name.
    """

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadLoRAAdapterRequest(OpenAIBaseModel):
    """The body of `POST /v1/unload_lora_adapter`."""

    lora_name: str
    lora_int_id: Int64 | None = None


class TokenizeCompletionRequest(OpenAIBaseModel):
    """The body of `POST /tokenize` for a text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = False


class TokenizeChatRequest(ChatTemplateRequest):
    """The body of `POST /tokenize` for messages."""

    return_token_strs: bool | None = False


class TokenizeResponse(OpenAIBaseModel):
    """The reply to `POST /tokenize`: token ids, and the maximum length of a request."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(OpenAIBaseModel):
    """The body of `POST /detokenize`."""

    model: str | None = None
    tokens: list[TokenId]


class DetokenizeResponse(OpenAIBaseModel):
    """The reply to `POST /detokenize`: the text of the tokens."""

    prompt: str
