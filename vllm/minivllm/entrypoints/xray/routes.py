"""`/xray`, a page that shows each step of the engine, and `/xray/events`, what it shows.

Both exist with `--xray` only. The page itself holds nothing of the engine; with API keys, the events ask for one, and
the page asks its reader. Events have request ids and counts, no tokens and no text. Of several cores they show the
first, and say so.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
from fastapi import FastAPI
from fastapi.responses import HTMLResponse, Response

from minivllm.core.step_events import FORMAT, HeaderLine
from minivllm.engine.arg_utils import EngineArgs
from minivllm.engine.async_llm import AsyncLLM
from minivllm.entrypoints.openai.settings import FrontendArgs
from minivllm.entrypoints.openai.stream import EventStream
from minivllm.entrypoints.xray.page import page
from minivllm.entrypoints.xray.recorder import RecordingFile, StepRing

SECONDS_BETWEEN_EVENTS = 0.05
"""Lines that come faster are sent together, so that a page never keeps the event loop busy."""
SECONDS_OF_SILENCE = 0.5
"""After this time without a step the stream looks whether the engine is still there."""
PING = ": ping\n\n"


class Engine(Protocol):
    """What the stream wants to know of the engine."""

    @property
    def errored(self) -> bool:
        """Whether it has ended."""
        ...


async def watch_steps(app: FastAPI, engine: AsyncLLM, settings: FrontendArgs, recording: RecordingFile | None) -> None:
    """Has the engine tell of its steps, and adds the routes, as far as the settings ask for that."""
    if recording is not None:
        engine.step_watchers.append(recording.write)
    if settings.xray:
        ring = StepRing()
        engine.step_watchers.append(ring.put)
        add_xray(app, ring, header_for(settings, engine.engine_args), engine)
    if engine.step_watchers:
        await engine.start_step_events()


def open_recording(settings: FrontendArgs, args: EngineArgs) -> RecordingFile | None:
    """The file of `--record`, if it was given.

    Raises:
        MinivllmError: it cannot be written.
    """
    return RecordingFile(settings.record, header_for(settings, args)) if settings.record else None


def header_for(settings: FrontendArgs, args: EngineArgs) -> HeaderLine:
    """The first line: the model's name in the API, else its own, and which core is shown if there are several."""
    model = (settings.served_model_name or [Path(args.model).name])[0]
    cores = args.data_parallel_size
    return HeaderLine(xray=FORMAT, model=f"{model} · core 0 of {cores}" if cores > 1 else model)


def add_xray(app: FastAPI, ring: StepRing, header: HeaderLine, engine: Engine) -> None:
    """Adds the page and its events."""

    @app.get("/xray", include_in_schema=False)
    async def show() -> Response:
        html, policy = page()
        return HTMLResponse(html, headers={"content-security-policy": policy, "cache-control": "no-cache"})

    @app.get("/xray/events", include_in_schema=False)
    async def events() -> Response:
        stream = EventStream(step_events(ring, header, engine), lambda: None)
        stream.headers["cache-control"] = "no-store"
        return stream


async def step_events(ring: StepRing, header: HeaderLine, engine: Engine) -> AsyncGenerator[str, None]:
    """Yields server-sent events, whose data are the lines of a recording: first what is kept, then what comes."""
    yield _event([msgspec.json.encode(header)])
    start = 0
    while not engine.errored:
        start, lines = ring.read(start)
        if lines:
            yield _event(lines)
            await asyncio.sleep(SECONDS_BETWEEN_EVENTS)
        else:
            await ring.wait(start, SECONDS_OF_SILENCE)
            if ring.end == start:
                yield PING


def _event(lines: Sequence[bytes]) -> str:
    return "".join(f"data: {line.decode()}\n" for line in lines) + "\n"
