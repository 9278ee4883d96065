"""A busy scheduler without a model, its steps as lines; and a server with nothing but the page that shows them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

import uvicorn
from fastapi import FastAPI

from minivllm.config import CacheConfig, DraftingConfig, SchedulerConfig
from minivllm.core.output import ModelRunnerOutput, SchedulerOutput
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler
from minivllm.core.step_events import FORMAT, HeaderLine, StepRecorder
from minivllm.entrypoints.openai.middleware import AuthenticationMiddleware
from minivllm.entrypoints.xray.recorder import StepRing
from minivllm.entrypoints.xray.routes import add_xray

DRAFTS = 3


class BusyScheduler:
    """Requests of all kinds come faster than they end: prompts in chunks, shared prefixes, drafts, preemptions."""

    def __init__(self, num_gpu_blocks: int = 1001, seed: int = 0) -> None:
        self.rng = Random(seed)
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_model_len=1024,
                max_num_seqs=48,
                max_num_batched_tokens=512,
                drafting=DraftingConfig(num_speculative_tokens=DRAFTS),
            ),
            CacheConfig(num_gpu_blocks=num_gpu_blocks, block_size=16),
        )
        self.recorder = StepRecorder(self.scheduler)
        self.prefixes = [[self.rng.randrange(4000) for _ in range(160)] for _ in range(4)]
        self.added = 0

    def lines(self) -> list[bytes]:
        """The lines of one more step."""
        while len(self.scheduler.waiting) < 4 and self.rng.random() < 0.35:
            self._add()
        output = self.scheduler.schedule()
        outputs = self.scheduler.update_from_output(output, self._sampled(output))
        self.scheduler.update_draft_token_ids(
            {name: [7] * DRAFTS for name in output.num_scheduled_tokens if name.endswith(("3", "7", "9"))}
        )
        self.recorder.observe(output, outputs)
        return self.recorder.take()

    def _add(self) -> None:
        shared = self.rng.choice(self.prefixes) if self.rng.random() < 0.6 else []
        prompt = shared + [self.rng.randrange(4000) for _ in range(self.rng.randint(20, 400))]
        self.added += 1
        self.scheduler.add_request(Request(f"cmpl-{self.added}", prompt, max_tokens=self.rng.randint(20, 300)))

    def _sampled(self, output: SchedulerOutput) -> ModelRunnerOutput:
        sampled: dict[str, list[int]] = {}
        for name in output.num_scheduled_tokens:
            if not self.scheduler.requests[name].is_prefill_chunk:
                drafts = len(output.scheduled_spec_decode_tokens.get(name, ()))
                sampled[name] = [self.rng.randrange(4000) for _ in range(1 + self.rng.randint(0, drafts))]
        return ModelRunnerOutput(sampled)


class Alive:
    """An engine that has not ended."""

    errored = False


@dataclass
class Served:
    """A running server; `rings` are what it shows of each core."""

    url: str
    rings: Sequence[StepRing]
    loop_thread: threading.Thread
    server: uvicorn.Server

    def put(self, lines: Sequence[bytes], core: int = 0) -> None:
        """Shows more lines; from any thread."""
        self.server.config.app.state.loop.call_soon_threadsafe(self.rings[core].put, lines)  # type: ignore[union-attr]


@contextmanager
def served(keys: Sequence[str] = (), cores: int = 1) -> Iterator[Served]:
    app = FastAPI()
    if keys:
        app.add_middleware(AuthenticationMiddleware, keys=keys)
    rings, engine = [StepRing() for _ in range(cores)], Alive()
    headers = [HeaderLine(xray=FORMAT, model="tiny-python", core=core, cores=cores) for core in range(cores)]
    add_xray(app, rings, headers, engine)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off", timeout_graceful_shutdown=1))

    async def run() -> None:
        import asyncio

        app.state.loop = asyncio.get_running_loop()
        await server.serve()

    def target() -> None:
        import asyncio

        asyncio.run(run())

    thread = threading.Thread(target=target)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port: Any = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield Served(f"http://127.0.0.1:{port}", rings, thread, server)
    finally:
        engine.errored = True
        server.should_exit = True
        thread.join()
