"""Run workloads on the `minivllm` that Python finds first, and print their observations as JSON.

    PYTHONPATH=out/bugs/07 python -P vllm/minivllm_lab/museum/runner.py shared_prompt

Like the workloads, it imports nothing from `minivllm_lab`: the engine that it runs may be a copy
that comes without it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import sys
from pathlib import Path
from types import ModuleType


def observe(workloads: ModuleType, name: str) -> dict:
    """Return a workload's observations, or only the error if it fails."""
    try:
        return getattr(workloads, name)()
    except Exception as error:
        return {"raised": f"{type(error).__name__}: {error}"}


def _load_workloads() -> ModuleType:
    spec = importlib.util.spec_from_file_location("workloads", Path(__file__).with_name("workloads.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["workloads"] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


def main(seconds: int, names: list[str]) -> None:
    """Print these workloads' observations as the last line; the operating system kills the process
    after `seconds` of CPU time.
    """
    import torch

    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))

    torch.set_num_threads(1)
    workloads = _load_workloads()
    print(json.dumps({name: observe(workloads, name) for name in names}))


if __name__ == "__main__":
    os.environ.setdefault("MINIVLLM_LOGGING_LEVEL", "ERROR")
    main(int(sys.argv[1]), sys.argv[2:])
