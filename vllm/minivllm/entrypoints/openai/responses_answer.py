"""`POST /v1/responses`: a conversation, answered by items: messages and calls of functions.

A response is a chat's answer in another form: `ChatAnswer` reads the model's text, and this file
makes items of it. A whole response is the last event of the stream that it would have been.

In vLLM v0.33.0: `vllm/entrypoints/openai/responses/serving.py`,
`vllm/entrypoints/openai/responses/streaming_events.py` (`SimpleStreamingEventProcessor`).
"""

import uuid
from collections.abc import AsyncGenerator, Iterator
from itertools import chain
from typing import Any

from minivllm.entrypoints.openai.answer import Json
from minivllm.entrypoints.openai.chat_answer import ChatAnswer
from minivllm.entrypoints.openai.stream import as_json

SAMPLING = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
"""Parameters that a response shows as the engine uses them."""
UNUSED = ("error", "incomplete_details", "previous_response_id", "usage")
INPUT_DETAILS = {"cache_write_tokens": 0, "input_tokens_per_turn": (), "cached_tokens_per_turn": ()}
NO_TURNS = dict.fromkeys(("output_tokens_per_turn", "tool_output_tokens_per_turn"), ())
OUTPUT_DETAILS = {"reasoning_tokens": 0, "tool_output_tokens": 0, **NO_TURNS}
"""A response has no turns of its own: nothing here runs tools on the server."""


class ResponsesAnswer(ChatAnswer):
    """The answer to a `ResponsesRequest`. Events are numbered in the order in which they are made."""

    id_prefix, last_event, needs_parser = "resp_", b"", False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._output: list[Json] = []
        self._open: Json = {}
        # Of tokens that have not added any text yet.
        self._logprobs: list[Json] = []
        self._num_events = self._call_index = 0

    def encoded(self, event: Json) -> bytes:
        if "error" in event:
            # Also the fields of OpenAI's own error event.
            event = self._event("error", **{"param": None, **event["error"]}, error=event["error"])
        return b"event: %b\n" % event["type"].encode() + b"data: %b\n\n" % as_json(event)

    async def whole(self) -> Json:
        response: Json = {}
        async for event in self.events():
            response = event.get("response", response)
        return response

    async def events(self) -> AsyncGenerator[Json, None]:
        num_tokens = 0
        async for _, output in self.outputs():
            # Until the first output, an error is a status of its own.
            if self._num_events == 0:
                for kind in ("created", "in_progress"):
                    yield self._event(f"response.{kind}", response=self._response("in_progress"))
            [completion] = output.outputs
            num_tokens += len(completion.token_ids)
            content, calls = self.parts(0, completion)
            if logprobs := self.logprobs(completion):
                self._logprobs += logprobs["content"]
            calling = [self._call(call, call.get("index", index)) for index, call in enumerate(calls)]
            for event in chain(self._text(content) if content else (), *calling):
                yield event
        status = "incomplete" if completion.finish_reason == "length" else "completed"
        for event in self._close(status):
            yield event
        usage = self._usage_of(num_tokens, output.num_cached_tokens)
        details: Json = {"usage": usage, "kv_transfer_params": output.kv_transfer_params}
        if status == "incomplete":
            details["incomplete_details"] = {"reason": "max_output_tokens"}
        yield self._event(f"response.{status}", response=self._response(status) | details)

    def _event(self, kind: str, **fields: Any) -> Json:
        self._num_events += 1
        return {**fields, "type": kind, "sequence_number": self._num_events - 1}

    def _item_event(self, kind: str, **fields: Any) -> Json:
        """Return an event about the open item; about its text, if the item is a message."""
        place = {"item_id": self._open["id"], "output_index": len(self._output)}
        if self._open["type"] == "message":
            place["content_index"] = 0
        return self._event(f"response.{kind}", **place, **fields)

    def _opened(self, item: Json) -> Iterator[Json]:
        """Close the open item, and open this one."""
        yield from self._close("completed")
        self._open = item
        shown = item | ({"content": []} if item["type"] == "message" else {})
        yield self._event("response.output_item.added", output_index=len(self._output), item=shown)

    def _text(self, delta: str) -> Iterator[Json]:
        if self._open.get("type") != "message":
            part: Json = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "status": "in_progress"}
            yield from self._opened(item | {"content": [part]})
            yield self._item_event("content_part.added", part=dict(part))
        part = self._open["content"][0]
        part["text"] += delta
        part["logprobs"] += self._logprobs
        shown, self._logprobs = [_without_bytes(each) for each in self._logprobs], []
        yield self._item_event("output_text.delta", delta=delta, logprobs=shown)

    def _call(self, call: Json, index: int) -> Iterator[Json]:
        function = call["function"]
        if self._open.get("type") != "function_call" or self._call_index != index:
            self._call_index = index
            item = {"id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "call_id": call["id"], "arguments": ""}
            yield from self._opened(item | {"name": function["name"], "status": "in_progress"})
        if delta := function["arguments"]:
            self._open["arguments"] += delta
            yield self._item_event("function_call_arguments.delta", delta=delta)

    def _close(self, status: str) -> Iterator[Json]:
        """Close the open item, if there is one. `_opened` shows an item that is open as it was made."""
        if not (item := self._open):
            return
        if item["type"] == "message":
            [part] = item["content"]
            yield self._item_event("output_text.done", text=part["text"], logprobs=[])
            part["logprobs"] = [*part["logprobs"], *self._logprobs] or None
            yield self._item_event("content_part.done", part=part)
        else:
            fields = {name: item[name] for name in ("arguments", "name")}
            yield self._item_event("function_call_arguments.done", **fields)
        item["status"] = status
        yield self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        self._open = {}

    def _response(self, status: str) -> Json:
        [params] = self.params
        own = {"id": self._id, "object": "response", "created_at": self._created, "model": self._model}
        limits = {"max_output_tokens": params.max_tokens, "top_logprobs": params.logprobs, "background": False}
        sampling = {name: getattr(params, name) for name in SAMPLING}
        output = {"status": status, "output": list(self._output), **dict.fromkeys(UNUSED)}
        return {**own, **limits, **sampling, **output, **self.request.echoed}

    def _usage_of(self, num_generated: int, num_cached: int) -> Json:
        num_prompt = len(self.prompts[0]["prompt_token_ids"])
        counts = {"input_tokens": num_prompt, "output_tokens": num_generated}
        counts["total_tokens"] = num_prompt + num_generated
        inputs = {"cached_tokens": num_cached, **INPUT_DETAILS}
        return counts | {"input_tokens_details": inputs, "output_tokens_details": OUTPUT_DETAILS}


def _without_bytes(entry: Json) -> Json:
    """Return a token's log probability in the form that a delta has."""
    top = [{"token": each["token"], "logprob": each["logprob"]} for each in entry["top_logprobs"]]
    return {"token": entry["token"], "logprob": entry["logprob"], "top_logprobs": top}
