"""Results as JSON: figures with the machine, versions and date of the measurement."""

from __future__ import annotations

import datetime
import json
import os
import platform
from contextlib import suppress
from importlib.metadata import distributions
from pathlib import Path

from minivllm.errors import MinivllmError

VECTORS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
"""The instruction sets that decide how fast a processor multiplies."""
PACKAGES = ("torch", "triton", "transformers", "numpy", "numba")


def _cpu_line(name: str) -> str:
    """Return the first processor's line `name` of /proc/cpuinfo, or "" where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(name)), "")


def machine() -> dict:
    """Return a description of the machine that the figures were measured on, with nothing that
    identifies it beyond its kind.
    """
    installed = {package.name: package.version for package in distributions()}
    gpu = None
    with suppress(ImportError):
        import torch

        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "cpu": _cpu_line("model name") or platform.processor() or platform.machine(),
        "vectors": [flag for flag in VECTORS if flag in _cpu_line("flags").split()],
        "cores": os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
        "versions": {name: installed[name] for name in PACKAGES if name in installed},
        "gpu": gpu,
    }


def record(name: str, figures: dict, **context: object) -> dict:
    """Return the figures of one run with everything needed to interpret them."""
    today = datetime.date.today().isoformat()
    return {"name": name, "date": today, "machine": machine(), **context, "figures": figures}


def ensure_writable(path: str | Path) -> None:
    """Raise a MinivllmError unless a file can be written at `path`. Missing folders are created;
    existing files are left alone.
    """
    path = Path(path)
    is_new = not path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        raise MinivllmError(f"cannot write {path}: {error.strerror}") from error
    if is_new:
        path.unlink()


def write_json(path: str | Path, name: str, figures: dict, **context: object) -> None:
    """Write `record(...)` to `path`, creating its folder if necessary."""
    write_record(path, record(name, figures, **context))


def write_record(path: str | Path, record: dict) -> None:
    """Write a record made by `record` or read by `read_record`."""
    path = Path(path)
    ensure_writable(path)
    path.write_text(json.dumps(record, indent=2) + "\n")


def report(found: dict, path: str | Path | None) -> None:
    """Print a record as one line of JSON, and write it to `path`, if there is one."""
    print(json.dumps(found))
    if path:
        write_record(path, found)


def read_record(path: str | Path, name: str) -> dict:
    """Read the record of an earlier run. Raises a MinivllmError if there is no record of that
    name.
    """
    try:
        record = json.loads(Path(path).read_text())
    except OSError as error:
        raise MinivllmError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise MinivllmError(f"{path} is not JSON: {error}") from error
    if not isinstance(record, dict) or record.get("name") != name:
        raise MinivllmError(f'{path} holds no figures of "{name}"; give a file that its --json wrote')
    return record
