"""Recordings of an engine's steps, for `widgets.xray` and the page `/xray`.

    with record(llm, "run.jsonl"):
        llm.generate(prompts)

A file has a header line, then a snapshot of each step, as `minivllm.engine.step_recorder` describes
them. The page saves files of the same format.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.engine.step_recorder import FORMAT
from minivllm.errors import EngineDeadError, MinivllmError

if TYPE_CHECKING:
    from minivllm.entrypoints.llm import LLM


@contextmanager
def record(llm: LLM, path: str | Path) -> Iterator[None]:
    """Record the steps of an `LLM` while the block runs, in this process or with `multiprocess`; of
    several cores, only the first is recorded.

    Raises:
        MinivllmError: the file cannot be written.
    """
    engine = llm.llm_engine
    try:
        file = Path(path).open("w", buffering=1)  # noqa: SIM115 - line by line: a failure later leaves these steps
    except OSError as error:
        raise MinivllmError(f"cannot record to {path}: {error.strerror}; name another file") from None

    def write(core: int, line: str) -> None:
        if core == 0:
            file.write(f"{line}\n")

    with file:
        write(0, json.dumps({"xray": FORMAT, "model": engine.model_name}))
        engine.engine_core.call_utility("start_step_events")
        engine.step_watchers.append(write)
        try:
            yield
        finally:
            engine.step_watchers.remove(write)
            with suppress(EngineDeadError):  # the call that met it has said so
                write(0, engine.engine_core.call_utility("stop_step_events"))


def read_recording(path: str | Path) -> list[dict[str, Any]]:
    """Return a recording's lines: the header, then the snapshots.

    Raises:
        MinivllmError: the file cannot be read, or is not a recording.
    """
    try:
        header, *steps = map(json.loads, Path(path).read_text().splitlines())
    except OSError as error:
        raise MinivllmError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise MinivllmError(f"{path} is not a recording: {error}") from None
    if not isinstance(header, dict) or header.get("xray") != FORMAT or not steps:
        raise MinivllmError(f"{path} is not a recording: it needs a header of format {FORMAT}, and a step")
    return [header, *steps]
