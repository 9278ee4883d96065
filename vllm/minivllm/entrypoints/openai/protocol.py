"""The bodies of requests, with the fields that OpenAI's and vLLM's clients send.

Unknown fields are ignored. What pydantic finds wrong and what the checks below find wrong are two
types of error on the wire (`errors.py`). The answers are plain dictionaries (`answer.py`).

In vLLM v0.33.0: `protocol.py` in `vllm/entrypoints/openai/completion/` and `.../chat_completion/`,
`vllm/entrypoints/generate/base/protocol.py`, `vllm/entrypoints/serve/tokenize/protocol.py`.
"""

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal, NotRequired, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from minivllm.config.checks import require
from minivllm.errors import MinivllmError
from minivllm.sampling_params import RequestOutputKind, SamplingParams

Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
TokenId = Annotated[int, Field(ge=0, lt=2**63)]
Data = dict[str, Any]
Element = TypeVar("Element")
Many = Annotated[list[Element], Field(fail_fast=True)]
"""A list of which only the first wrong element is reported: a million of them would take seconds."""
MAX_PROMPTS, MAX_STOP_STRINGS, MAX_BAD_WORDS, SALT = 1024, 4, 128, re.compile(r"[^@/\\\0]{1,128}")
"""vLLM's limits."""
NOT_AS_THEY_ARE = {"logprobs", "prompt_logprobs", "logit_bias", "structured_outputs"}
SAME_AS_THE_ENGINES = {field.name for field in fields(SamplingParams)} - NOT_AS_THEY_ARE
"""Fields of a request that are passed to `SamplingParams` as they are."""


def _first_wrong(biases: Any) -> Any:
    """Return the first entry of a logit bias whose value is wrong; all of them if none is."""
    for token, bias in biases.items() if isinstance(biases, dict) else ():
        if not str(token).removeprefix("-").isdecimal():
            raise MinivllmError(f"logit_bias has the key {str(token)[:60]!r}; keys are token ids", "logit_bias")
        if not isinstance(bias, int | float):
            return {token: bias}
    return biases


def _count(value: Any, info: ValidationInfo) -> Any:
    name = info.field_name
    is_count = value is None or (isinstance(value, int | float) and (value >= 0 or value == -1))
    require(is_count, f"{name} is {value!r}; it must be 0 or more, or -1 for the whole vocabulary", name)
    return value


NumLogprobs = Annotated[int | None, BeforeValidator(_count)]


