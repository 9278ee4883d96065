"""`POST /v1/chat/completions`. In vLLM v0.33.0: `vllm/entrypoints/openai/chat_completion/serving.py`."""

import time
from collections.abc import AsyncGenerator, Mapping

from minivllm.entrypoints.openai.constraints import forced_tools
from minivllm.entrypoints.openai.logprobs import chat_logprobs, prompt_logprobs
from minivllm.entrypoints.openai.protocol import (
    ChatCompletionLogProbs,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatCompletionResponseStreamChoice,
    ChatCompletionStreamResponse,
    ChatMessage,
    DeltaMessage,
)
from minivllm.entrypoints.openai.serving_engine import (
    EngineRequests,
    OpenAIServing,
    TokenizedPrompt,
    as_stream,
    usage_of,
)
from minivllm.entrypoints.openai.stream import EventStream
from minivllm.entrypoints.openai.tool_calls import CalledTools
from minivllm.errors import MinivllmError
from minivllm.outputs import CompletionOutput


class OpenAIServingChat(OpenAIServing):
    """One conversation, answered `n` times."""

    id_prefix = "chatcmpl"

    async def create_chat_completion(
        self, request: ChatCompletionRequest, headers: Mapping[str, str]
    ) -> ChatCompletionResponse | EventStream:
        """Answer a request: whole, or as a stream.

        Raises:
            MinivllmError: the request is invalid.
            EngineDeadError: the engine has ended.
        """
        self.check(request, 1)
        if request.tool_choice == "auto" and not (
            self.settings.enable_auto_tool_choice and self.settings.tool_call_parser
        ):
            raise MinivllmError('tool_choice "auto" needs the flags --enable-auto-tool-choice and --tool-call-parser')
        text = self.rendered(request, reasoning_effort=request.reasoning_effort)
        prompt = await self.tokenize_prompt(text, request)
        asked = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
        params = self.sampling_params(request, asked, prompt)
        request_id = self.request_id(request, headers)
        requests = await self.start(request, request_id, [prompt], [params], headers)
        answer = _Answer(self, request, request_id, prompt)
        if request.stream:
            return EventStream(as_stream(answer.events(requests), requests), requests.close, self.engine.parts)
        try:
            return await answer.whole(requests)
        finally:
            requests.close()


