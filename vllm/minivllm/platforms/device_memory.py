"""Free memory of a device, and a clear error instead of a killed process."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING

from minivllm.config.units import GIB
from minivllm.errors import MinivllmError
from minivllm.platforms.device import device_name

if TYPE_CHECKING:
    import torch


def refuse_beyond_memory(num_bytes: int, device: torch.device, what: str, advice: str) -> None:
    """Reject an allocation that the device has no room for: Linux would grant it, then kill the
    process that uses it.

    Raises:
        MinivllmError: `num_bytes` exceeds the free memory.
    """
    import torch

    if device.type == "cuda":
        # Held by torch, but free for new tensors.
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        name, available = device_name(device), torch.cuda.mem_get_info(device)[0] + unused
    else:
        name, available = "this machine", available_memory()
    if available is not None and num_bytes > available:
        raise MinivllmError(
            f"{what} takes {num_bytes / GIB:,.2f} GiB, and {name} has {available / GIB:,.2f} left: {advice}"
        )


def available_memory() -> int | None:
    """Return the main memory still available, in bytes: the system's or the container's figure,
    whichever is smaller.

    None if neither is known.
    """
    return min((known for known in (_system_available(), _container_available()) if known is not None), default=None)


def _system_available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None


def _container_available() -> int | None:
    folder = Path("/sys/fs/cgroup")
    try:
        # A container's limit, "max" for none.
        limit, current = (folder / "memory.max").read_text().strip(), (folder / "memory.current").read_text()
        return max(0, int(limit) - int(current)) if limit != "max" else None
    except (OSError, ValueError):
        return None


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Return the memory of unused engines to the device. Call it after `del llm`.

    In vLLM v0.33.0: `vllm/distributed/parallel_state.py`. Nothing else needs cleaning up here:
    processes end with their engine.
    """
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
