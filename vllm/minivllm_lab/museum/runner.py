"""Runs workloads on the `minivllm` that Python finds first, and prints what they saw as JSON.

    PYTHONPATH=out/bugs/07 python -P vllm/minivllm_lab/museum/runner.py shared_prompt

It stands apart from the package, like the workloads: the engine it runs may be a copy that has no `minivllm_lab`.
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
    """What one workload saw; if it fails as a whole, only the error."""
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
    """Print the observations of these workloads, by name, as the last line; the system ends what takes longer."""
    import torch

    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))

    torch.set_num_threads(1)
    workloads = _load_workloads()
    print(json.dumps({name: observe(workloads, name) for name in names}))


if __name__ == "__main__":
    os.environ.setdefault("MINIVLLM_LOGGING_LEVEL", "ERROR")
    main(int(sys.argv[1]), sys.argv[2:])
