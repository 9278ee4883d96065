"""Turn the engine's outputs into the answer to a request: a whole reply, or a stream of events.

This is one path for all endpoints. What is particular to an endpoint is in a subclass of `Answer`:
how a request becomes prompts, and how a completion looks (`completion_answer.py`,
`chat_answer.py`, `responses_answer.py`).

In vLLM v0.33.0 this code exists twice: `vllm/entrypoints/openai/completion/serving.py`
(`completion_stream_generator`), `vllm/entrypoints/openai/chat_completion/serving.py`
(`chat_completion_stream_generator`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from minivllm.engine.async_llm import AsyncLLM, Collector
from minivllm.entrypoints.openai.errors import error_body, failed
from minivllm.entrypoints.openai.stream import as_event
from minivllm.errors import MinivllmError
from minivllm.inputs import TokensPrompt
from minivllm.outputs import CompletionOutput, RequestOutput
from minivllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from minivllm.entrypoints.openai.serving_engine import OpenAIServing

Json = dict[str, Any]
IN_A_ROW = 64


async def yielded(number: int) -> None:
    """Let the event loop's other tasks run after each `IN_A_ROW` steps of a loop."""
    if number % IN_A_ROW == 0:
        await asyncio.sleep(0)


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
            for completion in output.outputs:
                if completion.error is not None:
                    raise (MinivllmError if completion.invalid_request else failed)(completion.error)
            unfinished -= output.finished
            yield index, output

    def close(self) -> None:
        """Abort the unfinished requests."""
        self._engine.abort_now([collector.request_id for collector in self._collectors])


class Answer:
    """The answer to one request. Choice i * n + j is completion j of prompt i."""

    id_prefix: ClassVar[str]
    kind: ClassVar[str]
    """The `object` of a whole reply. `event_kind`: that of a stream's events."""
    event_kind: ClassVar[str]
    last_event: ClassVar[bytes] = b"data: [DONE]\n\n"

    def __init__(
        self,
        serving: OpenAIServing,
        request: Any,
        request_id: str,
        prompts: Sequence[TokensPrompt],
        params: Sequence[SamplingParams],
    ) -> None:
        self.serving = serving
        self.request = request
        self.prompts = prompts
        self.params = params
        self.n = request.n or 1
        # All events of a stream have the same id and time.
        self._id = request_id
        self._created = int(time.time())
        self._model = serving.models.name_in_reply(request.model)
        options = request.stream_options
        self._reports_usage = bool(options and options.include_usage)
        self._reports_always = self._reports_usage and bool(options.continuous_usage_stats)

    @classmethod
    async def prompts_of(cls, serving: OpenAIServing, request: Any) -> list[TokensPrompt]:
        """Return the prompts of a request.

        Raises:
            MinivllmError: the request asks for something that is not served.
        """
        raise NotImplementedError

    def choice(self, number: int, output: RequestOutput, completion: CompletionOutput) -> Json:
        """Return one choice of a whole reply."""
        raise NotImplementedError

    def delta(self, number: int, output: RequestOutput, completion: CompletionOutput) -> Json:
        """Return the new part of a choice."""
        raise NotImplementedError

    def opening(self) -> Iterable[Json]:
        """Return the events that precede the first output."""
        return ()

    def about_prompt(self, output: RequestOutput) -> Json:
        """Return a whole reply's additional fields about the prompt."""
        return {}

    def token_ids(self, completion: CompletionOutput) -> list[int] | None:
        """Return a completion's token ids, if the request wants them."""
        return completion.token_ids if self.request.return_token_ids else None

    async def whole(self, requests: EngineRequests) -> Json:
        """Return the non-streaming reply."""
        outputs = {index: output async for index, output in requests.outputs() if output.finished}
        choices = []
        num_generated = 0
        # Prompts finish in any order, and are answered in the client's.
        for index in range(len(self.prompts)):
            output = outputs[index]
            for completion in output.outputs:
                choices.append(self.choice(index * self.n + completion.index, output, completion))
                num_generated += len(completion.token_ids)
                await yielded(len(choices))
        return {
            **self._message(self.kind, choices),
            "system_fingerprint": self.serving.fingerprint,
            "usage": self._usage(num_generated, output.num_cached_tokens),
            "kv_transfer_params": outputs[0].kv_transfer_params,
            **self.about_prompt(outputs[0]),
        }

    def encoded(self, event: Json) -> bytes:
        """Return an event, or an error's body, as a server-sent event."""
        return as_event(event)

    async def events(self, requests: EngineRequests) -> AsyncGenerator[Json, None]:
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
                event = self.event(self.delta(number, output, completion), num_tokens[number])
                # Otherwise the last event, with the usage, has it.
                if completion.finish_reason is not None and not self._reports_usage:
                    event["system_fingerprint"] = self.serving.fingerprint
                yield event
        if self._reports_usage:
            yield {
                **self._message(self.event_kind, []),
                "usage": self._usage(sum(num_tokens), num_cached),
                "system_fingerprint": self.serving.fingerprint,
            }

    def event(self, choice: Json, num_tokens: int) -> Json:
        """Return an event with this choice, which has `num_tokens` generated tokens so far."""
        event = self._message(self.event_kind, [choice])
        if self._reports_always:
            prompt = self.prompts[choice["index"] // self.n]
            event["usage"] = usage_of(len(prompt["prompt_token_ids"]), num_tokens)
        return event

    def _message(self, kind: str, choices: Sequence[Json]) -> Json:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model, "choices": choices}

    def _usage(self, num_generated: int, num_cached: int | None) -> Json:
        """Return the usage of the whole request, with details if the server shows them."""
        usage = usage_of(sum(len(prompt["prompt_token_ids"]) for prompt in self.prompts), num_generated)
        if num_cached is not None and self.serving.settings.enable_prompt_tokens_details:
            usage["prompt_tokens_details"] = {"cached_tokens": num_cached}
        return usage


def usage_of(num_prompt_tokens: int, num_generated: int) -> Json:
    """Return the token counts, without details."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "total_tokens": num_prompt_tokens + num_generated,
        "completion_tokens": num_generated,
    }


async def as_stream(answer: Answer, requests: EngineRequests) -> AsyncGenerator[bytes, None]:
    """Yield an answer as server-sent events.

    An error in the middle of the stream is sent as an event too, since the status has already been
    sent; [DONE] is the last event of a completion or a chat in any case.
    """
    try:
        async for event in answer.events(requests):
            yield answer.encoded(event)
    except Exception as error:
        yield answer.encoded(error_body(error))
    finally:
        requests.close()
    if answer.last_event:
        yield answer.last_event
