"""Lesson 06. Serving: from an HTTP request to tokens and back, for clients that may be slow or leave early.

Breaks a naive server, then builds what it lacks: a collector that merges outputs, stop strings that arrive in pieces,
requests that end with their client, a core in a process of its own, and the kernel that masks forbidden tokens. You
learn what each process waits for, where latency comes from, and how to find the load that a server can handle.

    uv run python vllm/06_serving.py                      # under a minute on a laptop, no GPU needed
    uv run python vllm/06_serving.py --clients 8 --slo-ttft 0.3
"""

import asyncio
import itertools
import json
import socket
import sys
import threading
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing, closing
from functools import partial
from queue import SimpleQueue
from typing import Any

from minivllm import EngineArgs, LLMEngine, RequestOutput, SamplingParams
from minivllm.core.engine_messages import EngineCoreOutputs, EngineCoreRequest
from minivllm.engine.core import EngineCore
from minivllm.engine.socket_messages import decode, encode
from minivllm.platforms.triton_utils import tl, triton
from minivllm_lab import cli, lesson
from minivllm_lab.disturbance import Control
from minivllm_lab.proof import prove
from minivllm_lab.serving import loads, raw_clients, report
from minivllm_lab.serving.client_streams import HEAD, ClientStreams, event, read_request
from minivllm_lab.serving.core_places import cores
from minivllm_lab.serving.stage import Stage

# %% 1. The naive server: the engine steps inside the event loop, and the loop writes to every client


class NaiveServer:
    """A server that works on a good day. Break it with a client that does not read, and with one that leaves."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.engine = LLMEngine(EngineArgs(**settings))
        self.core = self.engine.engine_core.engine_core
        self.clients: dict[str, asyncio.StreamWriter] = {}
        self.names, self.unread = itertools.count(), 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read one connection's request, and leave the rest to the loop below."""
        body, name = await read_request(reader), str(next(self.names))
        params = SamplingParams(temperature=0.0, max_tokens=body["max_tokens"], ignore_eos=True)
        self.engine.add_request(name, body["prompt"], params)
        self.clients[name] = writer
        writer.write(HEAD)

    async def run(self) -> None:
        """Alternate between a step and a write to every client: while one takes its time, nothing else happens."""
        while True:
            busy = self.engine.has_unfinished_requests()
            for output in self.engine.step() if busy else ():
                if output.request_id in self.clients:
                    await self.write(output, self.clients[output.request_id])
                else:
                    self.unread += 1
            await asyncio.sleep(0 if busy else 0.01)

    async def write(self, output: RequestOutput, writer: asyncio.StreamWriter) -> None:
        """Write all of a request's text so far; the next client's turn comes when this one has taken it."""
        try:
            writer.write(event(output.outputs[0].text))
            await writer.drain()
        except ConnectionError:
            del self.clients[output.request_id]  # and who tells the engine?
        if output.finished:
            writer.close()


# %% 2. Between the engine and a client: unread outputs are merged; stop strings in pieces; clients that leave


# region: collector
class RequestOutputCollector:
    """A request's unread output, merged into one; after an exception, nothing more is read."""

    def __init__(self) -> None:
        self.unread, self.error = None, None
        self.there = asyncio.Event()

    def put(self, output: Any) -> None:
        """Add an output, or an exception, without ever waiting for a slow reader."""
        if self.error is not None:
            return
        if isinstance(output, Exception):
            self.error = output
        elif self.unread is None:
            self.unread = output
        else:
            join(self.unread, output)
        self.there.set()

    async def get(self) -> Any:
        """Return everything since the last call, or wait for the next output."""
        await self.there.wait()
        output, self.unread = self.unread, None
        if output is None:
            raise self.error
        if self.error is None:
            self.there.clear()
        return output


def join(unread: Any, new: Any) -> None:
    """Merge a delta into an unread one, completion by completion, as if both had come at once."""
    known = {completion.index: completion for completion in unread.outputs}
    for completion in new.outputs:
        if completion.index not in known:
            unread.outputs.append(completion)
            continue
        earlier = known[completion.index]
        earlier.text += completion.text
        earlier.token_ids += completion.token_ids
        if completion.logprobs is not None:
            earlier.logprobs = (earlier.logprobs or []) + completion.logprobs
        earlier.finish_reason, earlier.stop_reason = completion.finish_reason, completion.stop_reason
    unread.finished = new.finished


