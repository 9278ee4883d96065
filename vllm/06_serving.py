"""Lesson 06. Serving: from an HTTP request to tokens and back, for clients of which some are slow and some leave.

Builds a naive server and breaks it; then the collector that merges outputs, stop strings that come in pieces, requests
that end when their client leaves, a core in a process of its own, and the kernel that lets only allowed tokens through.
You learn what each process waits for, where latencies are measured, and how to find the load that a server can bear.

    uv run python vllm/06_serving.py                      # under a minute on a laptop, no GPU needed
    uv run python vllm/06_serving.py --clients 8 --slo-ttft 0.3
"""

import asyncio
import itertools
import json
import socket
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing, closing
from functools import partial
from queue import SimpleQueue
from typing import Any

from minivllm.core.engine_messages import EngineCoreOutputs, EngineCoreRequest
from minivllm.engine.arg_utils import EngineArgs
from minivllm.engine.core import EngineCore
from minivllm.engine.detokenizer import IncrementalDetokenizer
from minivllm.engine.llm_engine import LLMEngine
from minivllm.engine.socket_messages import decode, encode
from minivllm.models.tokenizer import load_tokenizer
from minivllm.outputs import RequestOutput
from minivllm.platforms.triton_utils import tl, triton
from minivllm.sampling_params import SamplingParams
from minivllm_lab.cli import run
from minivllm_lab.disturbance import Control
from minivllm_lab.lesson import begin, keep
from minivllm_lab.proof import prove
from minivllm_lab.serving import report
from minivllm_lab.serving.core_places import CoreInLoop, CoreInThread, delta_of
from minivllm_lab.serving.plain_http import HEAD, event, read_request
from minivllm_lab.tables import heading

# %% 1. The naive server: the engine steps inside the event loop, and the loop writes to every client


class NaiveServer:
    """It works, on a good day. Break it with a client that does not read, and with one that leaves."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.engine = LLMEngine(EngineArgs(**settings))
        self.core = self.engine.engine_core.engine_core
        self.clients: dict[str, asyncio.StreamWriter] = {}
        self.names, self.unread = itertools.count(), 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection: read the request, then leave the rest to the loop below."""
        asked, name = await read_request(reader), str(next(self.names))
        params = SamplingParams(temperature=0.0, max_tokens=asked["max_tokens"], ignore_eos=True)
        self.engine.add_request(name, asked["prompt"], params)
        self.clients[name] = writer
        writer.write(HEAD)

    async def run(self) -> None:
        """Step, write to everybody, step: nothing else happens while one of the two takes its time."""
        while True:
            busy = self.engine.has_unfinished_requests()
            for output in self.engine.step() if busy else ():
                await self.write(output)
            await asyncio.sleep(0 if busy else 0.01)

    async def write(self, output: RequestOutput) -> None:
        """All the text so far to its client; the next one's turn comes when this one has taken it."""
        if (writer := self.clients.get(output.request_id)) is None:
            self.unread += 1
            return
        try:
            writer.write(event(output.outputs[0].text))
            await writer.drain()
        except ConnectionError:
            del self.clients[output.request_id]  # and who tells the engine?
        if output.finished:
            writer.close()


# %% 2. Between the engine and one client: what is unread is one output; stop strings in pieces; clients that leave


# region: collector
class RequestOutputCollector:
    """What one reader has not read yet, as one output; an exception is the last that is read."""

    def __init__(self) -> None:
        self.unread, self.error = None, None
        self.there = asyncio.Event()

    def put(self, output: Any) -> None:
        """Add an output, or an exception. Never waits, however slow the reader is."""
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
        """All that has come since the last call, or what comes next."""
        await self.there.wait()
        output, self.unread = self.unread, None
        if output is None:
            raise self.error
        if self.error is None:
            self.there.clear()
        return output


