"""The proofs of scripts: kernels are compared with float64, and invalid calls must be refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from minivllm.errors import MinivllmError
from minivllm.platforms.triton_utils import HAS_TRITON, INTERPRETED
from minivllm_lab.tables import console, table

if TYPE_CHECKING:
    import torch


def prove(proof: Callable[[torch.device], dict], device: torch.device) -> dict | None:
    """Run the proof of a script's kernels; where Triton has no build, print that they are not run."""
    if HAS_TRITON:
        return proof(device)
    console.print("Triton has no build for this platform: its kernels are not run")
    return None


def furthest(actual: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the largest difference between two tensors, on any devices; NaN counts as infinitely
    far.
    """
    return (actual.cpu() - exact.cpu()).abs().nan_to_num(math.inf).max().item()


def show_errors(
    label: str, errors: Mapping[str, float], bound: float, column: str = "float16", caption: str | None = None
) -> float:
    """Print each result's error against float64, and return the largest.

    Raises:
        AssertionError: one is not below `bound`.
    """
    for name, error in errors.items():
        assert error < bound, f"{label}: wrong by {error} ({name})"
    how = "line by line in Triton's interpreter" if INTERPRETED else "compiled"
    rows = [(name, f"{error:.0e}") for name, error in errors.items()]
    table(f"{label}, {how}", (column, "off float64 by"), rows, caption)
    return max(errors.values())


def refusal(act: Callable[[], object]) -> str:
    """Return the error message of a call that must be refused.

    Raises:
        AssertionError: the call was not refused.
    """
    try:
        act()
    except MinivllmError as error:
        return str(error)
    raise AssertionError("this should have been refused, but was not")
