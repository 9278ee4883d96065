"""A busy scheduler without a model whose steps become lines, and a server with nothing but the page
that shows them.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

import uvicorn
from fastapi import FastAPI
from patience import eventually

from minivllm.config import CacheConfig, DraftingConfig, SchedulerConfig
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler
from minivllm.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from minivllm.engine.arg_utils import EngineArgs
from minivllm.engine.step_recorder import StepRecorder
from minivllm.entrypoints.openai.middleware import AuthenticationMiddleware
from minivllm.entrypoints.xray.routes import StepFeed, add_xray

DRAFTS = 3


class BusyScheduler:
    """A scheduler whose requests arrive faster than they finish, with chunks, shared prefixes,
    drafts and preemptions.
    """

    def __init__(self) -> None:
        self.rng, drafting = Random(0), DraftingConfig(num_speculative_tokens=DRAFTS)
        limits = SchedulerConfig(max_model_len=1024, max_num_seqs=48, max_num_batched_tokens=512, drafting=drafting)
        self.scheduler = Scheduler(limits, CacheConfig(num_gpu_blocks=1001, block_size=16))
        self.recorder = StepRecorder(self.scheduler)
        self.prefixes = [[self.rng.randrange(4000) for _ in range(160)] for _ in range(4)]
        self.added = 0

    def line(self) -> str:
        """Run one more step; return its snapshot."""
        while len(self.scheduler.waiting) < 4 and self.rng.random() < 0.35:
            self._add()
        output = self.scheduler.schedule()
        outputs = self.scheduler.update_from_output(output, self._sampled(output))
        drafting = [name for name in output.num_scheduled_tokens if name.endswith(("3", "7", "9"))]
        self.scheduler.update_draft_token_ids({name: [7] * DRAFTS for name in drafting})
        return self.recorder.snapshot(output, outputs)

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
    """The part of an engine that a feed uses."""

    def __init__(self, cores: int) -> None:
        self.errored = False
        self.engine_args = EngineArgs(data_parallel_size=cores, multiprocess=cores > 1)
        self.step_watchers: list[Callable[[int, str], None]] = []
        self.pages = 0

    async def start_step_events(self) -> None:
        self.pages += 1

    async def stop_step_events(self) -> None:
        self.pages = 0


@dataclass
class Served:
    """A running server, and the feed of what it shows."""

    url: str
    engine: Alive
    feed: StepFeed
    server: uvicorn.Server

    def put(self, lines: Sequence[str], core: int = 0) -> None:
        """Show more lines once a page is open; any thread may call this."""
        assert eventually(lambda: self.engine.pages > 0)
        loop = self.server.config.app.state.loop  # type: ignore[union-attr]
        for line in lines:
            loop.call_soon_threadsafe(self.feed.put, core, line)


@contextmanager
def served(keys: Sequence[str] = (), cores: int = 1) -> Iterator[Served]:
    app = FastAPI()
    if keys:
        app.add_middleware(AuthenticationMiddleware, keys=keys)
    engine: Any = Alive(cores)
    feed = StepFeed(engine, "tiny-python")
    add_xray(app, feed, cores)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off", timeout_graceful_shutdown=1))

    async def run() -> None:
        app.state.loop = asyncio.get_running_loop()
        await server.serve()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port: Any = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield Served(f"http://127.0.0.1:{port}", engine, feed, server)
    finally:
        engine.errored = True
        server.should_exit = True
        thread.join()
