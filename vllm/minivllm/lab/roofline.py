"""The share of a device's measured bandwidth and arithmetic rate that a step reaches: the two limits of the roofline.

Shares of measured rates can be compared across machines; seconds, or shares of a data sheet's peaks, cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minivllm.lab.device_rates import DeviceRates
from minivllm.lab.tables import table
from minivllm.lab.timing import median_seconds

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Share:
    """One step, measured."""

    seconds: float
    intensity: float
    """Operations per byte that must be moved: a property of the step, not of the device."""
    of_bandwidth: float
    """Its bytes per second, as a share of the device's copy bandwidth."""
    of_arithmetic: float
    """Its operations per second, as a share of the device's matrix product."""

    def figures(self) -> dict[str, float]:
        """The figures for a results file."""
        return {
            "ms": self.seconds * 1e3,
            "intensity": self.intensity,
            "of_bandwidth": self.of_bandwidth,
            "of_arithmetic": self.of_arithmetic,
        }


def ridge(rates: DeviceRates, dtype: str = "bfloat16") -> float:
    """Operations per byte below which a step is memory-bound."""
    return rates.flops[dtype] / rates.bandwidth


def measure_share(
    step: Callable[[], object],
    moved: int,
    flops: int,
    rates: DeviceRates,
    device: torch.device,
    dtype: str = "bfloat16",
) -> Share:
    """Time `step`, which must move `moved` bytes and do `flops` operations in `dtype`, on `device`."""
    seconds = median_seconds(step, device=device)
    return Share(seconds, flops / moved, moved / seconds / rates.bandwidth, flops / seconds / rates.flops[dtype])


def share_table(title: str, rates: DeviceRates, shares: Mapping[str, Share], dtype: str = "bfloat16") -> None:
    """Print steps against the rates of the device that they ran on."""
    rows = [
        (
            name.replace("_", " "),
            f"{s.intensity:.1f}",
            f"{s.seconds * 1e3:.2f}",
            f"{s.of_bandwidth:.0%}",
            f"{s.of_arithmetic:.0%}",
        )
        for name, s in shares.items()
    ]
    speed = f"{rates.bandwidth / 1e9:,.0f} GB/s, {rates.flops[dtype] / 1e9:,.0f} GFLOP/s"
    caption = f"{rates.name}: {speed}, ridge at {ridge(rates, dtype):.0f} FLOPs a byte"
    table(title, ("", "FLOPs a byte", "ms", "of bandwidth", "of arithmetic"), rows, caption)