def join(unread: Any, new: Any) -> None:
    """Make one delta of two, completion by completion, as if both had come at once."""
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
    """Cuts a text that comes in pieces before the stop string that is complete first; nobody sees half of one."""

    def __init__(self, stop: list[str]) -> None:
        self.stop, self.held = stop, ""

    def push(self, text_delta: str) -> tuple[str, str | None]:
        """The text that can be sent now, and the stop string that has ended it, if one has."""
        text, self.held = self.held + text_delta, ""
        found = [(text.find(one) + len(one), place, one) for place, one in enumerate(self.stop) if one in text]
        if found:
            end, _, stopped = min(found)
            return text[: end - len(stopped)], stopped
        kept = max((overlap(text, one) for one in self.stop), default=0)
        self.held = text[len(text) - kept :]
        return text[: len(text) - kept], None

    def flush(self) -> str:
        """What was held back, at the end: it has turned out to be no stop string."""
        held, self.held = self.held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """The longest end of the text that begins the stop string, but is not all of it: how many characters."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)


# endregion


# region: until_disconnected
async def until_disconnected(work: Coroutine, disconnected: Coroutine) -> Any:
    """The work's result; None if the client leaves before: then the work is cancelled, and its `finally` has run."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(disconnected)
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


# endregion

# %% 3. The core in a process of its own: one thread receives, one steps and sends


# region: busy_loop
def busy_loop(core: EngineCore, inbox: SimpleQueue, put_outputs: Callable[[EngineCoreOutputs], object]) -> None:
    """The core's life: take in what has arrived, step while anything is unfinished, else wait. None ends it."""
    while True:
        while not inbox.empty() or not core.has_unfinished_requests():
            if (message := inbox.get()) is None:
                return
            act, argument = message
            core.add_request(argument) if act == "add" else core.abort_requests(argument)
        put_outputs(core.step())


# endregion


def packed(message: bytes) -> bytes:
    """A message on a stream: its length in four bytes, then the message."""
    return len(message).to_bytes(4, "big") + message


def serve_core(descriptor: int) -> None:
    """The core's process, from its first message, which is empty and says that it is ready, to the socket's end."""
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


class CoreInProcess:
    """The event loop's end of it. Plain data crosses the socket, as MessagePack and never as pickle."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.socket, theirs = socket.socketpair()
        code = f"from minivllm_lab.exercise import load; load({__file__!r}).serve_core({theirs.fileno()})"
        command = [sys.executable, "-c", code, json.dumps(settings)]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()

    async def open(self) -> None:
        """Waits until the core is ready."""
        self.reader, self.writer = await asyncio.open_connection(sock=self.socket)
        await self.reader.readexactly(4)

    def send(self, act: str, argument: Any) -> None:
        """A request to "add", or ids to "abort". Never waits: the transport keeps what has not gone out yet."""
        self.writer.write(packed(act.encode().ljust(5) + encode(argument)))

    async def get_output(self) -> EngineCoreOutputs:
        """The outputs of the next step, whenever there is one."""
        size = int.from_bytes(await self.reader.readexactly(4), "big")
        return decode(await self.reader.readexactly(size), EngineCoreOutputs)

    def close(self) -> None:
        """The socket's end is the core's end."""
        self.writer.close()


# %% 4. The server that uses all of it: nothing in its loop waits for the core, or for a client


class Server:
    """HTTP on one side, a core on the other."""

    def __init__(self, core: Any, model: str) -> None:
        self.core, self.tokenizer = core, load_tokenizer(model)
        self.readers: dict[str, tuple[RequestOutputCollector, IncrementalDetokenizer]] = {}
        self.names, self.unread = itertools.count(), 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, to its end or until its client leaves."""
        asked = await read_request(reader)
        writer.write(HEAD)
        with closing(writer):
            await until_disconnected(self.stream(asked, writer), reader.read())

    async def stream(self, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        """Write what there is, and wait for this client only: meanwhile its collector merges."""
        async with aclosing(self.generate(asked["prompt"], asked["max_tokens"], asked.get("stop", []))) as texts:
            async for text in texts:
                writer.write(event(text))
                await writer.drain()

    async def generate(self, prompt: Any, max_tokens: int, stop: list[str]) -> AsyncIterator[str]:
        """The text of a request in pieces. Whoever stops reading ends the request, for whatever reason."""
        ids = self.tokenizer.encode(prompt).ids if isinstance(prompt, str) else prompt["prompt_token_ids"]
        params, name = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True), str(next(self.names))
        collector, stops, finished = RequestOutputCollector(), StopStrings(stop), False
        self.readers[name] = collector, IncrementalDetokenizer(self.tokenizer, ids, params)
        try:
            self.core.send("add", EngineCoreRequest(name, ids, params, (), time.monotonic()))
            while not finished:
                output = await collector.get()
                text, stopped = stops.push(output.outputs[0].text)
                finished = output.finished or stopped is not None
                yield text + (stops.flush() if finished else "")
        finally:
            del self.readers[name]
            self.core.send("abort", [name])

    async def run(self) -> None:
        """One task receives the outputs of all requests, and never waits for a reader of one."""
        await self.core.open()
        try:
            while True:
                for output in (await self.core.get_output()).outputs:
                    collector, detokenizer = self.readers.get(output.request_id, (None, None))
                    self.unread += collector is None
                    if collector and detokenizer:
                        collector.put(delta_of(output, detokenizer))
        except Exception as error:
            for collector, _ in self.readers.values():
                collector.put(error)


