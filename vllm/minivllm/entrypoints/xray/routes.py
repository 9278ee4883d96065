"""`/xray`, a page that shows each step of the engine, and `/xray/events`, what it shows.

Both exist with `--xray` only. The page itself holds nothing of the engine; with API keys, the events ask for one, and
the page asks its reader. Events have request ids and counts, no tokens and no text. Of several cores a page shows the
one that its reader chooses: `/xray/events?core=1`.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Annotated, Protocol

import msgspec
from fastapi import FastAPI, Query
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


async def watch_steps(
    app: FastAPI, engine: AsyncLLM, settings: FrontendArgs, recordings: Sequence[RecordingFile] = ()
) -> None:
    """Has the engine tell of its steps, and adds the routes, as far as the settings ask for that."""
    engine.step_watchers += [(core, recording.write) for core, recording in enumerate(recordings)]
    if settings.xray:
        headers = headers_for(settings, engine.engine_args)
        rings = [StepRing() for _ in headers]
        engine.step_watchers += [(core, ring.put) for core, ring in enumerate(rings)]
        add_xray(app, rings, headers, engine)
    if engine.step_watchers:
        await engine.start_step_events()


def open_recordings(settings: FrontendArgs, args: EngineArgs) -> list[RecordingFile]:
    """The files of `--record`, if it was given: one for each core. That of core 1 is `run.core1.jsonl`.

    Raises:
        MinivllmError: one of them cannot be written.
    """
    if not settings.record:
        return []
    first, headers = Path(settings.record), headers_for(settings, args)
    paths = [first, *(first.with_name(f"{first.stem}.core{core}{first.suffix}") for core in range(1, len(headers)))]
    return [RecordingFile(path, header) for path, header in zip(paths, headers, strict=True)]


def headers_for(settings: FrontendArgs, args: EngineArgs) -> list[HeaderLine]:
    """The first line of each core: the model's name in the API, else its own, and which core it is."""
    model, cores = (settings.served_model_name or [Path(args.model).name])[0], args.data_parallel_size
    return [HeaderLine(xray=FORMAT, model=model, core=core, cores=cores) for core in range(cores)]


def add_xray(app: FastAPI, rings: Sequence[StepRing], headers: Sequence[HeaderLine], engine: Engine) -> None:
    """Adds the page and its events, of each core."""

    @app.get("/xray", include_in_schema=False)
    async def show() -> Response:
        html, policy = page()
        return HTMLResponse(html, headers={"content-security-policy": policy, "cache-control": "no-cache"})

    @app.get("/xray/events", include_in_schema=False)
    async def events(core: Annotated[int, Query(ge=0, lt=len(rings))] = 0) -> Response:
        stream = EventStream(step_events(rings[core], headers[core], engine), lambda: None)
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
