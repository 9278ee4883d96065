"""`POST /v1/completions`. In vLLM v0.33.0: `vllm/entrypoints/openai/completion/serving.py`."""

import time
from collections.abc import AsyncGenerator, Mapping, Sequence

from minivllm.entrypoints.openai.logprobs import completion_logprobs, prompt_logprobs
from minivllm.entrypoints.openai.protocol import (
    CompletionLogProbs,
    CompletionRequest,
    CompletionResponse,
    CompletionResponseChoice,
    CompletionResponseStreamChoice,
    CompletionStreamResponse,
)
from minivllm.entrypoints.openai.serving_engine import (
    EngineRequests,
    OpenAIServing,
    TokenizedPrompt,
    as_stream,
    usage_of,
)
from minivllm.entrypoints.openai.stream import EventStream
from minivllm.errors import MinivllmError
from minivllm.outputs import CompletionOutput, Logprobs, RequestOutput


class OpenAIServingCompletion(OpenAIServing):
    """Any number of prompts, each completed `n` times; choice i * n + j is completion j of prompt i."""

    id_prefix = "cmpl"

    async def create_completion(
        self, request: CompletionRequest, headers: Mapping[str, str]
    ) -> CompletionResponse | EventStream:
        """Answer a request: whole, or as a stream.

        Raises:
            MinivllmError: the request is invalid.
            EngineDeadError: the engine has ended.
        """
        for name in ("suffix", "prompt_embeds"):
            if getattr(request, name) is not None:
                raise MinivllmError(f"{name} is not served here", None if name == "suffix" else name)
        given = _prompts_of(request)
        self.check(request, len(given))
        prompts = [await self._tokenized(prompt, request) for prompt in given]
        asked = 1 if request.only_echoes else request.max_tokens
        params = [self.sampling_params(request, asked, prompt) for prompt in prompts]
        request_id = self.request_id(request, headers)
        requests = await self.start(request, request_id, prompts, params, headers)
        answer = _Answer(self, request, request_id, prompts)
        if request.stream:
            return EventStream(as_stream(answer.events(requests), requests), requests.close, self.engine.parts)
        try:
            return await answer.whole(requests)
        finally:
            requests.close()

    async def _tokenized(self, prompt: str | list[int], request: CompletionRequest) -> TokenizedPrompt:
        if isinstance(prompt, str):
            return await self.tokenize_prompt(prompt, request)
        token_ids = self.truncated(prompt, request)
        text = self.tokenizer.decode(token_ids, skip_special_tokens=False) if request.echo else None
        return TokenizedPrompt(token_ids, text)


def _prompts_of(request: CompletionRequest) -> list[str | list[int]]:
    prompt = request.prompt
    assert prompt is not None
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise MinivllmError("the list of prompts is empty; give at least one")
    return [prompt] if isinstance(prompt[0], int) else list(prompt)  # type: ignore[list-item]


