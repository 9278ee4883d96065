"""Products with packed weights on a CPU: which of two forms runs, and how it is called.

Compiled loops that unpack while they multiply (`numba_quantized_linear.py`) where numba is installed; else the whole
weight is unpacked at every call, for `F.linear`, which is right and slow.
"""

from __future__ import annotations

import functools
from array import array
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F

from minivllm.kernels.packed_weights import dequantize_weight
from minivllm.kernels.torch_threads import run_on_threads

INTEGERS = {torch.int8: "int8", torch.uint8: "uint8"}
SCALES = {torch.float32: "float32", torch.bfloat16: "uint16", torch.float16: "int16"}
"""What the elements are to NumPy, for the types that the compiled loops know."""


def quantized_linear_cpu(
    x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """As `quantized_linear`; x contiguous."""
    in_lanes = x.shape[1] % 16 == 0 and x.shape[1] // scales.shape[1] % 16 == 0
    if in_lanes and scales.dtype in SCALES and has_numba():
        return numba_quantized_linear(x, packed, scales, bias)
    return F.linear(x, dequantize_weight(packed, scales).to(x.dtype), bias)


def numba_quantized_linear(
    x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """The compiled loops of `numba_quantized_linear.py`, for groups that are multiples of 16."""
    numbers = x.float()
    out = torch.empty(len(x), len(packed))
    addresses = (tensor.data_ptr() for tensor in (numbers, out, packed, scales))
    block = array("q", [0, len(x), len(packed), x.shape[1], x.shape[1] // scales.shape[1], *addresses])
    programs = _programs(packed.dtype, scales.dtype)
    run_on_threads(programs, block.buffer_info()[0], torch.get_num_threads())
    if bias is not None:
        out += bias
    return out.to(x.dtype)


@functools.cache
def has_numba() -> bool:
    """Whether the compiled loops can run here."""
    return find_spec("numba") is not None


@functools.cache
def _programs(integers: torch.dtype, scales: torch.dtype) -> Any:
    """numba takes a second to import, so only who needs it does."""
    import numpy as np

    from minivllm.kernels.numba_quantized_linear import programs_for

    return programs_for(getattr(np, INTEGERS[integers]), getattr(np, SCALES[scales]))
