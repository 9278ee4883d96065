"""Select the device to run on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minivllm.errors import MinivllmError

if TYPE_CHECKING:
    import numpy as np
    import torch

DEVICES = ("auto", "cpu", "cuda")


def pick_device(name: str = "auto") -> torch.device:
    """Return the device; `auto` is the GPU if there is one. Requesting a missing GPU is an error,
    not a fallback.
    """
    import torch

    if name not in DEVICES:
        raise MinivllmError(f"unknown device {name!r}: use one of {', '.join(DEVICES)}")
    if name == "cuda" and not torch.cuda.is_available():
        raise MinivllmError("no CUDA device here: use --device cpu (or auto)")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def on_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy an array to a device without waiting for the GPU; on a CPU, share its memory.

    A copy from pinned memory runs in the background, and the pinned memory is kept until it has
    been read.
    """
    import torch

    tensor = torch.from_numpy(array)
    # From pinned memory the copy runs in the background.
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def device_name(device: torch.device) -> str:
    """Return a readable name of the device."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"
