"""Products with packed weights on a CPU: the choice between two implementations, and how they are
called.

Compiled loops that unpack while multiplying (`quantized_linear_loops.py`) if numba is installed;
otherwise each call unpacks the whole weight for `F.linear`, which is correct but slow. Measured on
one core (AMD Zen 4, torch 2.15), the fastest of about forty interleaved calls, µs, weight [1376,
256] / [4096, 4096]:

    rows                                   1              4               16                128
    fp32, laid out for oneDNN        33 /  3,635    74 /  3,265    122 /  6,253      804 / 39,097
    int8, the loops                  19 /    627    53 /  2,698    129 /  6,902      829 / 48,207
    int4, the loops                  33 /    989    59 /  2,234    136 /  6,199      839 / 47,537
    int8, unpacked for F.linear      97 / 10,160   138 / 15,764    218 / 20,100      995 / 60,623
    int4, unpacked for F.linear     262 / 20,121   300 / 25,497    385 / 29,582    1,165 / 69,568
    torch's int8, x in fp32         278 / 13,797 1,170 / 55,444
    torch's int4, x in fp32         607 / 28,473 2,476 / 112,609
    torch's int8, x in bf16          20 /    866    43 /  1,791    165 /  7,360    1,320 / 65,210
    torch's int4, x in bf16          21 /    837    37 /  1,524    137 /  6,157    1,076 / 49,205
    bf16, F.linear                   27 /  1,003    51 /  2,802     87 /  4,649      440 / 21,080

So integers are up to five times as fast as fp32 for a few rows, when the weight has to come from
memory; from 16 rows on they gain nothing, and a wide weight loses a fifth. int4 takes longer to
unpack than int8 but moves fewer bytes: its remaining advantage is memory. torch's own matmuls
(`_weight_int8pack_mm`, `_weight_int4pack_mm_for_cpu`) are plain loops for fp32; for bf16 they are
as fast as ours for one row, but round activations. Unpacking the weight once, at load, would give
the fp32 matmul again, without the memory saving. bf16 wins with 16 rows or more: its matmuls need half
the instructions here.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.kernels.cpu.cells import QuantizedLinearCells
from minivllm.kernels.cpu.loops import ELEMENTS, loops
from minivllm.kernels.packed_weights import dequantize_weight
from minivllm.platforms.threads import has_numba, run_programs

# Dtypes of scales that the compiled loops read.
SCALES = (torch.float32, torch.bfloat16, torch.float16)


def quantized_linear_cpu(x: Tensor, packed: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Implement `quantized_linear`; x is contiguous."""
    in_lanes = x.shape[1] % 16 == 0 and x.shape[1] // scales.shape[1] % 16 == 0
    if in_lanes and len(packed) >= 4 and scales.dtype in SCALES and has_numba():
        return numba_quantized_linear(x, packed, scales, bias)
    return F.linear(x, dequantize_weight(packed, scales).to(x.dtype), bias)


def numba_quantized_linear(x: Tensor, packed: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Run the loops of `quantized_linear_loops.py`, for at least four outputs and groups of a
    multiple of 16.
    """
    rows, width = x.shape
    outputs, groups = scales.shape
    numbers = x.float()
    out = torch.empty(rows, outputs)
    addresses = (numbers.data_ptr(), out.data_ptr(), packed.data_ptr(), scales.data_ptr())
    cells = QuantizedLinearCells(0, rows, outputs, width, width // groups, *addresses)
    programs_for = loops("quantized_linear_loops").programs_for
    run_programs(programs_for(ELEMENTS[packed.dtype], ELEMENTS[scales.dtype]), cells)
    if bias is not None:
        out += bias
    return out.to(x.dtype)
