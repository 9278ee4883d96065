"""The share of a device's measured bandwidth and arithmetic rate that a step reaches: the two limits of the roofline.

Shares of measured rates can be compared across machines; seconds, or shares of a data sheet's peaks, cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minivllm_lab.device_rates import DeviceRates
from minivllm_lab.tables import table
from minivllm_lab.timing import median_seconds

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


def ridge(rates: DeviceRates) -> float:
    """Operations per byte, in the device's fastest dtype, below which a step is memory-bound."""
    return rates.flops[rates.fastest] / rates.bandwidth


def measure_share(
    step: Callable[[], object],
    moved: int,
    flops: int,
    rates: DeviceRates,
    device: torch.device,
) -> Share:
    """Time `step`, which must move `moved` bytes and do `flops` operations, on `device`."""
    seconds, most = median_seconds(step, device=device), rates.flops[rates.fastest]
    return Share(seconds, flops / moved, moved / seconds / rates.bandwidth, flops / seconds / most)


def share_table(title: str, rates: DeviceRates, shares: Mapping[str, Share]) -> None:
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
    speed = f"{rates.bandwidth / 1e9:,.0f} GB/s, {rates.flops[rates.fastest] / 1e9:,.0f} GFLOP/s"
    caption = f"{rates.name}: {speed}, ridge at {ridge(rates):.0f} FLOPs a byte"
    if rates.fastest != "bfloat16":
        caption += f"; numbers in {rates.fastest}, in which products are fastest here"
    table(title, ("", "FLOPs a byte", "ms", "of bandwidth", "of arithmetic"), rows, caption)
