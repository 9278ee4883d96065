"""The client-facing side of lesson 06's servers: a little HTTP, and the text of each step's tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from minivllm.core.engine_messages import EngineCoreOutput
from minivllm.engine.detokenizer import IncrementalDetokenizer
from minivllm.models.tokenizer import load_tokenizer
from minivllm.outputs import CompletionOutput, RequestOutput
from minivllm.sampling_params import SamplingParams

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
"""The beginning of every answer, which ends with the connection."""


async def read_request(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Read a request and return its JSON body; return an empty object if it has no body, as in a
    GET.

    Raises:
        asyncio.IncompleteReadError: the client left before its request was complete.
    """
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    fields = dict(line.split(":", 1) for line in head.split("\r\n")[1:] if ":" in line)
    size = int(fields.get("content-length", "0"))
    return json.loads(await reader.readexactly(size)) if size else {}


def event(text: str) -> bytes:
    """Format one server-sent event."""
    return f"data: {json.dumps({'text': text})}\n\n".encode()


class ClientStreams:
    """The collector and the detokenizer of each open request."""

    def __init__(self, model: str, make_collector: Callable[[], Any]) -> None:
        self.tokenizer, self.make_collector = load_tokenizer(model), make_collector
        self.readers: dict[str, tuple[Any, IncrementalDetokenizer]] = {}

    def open(self, name: str, prompt: Any, params: SamplingParams) -> tuple[list[int], Any]:
        """Begin a stream; return the prompt's token ids and the request's collector."""
        ids = self.tokenizer.encode(prompt).ids if isinstance(prompt, str) else prompt["prompt_token_ids"]
        collector = self.make_collector()
        self.readers[name] = collector, IncrementalDetokenizer(self.tokenizer, ids, params)
        return ids, collector

    def put(self, output: EngineCoreOutput) -> bool:
        """Hand a step's output to its collector; return False if the request is no longer open."""
        if output.request_id not in self.readers:
            return False
        collector, detokenizer = self.readers[output.request_id]
        collector.put(delta_of(output, detokenizer))
        return True

    def fail(self, error: Exception) -> None:
        """Raise an error in the reader of every open request."""
        for collector, _ in self.readers.values():
            collector.put(error)

    def close(self, name: str) -> None:
        """Remove a request."""
        del self.readers[name]


def delta_of(output: EngineCoreOutput, detokenizer: IncrementalDetokenizer) -> RequestOutput:
    """Return what a step has added to a request: its tokens and their text."""
    before = len(detokenizer.text)
    detokenizer.update(output.new_token_ids)
    if output.finish_reason:
        detokenizer.finish()
    text = detokenizer.text[before:]
    completion = CompletionOutput(0, text, output.new_token_ids, finish_reason=output.finish_reason)
    return RequestOutput(output.request_id, None, [], None, [completion], finished=output.finish_reason is not None)
