"""Turn the engine's outputs into replies, for completions and chats alike. Each endpoint has its
own renderer, a subclass of `Answer`.

In vLLM v0.33.0 this code exists twice: `vllm/entrypoints/openai/completion/serving.py`
(`completion_stream_generator`), `vllm/entrypoints/openai/chat_completion/serving.py`
(`chat_completion_stream_generator`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel

from minivllm.engine.async_llm import AsyncLLM, Collector
from minivllm.entrypoints.openai.errors import error_response, failed
from minivllm.entrypoints.openai.protocol import OpenAIBaseModel, StreamEvent, UsageInfo, WholeReply
from minivllm.errors import MinivllmError
from minivllm.inputs import TokensPrompt
from minivllm.outputs import CompletionOutput, RequestOutput
from minivllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from minivllm.entrypoints.openai.serving_engine import OpenAIServing


@dataclass(slots=True)
class TokenizedPrompt:
    """A prompt's token ids, and its text if it was given as text."""

    token_ids: list[int]
    text: str | None = None


class EngineRequests:
    """The engine requests that together answer one client request. The owner must `close` them."""

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine
        self._collectors: list[Collector] = []
        self._ready: asyncio.Queue[int] = asyncio.Queue()

    async def add(self, request_id: str, prompt: TokensPrompt, params: SamplingParams, **settings: Any) -> None:
        """Add a request, with the same settings as `AsyncLLM.add_request`; raises the same errors."""
        index = len(self._collectors)
        self._collectors.append(
            await self._engine.add_request(
                request_id, prompt, params, on_ready=lambda: self._ready.put_nowait(index), **settings
            )
        )

    async def outputs(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """Yield (index of the prompt, output) as outputs arrive, until all requests are finished.

        Raises:
            EngineDeadError: the engine has ended.
            MinivllmError: one of the requests is invalid; a `RequestError`: the engine
                could not answer it.
        """
        unfinished = len(self._collectors)
        while unfinished:
            index = await self._ready.get()
            output = await self._collectors[index].get()
            # One completion that fails ends the whole reply, which has room for one error only.
            ended = next((completion for completion in output.outputs if completion.error is not None), None)
            if ended is not None:
                raise (MinivllmError if ended.invalid_request else failed)(ended.error or "")
            unfinished -= output.finished
            yield index, output

    def close(self) -> None:
        """Abort the unfinished requests."""
        self._engine.abort_now([collector.request_id for collector in self._collectors])


class Answer:
    """The reply to one request, under construction. Choice i * n + j is completion j of prompt i.

    A subclass sets the types of a whole reply and of a stream event, and implements how a choice
    looks in each.
    """

    whole_form: ClassVar[type[WholeReply]]
    event_form: ClassVar[type[StreamEvent]]
    event_kind: ClassVar[str]

    def __init__(
        self, serving: OpenAIServing, request: Any, request_id: str, prompts: Sequence[TokenizedPrompt]
    ) -> None:
        self.serving = serving
        self.request = request
        self.prompts = prompts
        self.n = request.n or 1
        model = serving.models.name_in_reply(request.model)
        # All events of a stream have the same id and time.
        self._base = {"id": request_id, "created": int(time.time()), "model": model}
        self._num_prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        self._asks_usage = request.include_usage or serving.settings.enable_force_include_usage
        self.prepare()

    def prepare(self) -> None:
        """Set up whatever the renderer keeps about the request."""

    def choice(self, number: int, output: RequestOutput, completion: CompletionOutput) -> OpenAIBaseModel:
        """Return one choice of a whole reply."""
        raise NotImplementedError

    def delta(self, number: int, output: RequestOutput, completion: CompletionOutput) -> OpenAIBaseModel:
        """Return the new part of a choice."""
        raise NotImplementedError

    def opening(self) -> Iterable[StreamEvent]:
        """Return the events that precede the first output."""
        return ()

    def about_prompt(self, output: RequestOutput) -> dict[str, Any]:
        """Return a whole reply's additional fields about the prompt."""
        return {}

    async def whole(self, requests: EngineRequests) -> WholeReply:
        """Return the non-streaming reply."""
        outputs = {index: output async for index, output in requests.outputs() if output.finished}
        # Prompts finish in any order, and are answered in the client's.
        ordered = [outputs[index] for index in range(len(self.prompts))]
        rows = [(index, output, completion) for index, output in enumerate(ordered) for completion in output.outputs]
        num_generated = sum(len(completion.token_ids) for _, _, completion in rows)
        return self.whole_form(
            **self._base,
            choices=[
                self.choice(index * self.n + completion.index, output, completion) for index, output, completion in rows
            ],
            system_fingerprint=self.serving.fingerprint,
            usage=self._usage(num_generated, ordered[-1].num_cached_tokens),
            kv_transfer_params=ordered[0].kv_transfer_params,
            **self.about_prompt(ordered[0]),
        )

    async def events(self, requests: EngineRequests) -> AsyncGenerator[StreamEvent, None]:
        """Yield the events of the stream."""
        num_tokens = [0] * (len(self.prompts) * self.n)
        num_cached: int | None = None
        async for index, output in requests.outputs():
            # The first output of all: until now an error could still be a status of its own.
            if num_cached is None:
                num_cached = output.num_cached_tokens
                for event in self.opening():
                    yield event
            for completion in output.outputs:
                number = index * self.n + completion.index
                num_tokens[number] += len(completion.token_ids)
                event = self.event([self.delta(number, output, completion)], number, num_tokens[number])
                # Otherwise the last event, with the usage, has it.
                if completion.finish_reason is not None and not self._asks_usage:
                    event.system_fingerprint = self.serving.fingerprint
                yield event
        if self._asks_usage:
            # `object` is given although it is the default: only fields that were set are sent.
            last = self.event_form(**self._base, object=self.event_kind, choices=[])
            last.usage = self._usage(sum(num_tokens), num_cached)
            last.system_fingerprint = self.serving.fingerprint
            yield last

    def event(self, choices: Sequence[OpenAIBaseModel], number: int, num_tokens: int) -> StreamEvent:
        """Return an event with these choices; choice `number` has `num_tokens` generated tokens so
        far.
        """
        event = self.event_form(**self._base, object=self.event_kind, choices=choices)
        if self._asks_usage and self.request.continuous_usage:
            event.usage = usage_of(len(self.prompts[number // self.n].token_ids), num_tokens)
        return event

    def _usage(self, num_generated: int, num_cached: int | None) -> UsageInfo:
        """Return the usage of the whole request, with details if the server shows them."""
        usage = usage_of(self._num_prompt_tokens, num_generated)
        if num_cached is not None and self.serving.settings.enable_prompt_tokens_details:
            usage.prompt_tokens_details = {"cached_tokens": num_cached}
        return usage


def usage_of(num_prompt_tokens: int, num_generated: int) -> UsageInfo:
    """Return the token counts, without details."""
    total = num_prompt_tokens + num_generated
    return UsageInfo(prompt_tokens=num_prompt_tokens, completion_tokens=num_generated, total_tokens=total)


async def as_stream(events: AsyncGenerator[BaseModel, None], requests: EngineRequests) -> AsyncGenerator[str, None]:
    """Yield these objects as server-sent events, each with only the fields that were set.

    An error in the middle of the stream is sent as an event too, since the status has already been
    sent; [DONE] is always the last event.
    """
    try:
        async for event in events:
            yield f"data: {event.model_dump_json(exclude_unset=True)}\n\n"
    except Exception as error:
        yield f"data: {error_response(error).model_dump_json()}\n\n"
    finally:
        requests.close()
    yield "data: [DONE]\n\n"
