"""Keep the museum's rooms, `out/bugs/NN`: copies of the engine with a defect, and a record of
solved exhibits.
"""

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
WORKLOADS = Path(__file__).with_name("workloads.py")
SECONDS, SECONDS_PER_WORKLOAD = 60, 10
"""The CPU time that a process may take: an engine that never ends is a symptom too."""
PATIENCE = 5
"""The wall-clock limit as a multiple of it, since the machine may be busy."""

Observations = dict[str, dict[str, Any]]


def room_of(exhibit: Exhibit) -> Path:
    """Return an exhibit's folder; the engine's copy is `minivllm` in it."""
    return ROOMS / f"{exhibit.number:02d}"


def set_up(exhibit: Exhibit) -> bool:
    """Copy the engine with the defect, unless the learner has changed the existing copy. Return
    whether it was copied.

    Compiled loops (numba's cache) are copied too: they stay valid as long as the modification times
    of their sources are kept.
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
    """Return whether the exhibit's copy exists."""
    return (room_of(exhibit) / "minivllm").is_dir()


def observe(workloads: list[str], *rooms: Path | None) -> list[Observations]:
    """Run the workloads on the copy in each room (None: on the sound engine), each copy in its own
    process.

    A copy that cannot be imported, or does not finish, reports this as the observation of every
    workload.

    Raises:
        MinivllmError: the sound engine fails in this way, so there is nothing to compare with.
    """
    with ThreadPoolExecutor(len(rooms)) as pool:
        return list(pool.map(partial(_observe, workloads), rooms))


def _observe(workloads: list[str], room: Path | None) -> Observations:
    environment = {**os.environ, "PYTHONPATH": str(room or ENGINE.parent)}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment.setdefault(LEVEL_VARIABLE, "ERROR")
    seconds = SECONDS + SECONDS_PER_WORKLOAD * len(workloads)
    command = [sys.executable, "-P", str(WORKLOADS), str(seconds), *workloads]
    clock = PATIENCE * seconds
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=clock, env=environment, check=False)
    except subprocess.TimeoutExpired:
        problem = f"it was still running after {clock} seconds"
    else:
        if done.returncode == -signal.SIGXCPU:
            problem = f"it was still running after {seconds} seconds of CPU time"
        elif done.returncode == 0:
            return json.loads(done.stdout.splitlines()[-1])
        else:
            errors = [line for line in done.stderr.splitlines() if line.strip()] or [f"code {done.returncode}"]
            problem = f"it does not start: {errors[-1].strip()}"
    if room is None:
        raise MinivllmError(f"cannot compare with the sound engine: {problem}; if the machine is busy, try again later")
    return {name: {"the engine as a whole": problem} for name in workloads}


def solved() -> dict[str, str]:
    """Return how each exhibit was solved ("line" or "mended"), keyed by its number; ignore a
    damaged record.
    """
    try:
        record = json.loads((ROOMS / "solved.json").read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def note_solved(exhibit: Exhibit, how: str) -> None:
    """Record that an exhibit has been solved."""
    ROOMS.mkdir(parents=True, exist_ok=True)
    (ROOMS / "solved.json").write_text(json.dumps({**solved(), str(exhibit.number): how}, indent=1) + "\n")


def _digest(copy: Path) -> str:
    """Return the digest of a copy's sources."""
    sources = sorted(copy.rglob("*.py"))
    return hashlib.sha256(b"".join(str(path).encode() + path.read_bytes() for path in sources)).hexdigest()