class _Answer:
    """The reply to one request, in the making."""

    def __init__(
        self,
        serving: OpenAIServingCompletion,
        request: CompletionRequest,
        request_id: str,
        prompts: Sequence[TokenizedPrompt],
    ) -> None:
        self._serving = serving
        self._request = request
        self._base = {
            "id": request_id,
            "created": int(time.time()),
            "model": serving.models.name_in_reply(request.model),
        }
        self._prompts = prompts
        self._n = request.n or 1
        self._num_prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)

    async def whole(self, requests: EngineRequests) -> CompletionResponse:
        """The reply that is not a stream."""
        outputs = {index: output async for index, output in requests.outputs() if output.finished}
        ordered = [outputs[index] for index in range(len(self._prompts))]
        choices = [self._choice(index, output, one) for index, output in enumerate(ordered) for one in output.outputs]
        num_generated = sum(len(one.token_ids) for output in ordered for one in output.outputs)
        num_cached = ordered[-1].num_cached_tokens
        return CompletionResponse(
            **self._base,
            choices=choices,
            system_fingerprint=self._serving.fingerprint,
            usage=self._serving.usage(self._num_prompt_tokens, num_generated, num_cached),
            kv_transfer_params=ordered[0].kv_transfer_params,
        )

    async def events(self, requests: EngineRequests) -> AsyncGenerator[CompletionStreamResponse, None]:
        """The events of the stream."""
        request, serving = self._request, self._serving
        asks_usage = serving.includes_usage(request)
        num_tokens = [0] * (len(self._prompts) * self._n)
        num_characters: dict[int, int] = {}
        num_cached: int | None = None
        async for index, output in requests.outputs():
            num_cached = output.num_cached_tokens if num_cached is None else num_cached
            for one in output.outputs:
                number = index * self._n + one.index
                num_tokens[number] += len(one.token_ids)
                choice = self._delta(index, output, one, num_characters.get(number))
                num_characters[number] = num_characters.get(number, 0) + len(choice.text)
                event = CompletionStreamResponse(**self._base, object="text_completion", choices=[choice])
                if one.finish_reason is not None and not asks_usage:
                    event.system_fingerprint = serving.fingerprint
                if asks_usage and request.continuous_usage:
                    event.usage = usage_of(len(self._prompts[index].token_ids), num_tokens[number])
                yield event
        if asks_usage:
            usage = serving.usage(self._num_prompt_tokens, sum(num_tokens), num_cached)
            last = CompletionStreamResponse(**self._base, object="text_completion", choices=[])
            last.usage, last.system_fingerprint = usage, serving.fingerprint
            yield last

    def _choice(self, index: int, output: RequestOutput, one: CompletionOutput) -> CompletionResponseChoice:
        prompt, shows_ids = self._prompts[index], self._request.return_token_ids
        logprobs = None
        if self._request.logprobs is not None:
            logprobs = self._logprobs(*self._tokens(index, output, one, echoes=bool(self._request.echo)))
        return CompletionResponseChoice(
            index=index * self._n + one.index,
            text=self._text(index, one, echoes=bool(self._request.echo)),
            logprobs=logprobs,
            finish_reason=one.finish_reason,
            stop_reason=one.stop_reason,
            token_ids=one.token_ids if shows_ids else None,
            prompt_token_ids=prompt.token_ids if shows_ids else None,
            prompt_logprobs=prompt_logprobs(output.prompt_logprobs),
        )

    def _delta(
        self, index: int, output: RequestOutput, one: CompletionOutput, num_characters: int | None
    ) -> CompletionResponseStreamChoice:
        """What is new of a completion, of which so many characters were sent; None: nothing was."""
        request, first = self._request, num_characters is None
        echoes = bool(request.echo) and first
        logprobs = None
        if request.logprobs is not None:
            logprobs = self._logprobs(*self._tokens(index, output, one, echoes), num_characters or 0)
        shows_prompt = echoes or (first and request.return_token_ids)
        return CompletionResponseStreamChoice(
            index=index * self._n + one.index,
            text=self._text(index, one, echoes),
            logprobs=logprobs,
            finish_reason=one.finish_reason,
            stop_reason=one.stop_reason,
            prompt_token_ids=self._prompts[index].token_ids if shows_prompt else None,
            token_ids=one.token_ids if request.return_token_ids else None,
        )

    def _text(self, index: int, one: CompletionOutput, echoes: bool) -> str:
        """The text of a completion; an echo has the prompt's before it, unless that is returned as token ids."""
        prompt = self._prompts[index].text if echoes and not self._request.return_token_ids else ""
        return (prompt or "") + ("" if self._request.only_echoes else one.text)

    def _tokens(
        self, index: int, output: RequestOutput, one: CompletionOutput, echoes: bool
    ) -> tuple[list[int], Logprobs]:
        """The same of its tokens, and their log probabilities."""
        token_ids, rows = ([], []) if self._request.only_echoes else (one.token_ids, one.logprobs or [])
        if not echoes:
            return token_ids, rows
        return self._prompts[index].token_ids + token_ids, (output.prompt_logprobs or []) + rows

    def _logprobs(self, token_ids: list[int], rows: Logprobs, offset: int = 0) -> CompletionLogProbs:
        serving, most = self._serving, self._request.logprobs or 0
        return completion_logprobs(serving.tokenizer, token_ids, rows, most, offset, serving.shows_ids(self._request))