# endregion
# region: stop_strings
class StopStrings:
    """A filter that cuts text arriving in pieces before its first stop string, and never sends half of one."""

    def __init__(self, stop: list[str]) -> None:
        self.stop, self.held = stop, ""

    def push(self, text_delta: str) -> tuple[str, str | None]:
        """Return the text that can be sent now, and the stop string that has ended it, if any."""
        text, self.held = self.held + text_delta, ""
        found = [(text.find(one) + len(one), place, one) for place, one in enumerate(self.stop) if one in text]
        if found:
            end, _, stopped = min(found)
            return text[: end - len(stopped)], stopped
        kept = max((overlap(text, one) for one in self.stop), default=0)
        self.held = text[len(text) - kept :]
        return text[: len(text) - kept], None

    def flush(self) -> str:
        """Return the text held back: at the end it has turned out not to be a stop string."""
        held, self.held = self.held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Return the length of the text's longest suffix that is a proper prefix of the stop string."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)


# endregion
# region: until_disconnected
async def until_disconnected(work: Coroutine, disconnected: Coroutine) -> Any:
    """Return the work's result, or None if the client leaves first: then the work is cancelled, `finally` included."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(disconnected)
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


# endregion

# %% 3. The core in a process of its own: one thread receives, another steps and sends


# region: busy_loop
def busy_loop(core: EngineCore, inbox: SimpleQueue, put_outputs: Callable[[EngineCoreOutputs], object]) -> None:
    """Take in what has arrived, step while anything is unfinished, and wait otherwise. None in the inbox ends it."""
    while True:
        while not inbox.empty() or not core.has_unfinished_requests():
            if (message := inbox.get()) is None:
                return
            act, argument = message
            core.add_request(argument) if act == "add" else core.abort_requests(argument)
        put_outputs(core.step())


# endregion


def packed(message: bytes) -> bytes:
    """Frame a message for a stream: its length in four bytes, then the message."""
    return len(message).to_bytes(4, "big") + message


def serve_core(descriptor: int) -> None:
    """Run the core's process: send an empty message when it is ready, then serve until the socket closes."""
    core, inbox = EngineCore(EngineArgs(**json.loads(sys.argv[1]))), SimpleQueue()
    with socket.socket(fileno=descriptor) as connection, connection.makefile("rb") as incoming:

        def receive() -> None:
            while size := incoming.read(4):
                message = incoming.read(int.from_bytes(size, "big"))
                act = message[:5].decode().strip()
                inbox.put((act, decode(message[5:], EngineCoreRequest if act == "add" else list[str])))
            inbox.put(None)

        connection.sendall(packed(b""))
        threading.Thread(target=receive, daemon=True).start()
        busy_loop(core, inbox, lambda outputs: connection.sendall(packed(encode(outputs))))


# %% 4. The server that uses all of it: its loop waits neither for the core nor for a client


class Server:
    """HTTP on one side, a core on the other; `streams` has the collector and the detokenizer of each request."""

    def __init__(self, core: Any, model: str) -> None:
        self.core, self.streams = core, ClientStreams(model, RequestOutputCollector)
        self.names, self.unread = itertools.count(), 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection to its end, or until its client leaves."""
        body = await read_request(reader)
        writer.write(HEAD)
        with closing(writer):
            await until_disconnected(self.stream(body, writer), reader.read())

    async def stream(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        """Write what there is, and wait for this client only: meanwhile its collector merges."""
        async with aclosing(self.generate(body["prompt"], body["max_tokens"], body.get("stop", []))) as texts:
            async for text in texts:
                writer.write(event(text))
                await writer.drain()

    async def generate(self, prompt: Any, max_tokens: int, stop: list[str]) -> AsyncIterator[str]:
        """Yield a request's text in pieces. When the caller stops reading, for whatever reason, the request ends."""
        params, name = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True), str(next(self.names))
        ids, collector = self.streams.open(name, prompt, params)
        stops, finished = StopStrings(stop), False
        try:
            self.core.send("add", EngineCoreRequest(name, ids, params, (), time.monotonic()))
            while not finished:
                output = await collector.get()
                text, stopped = stops.push(output.outputs[0].text)
                finished = output.finished or stopped is not None
                yield text + (stops.flush() if finished else "")
        finally:
            self.streams.close(name)
            self.core.send("abort", [name])

    async def run(self) -> None:
        """Receive the outputs of all requests in one task, which never waits for a client."""
        await self.core.open()
        try:
            while True:
                for output in (await self.core.get_output()).outputs:
                    self.unread += not self.streams.put(output)
        except Exception as error:
            self.streams.fail(error)