class _Answer:
    """The reply to one request, in the making."""

    def __init__(
        self, serving: OpenAIServingChat, request: ChatCompletionRequest, request_id: str, prompt: TokenizedPrompt
    ) -> None:
        self._serving = serving
        self._request = request
        self._base = {
            "id": request_id,
            "created": int(time.time()),
            "model": serving.models.name_in_reply(request.model),
        }
        self._prompt = prompt
        last = request.messages[-1]
        self._role = serving.settings.response_role if request.add_generation_prompt else last["role"]
        """Who speaks. A message that goes on may be echoed, so that the reply has it whole."""
        said = last.get("content") if request.echo and last["role"] == self._role else ""
        self._said_before = said if isinstance(said, str) else ""
        self._tools = self._called_tools(request)

    @staticmethod
    def _called_tools(request: ChatCompletionRequest) -> list[CalledTools]:
        """One for each choice, if a tool must be called."""
        tools = forced_tools(request)
        if not tools:
            return []
        name = None if request.tool_choice == "required" else tools[0].function.name
        return [CalledTools(name) for _ in range(request.n or 1)]

    async def whole(self, requests: EngineRequests) -> ChatCompletionResponse:
        """The reply that is not a stream."""
        *_, (_, output) = [found async for found in requests.outputs()]
        shows_ids, num_generated = self._request.return_token_ids, sum(len(one.token_ids) for one in output.outputs)
        return ChatCompletionResponse(
            **self._base,
            choices=[self._choice(one) for one in output.outputs],
            system_fingerprint=self._serving.fingerprint,
            usage=self._serving.usage(len(self._prompt.token_ids), num_generated, output.num_cached_tokens),
            kv_transfer_params=output.kv_transfer_params,
            prompt_logprobs=prompt_logprobs(output.prompt_logprobs),
            prompt_token_ids=self._prompt.token_ids if shows_ids else None,
            prompt_text=self._prompt.text if self._request.return_prompt_text else None,
        )

    async def events(self, requests: EngineRequests) -> AsyncGenerator[ChatCompletionStreamResponse, None]:
        """The events of the stream: who speaks, then what is said."""
        request, serving = self._request, self._serving
        asks_usage, num_tokens = serving.includes_usage(request), [0] * (request.n or 1)
        num_cached: int | None = None
        async for _, output in requests.outputs():
            if num_cached is None:
                num_cached = output.num_cached_tokens
                for event in self._opening():
                    yield event
            for one in output.outputs:
                num_tokens[one.index] += len(one.token_ids)
                event = self._event(self._delta(one), num_tokens[one.index])
                if one.finish_reason is not None and not asks_usage:
                    event.system_fingerprint = serving.fingerprint
                yield event
        if asks_usage:
            last = ChatCompletionStreamResponse(**self._base, object="chat.completion.chunk", choices=[])
            last.usage = serving.usage(len(self._prompt.token_ids), sum(num_tokens), num_cached)
            last.system_fingerprint = serving.fingerprint
            yield last

    def _opening(self) -> list[ChatCompletionStreamResponse]:
        """The first event of each choice, and what is echoed."""
        events = []
        for index in range(self._request.n or 1):
            delta = DeltaMessage(role=self._role, content="")
            choice = ChatCompletionResponseStreamChoice(index=index, delta=delta, logprobs=None, finish_reason=None)
            event = self._event(choice, 0)
            event.prompt_token_ids = self._prompt.token_ids if self._request.return_token_ids else None
            event.prompt_text = self._prompt.text if self._request.return_prompt_text else None
            events.append(event)
            if self._said_before:
                delta = DeltaMessage(content=self._said_before)
                choice = ChatCompletionResponseStreamChoice(index=index, delta=delta, logprobs=None, finish_reason=None)
                events.append(self._event(choice, 0))
        return events

    def _event(self, choice: ChatCompletionResponseStreamChoice, num_tokens: int) -> ChatCompletionStreamResponse:
        event = ChatCompletionStreamResponse(**self._base, object="chat.completion.chunk", choices=[choice])
        if self._serving.includes_usage(self._request) and self._request.continuous_usage:
            event.usage = usage_of(len(self._prompt.token_ids), num_tokens)
        return event

    def _delta(self, one: CompletionOutput) -> ChatCompletionResponseStreamChoice:
        said = DeltaMessage(content=one.text) if one.text or one.finish_reason is None else DeltaMessage()
        if self._tools:
            calls = self._tools[one.index].new(one.text)
            said = DeltaMessage(tool_calls=calls) if calls else DeltaMessage()
        choice = ChatCompletionResponseStreamChoice(
            index=one.index,
            delta=said,
            logprobs=self._logprobs(one),
            finish_reason=self._finish_reason(one),
            token_ids=one.token_ids if self._request.return_token_ids else None,
        )
        if one.finish_reason is not None:
            choice.stop_reason = one.stop_reason
        return choice

    def _choice(self, one: CompletionOutput) -> ChatCompletionResponseChoice:
        message = ChatMessage(role=self._role, content=self._said_before + one.text)
        if self._tools and one.finish_reason == "stop":  # else it is cut off, and no call
            message.content, message.tool_calls = None, self._tools[one.index].whole(one.text)
        return ChatCompletionResponseChoice(
            index=one.index,
            message=message,
            logprobs=self._logprobs(one),
            finish_reason=self._finish_reason(one),
            stop_reason=one.stop_reason,
            token_ids=one.token_ids if self._request.return_token_ids else None,
        )

    def _finish_reason(self, one: CompletionOutput) -> str | None:
        """With "required" a call is the reason, as OpenAI's clients expect; with a named tool it is "stop"."""
        calls = bool(self._tools) and self._request.tool_choice == "required"
        return "tool_calls" if calls and one.finish_reason == "stop" else one.finish_reason

    def _logprobs(self, one: CompletionOutput) -> ChatCompletionLogProbs | None:
        if not self._request.logprobs:
            return None
        shows_ids = self._serving.shows_ids(self._request)
        return chat_logprobs(one.token_ids, one.logprobs or [], self._request.top_logprobs or 0, shows_ids)
