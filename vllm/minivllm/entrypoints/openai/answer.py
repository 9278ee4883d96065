"""The way from a client's request to its answer: a whole reply, or a stream of events.

This is one path for all endpoints. What is particular to an endpoint is in a subclass of `Answer`:
how a request becomes prompts, and how a completion looks (`completion_answer.py`,
`chat_answer.py`, `responses_answer.py`).

In vLLM v0.33.0 this code exists twice: `vllm/entrypoints/openai/completion/serving.py`
(`completion_stream_generator`), `vllm/entrypoints/openai/chat_completion/serving.py`
(`chat_completion_stream_generator`).
"""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from minivllm.engine.async_llm import Collector
from minivllm.entrypoints.openai.errors import RequestError, error_body
from minivllm.entrypoints.openai.serving_engine import OpenAIServing
from minivllm.entrypoints.openai.stream import EventStream, as_event
from minivllm.errors import MinivllmError
from minivllm.inputs import TokensPrompt
from minivllm.outputs import CompletionOutput, RequestOutput
from minivllm.sampling_params import SamplingParams
from minivllm.structured_output.grammar_text import check_grammar

Json = dict[str, Any]
MAX_RANK_DIGITS = 6


class Answer:
    """The answer to one request. Choice i * n + j is completion j of prompt i, and each prompt is a
    request to the engine.
    """

    id_prefix = kind = event_kind = ""
    """The beginning of an answer's id, the `object` of a whole reply, and that of a stream's events."""
    last_event = b"data: [DONE]\n\n"

    def __init__(self, serving: OpenAIServing, request: Any, headers: Mapping[str, str]) -> None:
        """Take a request that `serving` has accepted: its `check` raises for others."""
        serving.check(request)
        self.serving, self.request, self.n = serving, request, request.n or 1
        self.prompts: list[TokensPrompt] = []
        self.params: list[SamplingParams] = []
        self._headers = headers
        self._collectors: list[Collector] = []
        self._ready: asyncio.Queue[int] = asyncio.Queue()
        # All events of a stream have the same id and time.
        client_id = headers.get("x-request-id") or request.request_id or uuid.uuid4().hex[:16]
        self._id = self.id_prefix + client_id.encode("utf8", "replace").decode()[:1024]
        self._created, self._model = int(time.time()), serving.models.name_in_reply(request.model)
        options = request.stream_options
        self._reports_usage = bool(options and options.include_usage)
        self._reports_always = self._reports_usage and bool(options.continuous_usage_stats)

    # What an endpoint defines

    async def prompts_of(self) -> list[TokensPrompt]:
        """Return the prompts of the request.

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

    def shown(self, token_ids: list[int]) -> list[int] | None:
        """Return token ids, if the request wants them."""
        return token_ids if self.request.return_token_ids else None

    # The engine's requests

    async def create(self) -> Json | EventStream:
        """Answer the request, as a whole reply or as a stream.

        Raises:
            MinivllmError: the request is invalid.
            EngineDeadError: the engine has ended.
        """
        # Everything is checked before the first prompt is added, so a refused request leaves
        # nothing behind.
        self.prompts = await self.prompts_of()
        for prompt in self.prompts:
            self.params.append(self.serving.sampling_params(self.request, prompt))
            # A thousand prompts in a row would block the other clients.
            await asyncio.sleep(0)
        if (constraint := self.params[0].structured_outputs) is not None:
            # All prompts have the same one. A long grammar takes a while to check.
            await asyncio.to_thread(check_grammar, constraint)
        await self._add_requests()
        # Nothing has been awaited yet: an error up to here is a status, later ones are events.
        if self.request.stream:
            return EventStream(self._stream(), self.close, self.serving.engine.parts)
        try:
            return await self.whole()
        finally:
            self.close()

    async def _add_requests(self) -> None:
        """Add all prompts to the engine's queue, or none."""
        settings: Json = {"priority": self.request.priority, "data_parallel_rank": _data_parallel_rank(self._headers)}
        # Check again: it may have been unloaded since.
        settings["lora_request"] = self.serving.models.check(self.request.model)
        self.serving.check_queue(len(self.prompts) * self.n)  # others may have come since
        try:
            for index, (prompt, params) in enumerate(zip(self.prompts, self.params, strict=True)):
                if self.request.cache_salt is not None:
                    prompt["cache_salt"] = self.request.cache_salt
                # As in vLLM: the client's id, the prompt's index, and a number that tells it from
                # others of the same id.
                engine_id = f"{self._id}-{index}-{next(self.serving.numbers)}"
                settings["on_ready"] = partial(self._ready.put_nowait, index)
                self._collectors.append(await self.serving.engine.add_request(engine_id, prompt, params, **settings))
                await asyncio.sleep(0)
        except BaseException:
            self.close()
            raise

    async def outputs(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """Yield (index of the prompt, output) as outputs arrive, until all prompts are finished.

        Raises:
            EngineDeadError: the engine has ended.
            RequestError: the engine could not answer one of them.
        """
        unfinished = len(self._collectors)
        while unfinished:
            index = await self._ready.get()
            output = await self._collectors[index].get()
            # One completion that fails ends the whole reply, which has room for one error only.
            for completion in output.outputs:
                if completion.error is not None:
                    raise RequestError(completion.error, 400 if completion.invalid_request else 500)
            unfinished -= output.finished
            yield index, output

    def close(self) -> None:
        """Abort what is unfinished."""
        self.serving.engine.abort_now([collector.request_id for collector in self._collectors])

    # The reply

    async def whole(self) -> Json:
        """Return the non-streaming reply."""
        outputs = {index: output async for index, output in self.outputs() if output.finished}
        choices, num_generated = list[Json](), 0
        # Prompts finish in any order, and are answered in the client's.
        for index in range(len(self.prompts)):
            output = outputs[index]
            for completion in output.outputs:
                choices.append(self.choice(index * self.n + completion.index, output, completion))
                num_generated += len(completion.token_ids)
                await asyncio.sleep(0)
        usage, transfer = self._usage(num_generated, output.num_cached_tokens), outputs[0].kv_transfer_params
        further = {"system_fingerprint": self.serving.fingerprint, "usage": usage, "kv_transfer_params": transfer}
        return {**self._message(self.kind, choices), **further, **self.about_prompt(outputs[0])}

    async def _stream(self) -> AsyncGenerator[bytes, None]:
        """Yield the answer as server-sent events.

        An error in the middle of the stream is sent as an event too, since the status has already
        been sent; [DONE] is the last event of a completion or a chat in any case.
        """
        try:
            async for event in self.events():
                yield self.encoded(event)
        except Exception as error:
            yield self.encoded(error_body(error))
        finally:
            self.close()
        yield self.last_event

    def encoded(self, event: Json) -> bytes:
        """Return an event, or an error's body, as a server-sent event."""
        return as_event(event)

    async def events(self) -> AsyncGenerator[Json, None]:
        """Yield the events of the stream."""
        num_tokens = [0] * (len(self.prompts) * self.n)
        num_cached: int | None = None
        async for index, output in self.outputs():
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
            usage = {"usage": self._usage(sum(num_tokens), num_cached), "system_fingerprint": self.serving.fingerprint}
            yield self._message(self.event_kind, []) | usage

    def event(self, choice: Json, num_tokens: int) -> Json:
        """Return an event with this choice, which has `num_tokens` generated tokens so far."""
        event = self._message(self.event_kind, [choice])
        prompt = self.prompts[choice["index"] // self.n]["prompt_token_ids"]
        return event | {"usage": usage_of(len(prompt), num_tokens)} if self._reports_always else event

    def _message(self, kind: str, choices: Sequence[Json]) -> Json:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model, "choices": choices}

    def _usage(self, num_generated: int, num_cached: int | None) -> Json:
        """Return the usage of the whole request, with details if the server shows them."""
        usage = usage_of(sum(len(prompt["prompt_token_ids"]) for prompt in self.prompts), num_generated)
        if num_cached is not None and self.serving.settings.enable_prompt_tokens_details:
            usage["prompt_tokens_details"] = {"cached_tokens": num_cached}
        return usage


def usage_of(num_prompt: int, num_generated: int) -> Json:
    """Return the token counts, without details."""
    return {"prompt_tokens": num_prompt, "total_tokens": num_prompt + num_generated, "completion_tokens": num_generated}


def _data_parallel_rank(headers: Mapping[str, str]) -> int | None:
    """Return the core that an upstream router has chosen, if any."""
    header = headers.get("x-data-parallel-rank")
    # No core has a number that long, and Python refuses to convert thousands of digits.
    if header is not None and (not header.isdecimal() or len(header) > MAX_RANK_DIGITS):
        raise MinivllmError(f"the header X-data-parallel-rank is {header[:20]!r}; it must be a core's number")
    return None if header is None else int(header)
