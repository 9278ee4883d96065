"""Code that all calls of compiled loops share: numbers as NumPy has them, and loading the loops
late. No numba.
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

import numpy as np
import torch

# The type that compiled loops read a tensor's numbers as: NumPy has no bfloat16, and LLVM's lanes
# unpack both halves.
ELEMENTS = {
    torch.float32: np.float32,
    torch.bfloat16: np.uint16,
    torch.float16: np.int16,
    torch.int8: np.int8,
    torch.uint8: np.uint8,
}


@functools.cache
def loops(name: str) -> Any:
    """Return the module of this name in this folder. It imports numba, which takes a second, so
    it is loaded late.
    """
    return import_module(f"minivllm.kernels.cpu.{name}")
