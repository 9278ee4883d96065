"""This device's copy bandwidth and matmul rate, measured with torch.

A kernel's bytes or operations per second are compared with these instead of a data sheet's peaks.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from minivllm.platforms.device import device_name
from minivllm_lab.progress import working
from minivllm_lab.timing import median_seconds

if TYPE_CHECKING:
    import torch

COPY_BYTES = {"cuda": 2**30, "cpu": 2**27}  # larger than any cache
MATRIX = {"cuda": 8192, "cpu": 1024}


class DeviceRates(NamedTuple):
    """The measured figures of one device, named as in `minivllm_simulate.hardware.Hardware`."""

    name: str
    memory_bytes: int
    bandwidth: float
    """Bytes per second, reads plus writes."""
    flops: dict[str, float]
    """Operations per second of a matrix product, by dtype."""

    @property
    def fastest(self) -> str:
        """The dtype in which matmuls are fastest."""
        return max(self.flops, key=self.flops.__getitem__)

    @property
    def ridge(self) -> float:
        """FLOPs per byte, in the fastest dtype, below which a step is memory-bound."""
        return self.flops[self.fastest] / self.bandwidth


def measure_device(device: torch.device, dtypes: tuple[str, ...] = ("float32",), quick: bool = False) -> DeviceRates:
    """Measure the copy bandwidth, and the matmul rate in each of `dtypes` (names of torch dtypes).

    `quick` multiplies matrices a quarter as wide, whose rate is lower.
    """
    with working("measuring what this device can do"):
        flops = {dtype: matmul_rate(device, dtype, quick) for dtype in dtypes}
        return DeviceRates(device_name(device), device_memory(device), copy_bandwidth(device), flops)


def copy_bandwidth(device: torch.device) -> float:
    """Return the bytes per second, reads plus writes, of copying a tensor larger than any cache."""
    import torch

    source = torch.ones(COPY_BYTES[device.type], dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / median_seconds(lambda: target.copy_(source), repeats=5, device=device)


def matmul_rate(device: torch.device, dtype: str, quick: bool = False) -> float:
    """Return the operations per second of a square matmul."""
    import torch

    n = MATRIX[device.type] // (4 if quick else 1)
    left, right = torch.randn(2, n, n, device=device).to(getattr(torch, dtype))
    return 2 * n**3 / median_seconds(lambda: left @ right, repeats=5, device=device)


def device_memory(device: torch.device) -> int:
    """Return the bytes of memory of the device."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