class OpenAIBaseModel(BaseModel):
    """A body, or a part of one. Unknown fields are ignored, except those in `NOT_SERVED`: without
    them the answer would be another than was asked for.
    """

    model_config = ConfigDict(extra="ignore", protected_namespaces=())
    NOT_SERVED: ClassVar[tuple[str, ...]] = ()

    @model_validator(mode="before")
    @classmethod
    def _check_before_types(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for name in cls.NOT_SERVED:
                require(not data.get(name), f"{name} is not served here", name)
            cls.check(data)
        return data

    @classmethod
    def check(cls, data: Data) -> None:
        """Check what vLLM checks before it looks at types.

        Raises:
            MinivllmError: a field has a value that is never served, or two do not go together.
        """


# What completions and chats share


class StreamOptions(OpenAIBaseModel):
    """The events in which a stream reports usage: a last one, or each event too."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class ResponseFormat(OpenAIBaseModel):
    """The form of the answer. `json_schema` has the schema under the key "schema"."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None


class GenerationRequest(OpenAIBaseModel):
    """The fields that completions and chats share. None means the model's default, or that the
    feature is off.
    """

    NOT_SERVED = (
        "use_beam_search", "logprob_token_ids", "repetition_detection", "thinking_token_budget",
        "truncate_prompt_tokens",
    )  # fmt: skip
    LIMITS: ClassVar[tuple[str, ...]] = ("max_tokens",)

    model: str | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[Int64, float] | None, BeforeValidator(_first_wrong)] = None
    n: int | None = 1
    presence_penalty: float | None = None
    seed: Int64 | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: Data | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: Many[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    allowed_token_ids: Many[int] | None = None
    prompt_logprobs: NumLogprobs = None
    bad_words: list[str] = []

    user: str | None = None
    priority: Int64 = 0
    request_id: str | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def token_limit(self) -> tuple[str, int | None]:
        """The maximum number of tokens to generate, None for as many as fit, after the name of its
        field.
        """
        return next(((name, limit) for name in self.LIMITS if (limit := getattr(self, name)) is not None), ("", None))

    @property
    def num_logprobs(self) -> tuple[int | None, int | None]:
        """How many of the most likely tokens to show at each position of the answer, besides the
        chosen one, and at each position of the prompt.
        """
        raise NotImplementedError

    def to_sampling_params(self, max_tokens: int, defaults: Mapping[str, Any], vocab_size: int) -> SamplingParams:
        """Return the engine's parameters; the model's `defaults` take precedence over OpenAI's.

        Raises:
            MinivllmError: a value is outside its range.
        """
        own = {name: value for name, value in self if name in SAME_AS_THE_ENGINES and value is not None}
        chosen: Data = {"top_k": 0, **defaults, **own, "max_tokens": max_tokens, "logit_bias": self.logit_bias or None}
        chosen["top_k"] = min(chosen["top_k"], vocab_size)
        chosen["logprobs"], chosen["prompt_logprobs"] = self.num_logprobs
        kind = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        transfer = {"kv_transfer_params": self.kv_transfer_params} if self.kv_transfer_params else None
        return SamplingParams(**chosen, output_kind=kind, extra_args=transfer)

    @classmethod
    def check(cls, data: Data) -> None:
        salt, words, streams = data.get("cache_salt"), data.get("bad_words"), data.get("stream")
        is_salt = salt is None or (isinstance(salt, str) and SALT.fullmatch(salt))
        require(is_salt, "cache_salt must be 1 to 128 characters, without @, /, \\ or NUL", "cache_salt")
        number = len(set(map(str, words))) if isinstance(words, list) else 0
        require(number <= MAX_BAD_WORDS, f"there are {number} bad_words; the maximum is {MAX_BAD_WORDS}", "bad_words")
        require(streams or not data.get("stream_options"), "stream_options need `stream: true`", "stream_options")
        # They come with the first event only, and that form has no field for them.
        is_late = streams and data.get("prompt_logprobs")
        require(not is_late, "prompt_logprobs are not available with `stream: true`", "prompt_logprobs")


class CompletionRequest(GenerationRequest):
    """The body of `POST /v1/completions`."""

    NOT_SERVED = (*GenerationRequest.NOT_SERVED, "suffix", "prompt_embeds")

    prompt: Many[TokenId] | Many[Many[TokenId]] | str | Many[str] | None = None
    echo: bool | None = False
    logprobs: NumLogprobs = None
    max_tokens: Annotated[int, BeforeValidator(lambda limit: 16 if limit is None else limit)] = 16
    add_special_tokens: bool = True

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """All prompts, each a text or token ids."""
        prompt: Any = self.prompt
        return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt

    @property
    def token_limit(self) -> tuple[str, int | None]:
        only_echoes = self.echo and self.max_tokens == 0
        return "max_tokens", 1 if only_echoes else self.max_tokens

    @property
    def num_logprobs(self) -> tuple[int | None, int | None]:
        shows_prompt = self.prompt_logprobs is None and self.echo
        return self.logprobs, self.logprobs if shows_prompt else self.prompt_logprobs

    @classmethod
    def check(cls, data: Data) -> None:
        super().check(data)
        given = outputs if isinstance(outputs := data.get("structured_outputs"), dict) else {}
        num_kinds = sum(given.get(kind) is not None for kind in ("json", "regex", "choice"))
        require(num_kinds < 2, "structured_outputs may have only one of json, regex and choice", "structured_outputs")
        prompt = data.get("prompt")
        require(prompt not in (None, ""), "there is no prompt; give a text or token ids", "prompt")
        require(prompt != [], "the list of prompts is empty; give at least one")
        # Token ids of one prompt may be more.
        number = len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
        require(number <= MAX_PROMPTS, f"there are {number} prompts; the maximum is {MAX_PROMPTS}", "prompt")


# Chats. A message keeps the fields that we do not know: its template may read them.


class _Message(TypedDict):
    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    name: NotRequired[str]


class ChatCompletionDeveloperMessageParam(_Message):
    """Instructions from the application's developer. An error names the union's first member, as
    vLLM's errors do.
    """

    content: str | list[Any]
    role: Literal["developer"]


class ChatCompletionAssistantMessageParam(_Message):
    """A message from the model, or the tools that it has called."""

    role: Literal["assistant"]
    content: NotRequired[str | list[Any] | None]
    tool_calls: NotRequired[list[Any] | None]


class CustomChatCompletionMessageParam(_Message):
    """A message with any other role, which only the template interprets."""

    role: str
    content: NotRequired[str | list[Any]]


ChatCompletionMessageParam = (
    ChatCompletionDeveloperMessageParam | ChatCompletionAssistantMessageParam | CustomChatCompletionMessageParam
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


class ChatCompletionNamedToolChoiceParam(ChatCompletionToolsParam):
    """The tool that must be called, by its name."""


class ChatTemplateRequest(OpenAIBaseModel):
    """Messages, and the options for turning them into a prompt."""

    NOT_SERVED = ("chat_template",)

    model: str | None = None
    messages: Many[ChatCompletionMessageParam]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    documents: Many[dict[str, str]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Many[ChatCompletionToolsParam] | None = None


class ChatCompletionRequest(ChatTemplateRequest, GenerationRequest):
    """The body of `POST /v1/chat/completions`."""

    NOT_SERVED = (*ChatTemplateRequest.NOT_SERVED, *GenerationRequest.NOT_SERVED, "return_prompt_text")
    LIMITS = ("max_completion_tokens", "max_tokens")

    echo: bool = False
    logprobs: bool | None = False
    top_logprobs: NumLogprobs = 0
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    tool_choice: Literal["none", "auto", "required"] | ChatCompletionNamedToolChoiceParam | None = None
    parallel_tool_calls: bool | None = True
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None

    @property
    def num_logprobs(self) -> tuple[int | None, int | None]:
        shows_prompt = self.prompt_logprobs is None and self.echo
        shown = (self.top_logprobs or 0) if self.logprobs else None
        return shown, self.top_logprobs if shows_prompt else self.prompt_logprobs

    @property
    def forced_tools(self) -> list[ChatCompletionToolsParam]:
        """The tools that the answer must call: the named tool, or with "required" all of them, any
        of which will do.

        Raises:
            MinivllmError: no tool has that name.
        """
        choice, tools = self.tool_choice, self.tools or []
        if not isinstance(choice, ChatCompletionNamedToolChoiceParam):
            return tools if choice == "required" else []
        name = choice.function.name
        named = [tool for tool in tools if tool.function.name == name][:1]
        require(named, f"tool_choice names {name!r}, which is not among the tools", "tool_choice")
        return named

    @classmethod
    def check(cls, data: Data) -> None:
        super().check(data)
        shown = data.get("logprobs") or not data.get("top_logprobs")
        require(shown, "top_logprobs need `logprobs: true`", "top_logprobs")
        tools = data.get("tools")
        require(tools != [], "tools is an empty list; name a tool, or leave it out", "tools")
        choice = data.setdefault("tool_choice", "auto" if tools else None)
        require(choice in (None, "none") or tools is not None, "tool_choice needs tools", "tool_choice")
        is_choice = choice in (None, "none", "auto", "required") or isinstance(choice, dict)
        require(is_choice, 'tool_choice must be "none", "auto", "required" or name a tool', "tool_choice")


# Adapters and tokens


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


class TokenizeCompletionRequest(OpenAIBaseModel):
    """The body of `POST /tokenize` for a text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = False


class TokenizeChatRequest(ChatTemplateRequest):
    """The body of `POST /tokenize` for messages."""

    return_token_strs: bool | None = False


TokenizeRequest = TokenizeCompletionRequest | TokenizeChatRequest


class DetokenizeRequest(OpenAIBaseModel):
    """The body of `POST /detokenize`."""

    model: str | None = None
    tokens: Many[TokenId]