# %% 5. Structured output: the one kernel that belongs to serving


# region: grammar_bitmask
@triton.jit
def mask_words_kernel(logits, bitmask):
    """Mask one row. Grid: (words,). Logits float32 [32 * words] become −inf where the word's bit is 0."""
    word = tl.program_id(0)
    bit = tl.arange(0, 32)
    allowed = (tl.load(bitmask + word) >> bit) & 1
    tl.store(logits + word * 32 + bit, float("-inf"), mask=allowed == 0)


@triton.jit
def mask_rows_kernel(logits, bitmask, vocab_size):
    """Mask rows [rows, vocab_size], whose last word may be partly empty. Grid: (rows, words)."""
    row, word = tl.program_id(0), tl.program_id(1)
    bit = tl.arange(0, 32)
    allowed = (tl.load(bitmask + row * tl.num_programs(1) + word) >> bit) & 1
    token = word * 32 + bit
    tl.store(logits + row * vocab_size + token, float("-inf"), mask=(allowed == 0) & (token < vocab_size))


@triton.jit
def apply_grammar_bitmask_kernel(logits, bitmask, has_grammar, vocab_size, num_words, BLOCK: tl.constexpr):
    """Set the logits of tokens that a row's grammar forbids to −inf. Grid: (rows, ceil(num_words / BLOCK)).

    logits float32 [rows, vocab_size]; bitmask int32 [rows, num_words]: bit t % 32 of word t // 32 allows token t;
    has_grammar int32 [rows]. Reads 4 bytes a row, and each word of a row with a grammar once; writes 4 bytes for each
    forbidden token, and reads no logit.
    """
    row = tl.program_id(0)
    # 1. Leave the row of a request without a grammar alone.
    if tl.load(has_grammar + row) != 0:
        # 2. The words of this program.
        word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        # 3. The last program of a row has fewer.
        words = tl.load(bitmask + row * num_words + word, mask=word < num_words, other=0)
        # 4. All bits of all words: [BLOCK, 32].
        bit = tl.arange(0, 32)[None, :]
        allowed = (words[:, None] >> bit) & 1
        # 5. The token that each bit stands for.
        token = word[:, None] * 32 + bit
        # 6. Beyond vocab_size the next row begins.
        tl.store(logits + row * vocab_size + token, float("-inf"), mask=(allowed == 0) & (token < vocab_size))


# endregion


# %% The talk, in order


def main(arguments: Namespace) -> None:
    """Run the lesson from top to bottom."""
    device, model = lesson.begin("Lesson 06. Serving", arguments), arguments.model
    control = Control(loads_cores=True)
    settings = {"model": model, "device": device.type, "num_gpu_blocks_override": 600, "max_model_len": 512}
    results: dict = {}
    with Stage() as stage:
        naive, real = NaiveServer(settings), stage.start_real_server(settings)
        places = cores(settings, __file__, busy_loop)
        servers = {place: Server(core, model) for place, core in places.items()}
        ports = {place: stage.serve(server, server.core) for place, server in servers.items()}
        in_loop = ports["the event loop"], servers["the event loop"]
        both = {"naive": (stage.serve(naive), naive), "this lesson's": in_loop}
        with control.watch():
            results["trace"] = report.measure_trace(real, arguments)
            results["places"] = loads.measure_places(ports, arguments)
        results["slow"] = raw_clients.measure_slow_client(both, arguments)
        results["left"] = raw_clients.measure_leaving(both)
        with control.watch():
            results["load"] = loads.measure_load(real, arguments)
    results["mask"] = prove(partial(report.verify_mask, apply_grammar_bitmask_kernel), device)
    results["ways"] = report.measure_ways(arguments)
    report.close(results, arguments, control.disturbance())
    lesson.keep(__file__, results, arguments, report.draw, disturbance=control.record())


parser = partial(report.parser, __doc__)

if __name__ == "__main__":
    cli.run(main, parser())