# %% 5. Structured output: the one kernel that belongs to serving


# region: grammar_bitmask
@triton.jit
def mask_words_kernel(logits, bitmask):
    """One row. Grid: (words,). Logits float32 [32 * words] become −inf where the word's bit is 0."""
    word = tl.program_id(0)
    bit = tl.arange(0, 32)
    allowed = (tl.load(bitmask + word) >> bit) & 1
    tl.store(logits + word * 32 + bit, float("-inf"), mask=allowed == 0)


@triton.jit
def mask_rows_kernel(logits, bitmask, vocab_size):
    """Many rows [rows, vocab_size], whose last word may be partly empty. Grid: (rows, words)."""
    row, word = tl.program_id(0), tl.program_id(1)
    bit = tl.arange(0, 32)
    allowed = (tl.load(bitmask + row * tl.num_programs(1) + word) >> bit) & 1
    token = word * 32 + bit
    tl.store(logits + row * vocab_size + token, float("-inf"), mask=(allowed == 0) & (token < vocab_size))


@triton.jit
def apply_grammar_bitmask_kernel(logits, bitmask, has_grammar, vocab_size, num_words, BLOCK: tl.constexpr):
    """Logits of tokens that a row's grammar does not allow become −inf. Grid: (rows, ceil(num_words / BLOCK)).

    logits float32 [rows, vocab_size]; bitmask int32 [rows, num_words]: bit t % 32 of word t // 32 says whether token t
    may come; has_grammar int32 [rows]. Reads 4 bytes a row, and each word of a row with a grammar once; writes 4 bytes
    a forbidden token, and reads no logit.
    """
    row = tl.program_id(0)
    if tl.load(has_grammar + row) != 0:
        word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        words = tl.load(bitmask + row * num_words + word, mask=word < num_words, other=0)
        bit = tl.arange(0, 32)[None, :]
        allowed, token = (words[:, None] >> bit) & 1, word[:, None] * 32 + bit
        tl.store(logits + row * vocab_size + token, float("-inf"), mask=(allowed == 0) & (token < vocab_size))


# endregion


# %% The talk, in order


def main(arguments: Namespace) -> None:
    """Run the lesson from top to bottom."""
    device, control, model = begin("Lesson 06. Serving", arguments), Control(loads_cores=True), arguments.model
    settings = {"model": model, "device": device.type, "num_gpu_blocks_override": 600, "max_model_len": 512}
    found: dict = {}
    with report.Stage() as stage:
        naive, process, real = NaiveServer(settings), CoreInProcess(settings), stage.start_real_server(settings)
        cores = {
            "the event loop": CoreInLoop(settings),
            "a thread": CoreInThread(settings, busy_loop),
            "a process": process,
        }
        servers = {place: Server(core, model) for place, core in cores.items()}
        ports = {place: stage.serve(server, server.core) for place, server in servers.items()}
        with control.watch():
            heading("1. One request, hop by hop")
            found["trace"] = report.measure_trace(real)
            heading("2. Where the core runs")
            found["places"] = report.measure_places(ports, arguments)
        heading("3. Break the naive server")
        both = {
            "naive": (stage.serve(naive), naive),
            "this lesson's": next(zip(ports.values(), servers.values(), strict=True)),
        }
        found["slow"] = report.measure_slow_client(both, arguments.quick)
        found["left"] = report.measure_leaving(both)
        found["stops"] = report.show_stops(StopStrings)
        heading("4. What a server can bear")
        with control.watch():
            found["load"] = report.measure_load(real, arguments)
    heading("5. The grammar's mask")
    found["mask"] = prove(partial(report.verify_mask, apply_grammar_bitmask_kernel), device)
    heading("6. TP, PP and DP")
    found["ways"] = report.measure_ways(arguments)
    report.close(found, control.disturbance())
    keep(__file__, found, arguments, report.draw, disturbance=control.record())


parser = partial(report.parser, __doc__)

if __name__ == "__main__":
    run(main, parser())
