"""The museum's rooms, `out/bugs/NN`: a copy of the engine with its defect, and a note of what has been solved."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from minivllm.errors import MinivllmError
from minivllm.logger import LEVEL_VARIABLE
from minivllm_lab.museum.exhibits import ENGINE, Exhibit

ROOMS = ENGINE.parents[1] / "out" / "bugs"
RUNNER = Path(__file__).with_name("runner.py")
SECONDS, SECONDS_PER_WORKLOAD = 60, 10
"""The processor's time that a process may take: an engine that never ends is a symptom too."""
PATIENCE = 5
"""So many times that long on the clock, since the machine may be busy with something else."""

Observations = dict[str, dict[str, Any]]


def room_of(exhibit: Exhibit) -> Path:
    """The folder of an exhibit; the engine's copy is `minivllm` in it."""
    return ROOMS / f"{exhibit.number:02d}"


def set_up(exhibit: Exhibit) -> bool:
    """Copies the engine with the defect, unless a copy is there that the learner has changed. Returns whether it did.

    Compiled loops (numba's cache) are copied too: they are valid as long as their sources keep their times.
    """
    room = room_of(exhibit)
    copy, stamp = room / "minivllm", room / "as_made"
    if copy.is_dir() and stamp.is_file() and stamp.read_text() != _digest(copy):
        return False
    try:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(ENGINE, copy, ignore=shutil.ignore_patterns("*.pyc"))
        (copy / exhibit.file).write_text(exhibit.broken_source())
        stamp.write_text(_digest(copy))
    except OSError as error:
        raise MinivllmError(f"cannot write {copy}: {error.strerror or error}") from error
    return True


def is_set_up(exhibit: Exhibit) -> bool:
    """Whether there is a copy to look at."""
    return (room_of(exhibit) / "minivllm").is_dir()


def observe(workloads: list[str], *rooms: Path | None) -> list[Observations]:
    """Runs workloads on the copies in these rooms, None being the sound engine; each in a fresh process, side by side.

    A copy that cannot be imported, or does not end, is an observation of every workload.

    Raises:
        MinivllmError: that happens to the sound engine, so there is nothing to compare with.
    """
    with ThreadPoolExecutor(len(rooms)) as pool:
        return list(pool.map(partial(_observe, workloads), rooms))


def _observe(workloads: list[str], room: Path | None) -> Observations:
    environment = {**os.environ, "PYTHONPATH": str(room or ENGINE.parent)}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment.setdefault(LEVEL_VARIABLE, "ERROR")
    seconds = SECONDS + SECONDS_PER_WORKLOAD * len(workloads)
    command = [sys.executable, "-P", str(RUNNER), str(seconds), *workloads]
    clock = PATIENCE * seconds
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=clock, env=environment, check=False)
    except subprocess.TimeoutExpired:
        problem = f"it was still running after {clock} seconds"
    else:
        if done.returncode == -signal.SIGXCPU:
            problem = f"it was still running after {seconds} seconds of the processor"
        elif done.returncode == 0:
            return json.loads(done.stdout.splitlines()[-1])
        else:
            said = [line for line in done.stderr.splitlines() if line.strip()] or [f"code {done.returncode}"]
            problem = f"it does not start: {said[-1].strip()}"
    if room is None:
        raise MinivllmError(
            f"the sound engine cannot be compared with: {problem}; if the machine is busy, try again when it is not"
        )
    return {name: {"the engine as a whole": problem} for name in workloads}


def solved() -> dict[str, str]:
    """How each solved exhibit was solved ("line" or "mended"), by number; a damaged note counts as none."""
    try:
        note = json.loads((ROOMS / "solved.json").read_text())
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}


def note_solved(exhibit: Exhibit, how: str) -> None:
    """Remembers that an exhibit has been solved."""
    ROOMS.mkdir(parents=True, exist_ok=True)
    (ROOMS / "solved.json").write_text(json.dumps({**solved(), str(exhibit.number): how}, indent=1) + "\n")


def _digest(copy: Path) -> str:
    """Of all sources of a copy."""
    sources = sorted(copy.rglob("*.py"))
    return hashlib.sha256(b"".join(str(path).encode() + path.read_bytes() for path in sources)).hexdigest()
