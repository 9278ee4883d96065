"""Serve `/xray`, a page that shows each step of the engine, `/xray/events`, the data that it shows,
and `/xray/recorded`, a recorded run that it shows while there is none.

Both exist only with `--xray`, and the engine describes its steps only while a page is open. The
page itself contains no data of the engine; with API keys, the events require one, and the page asks
the user for it. With several cores, a page shows the one in its address: `/xray?core=1`.
"""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Annotated

from fastapi import FastAPI, Query
from fastapi.responses import HTMLResponse, PlainTextResponse, Response

from minivllm.engine.async_llm import AsyncLLM
from minivllm.engine.step_recorder import FORMAT
from minivllm.entrypoints.openai.stream import EventStream
from minivllm.entrypoints.xray.page import RECORDED, page

SECONDS_OF_SILENCE = 0.5
"""After this time without a step the stream looks whether the engine is still there."""
MOST_UNSENT = 200
"""A page that reads slowly misses steps: each line is a whole state, so the next one mends that."""


class StepFeed:
    """A feed that hands the engine's snapshots to the open pages."""

    def __init__(self, engine: AsyncLLM, model: str) -> None:
        self._engine = engine
        self._model = model
        self._pages: dict[asyncio.Queue[str], int] = {}
        self._stopping: asyncio.Task[None] | None = None
        engine.step_watchers.append(self.put)

    def put(self, core: int, line: str) -> None:
        """Queue a snapshot for every page that shows this core."""
        for unsent, shown in self._pages.items():
            if shown == core:
                if unsent.full():
                    # Drop the oldest: the newest state is worth more.
                    unsent.get_nowait()
                unsent.put_nowait(line)

    async def events(self, core: int) -> AsyncGenerator[bytes, None]:
        """Yield server-sent events: a header, the current state, then each step until the engine
        ends.
        """
        cores = self._engine.engine_args.data_parallel_size
        yield _event(json.dumps({"xray": FORMAT, "model": self._model, "core": core, "cores": cores}))
        unsent: asyncio.Queue[str] = asyncio.Queue(MOST_UNSENT)
        # Before the recorder starts: its first snapshot is for this page.
        self._pages[unsent] = core
        try:
            await self._engine.start_step_events()
            while not self._engine.errored:
                try:
                    yield _event(await asyncio.wait_for(unsent.get(), SECONDS_OF_SILENCE))
                except TimeoutError:
                    # A comment in the stream: it notices a page that has left, and a proxy keeps
                    # the connection open.
                    yield b": ping\n\n"
        finally:
            del self._pages[unsent]
            if not self._pages:  # in a task of its own: this one may be under cancellation
                self._stopping = asyncio.create_task(self._engine.stop_step_events())


def add_xray(app: FastAPI, feed: StepFeed, cores: int) -> None:
    """Add the routes of the page and of its events."""

    @app.get("/xray", include_in_schema=False)
    async def show() -> Response:
        html, policy = page()
        return HTMLResponse(html, headers={"content-security-policy": policy, "cache-control": "no-cache"})

    @app.get("/xray/recorded", include_in_schema=False)
    async def recorded() -> Response:
        return PlainTextResponse(RECORDED.read_text(), headers={"cache-control": "no-cache"})

    @app.get("/xray/events", include_in_schema=False)
    async def events(core: Annotated[int, Query(ge=0, lt=cores)] = 0) -> Response:
        stream = EventStream(feed.events(core), lambda: None)
        stream.headers["cache-control"] = "no-store"
        return stream


def _event(line: str) -> bytes:
    return f"data: {line}\n\n".encode()
