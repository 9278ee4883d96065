"""Matrix products with packed weights (`packed_weights.py`): unquantized activations, 8- or 4-bit
weights.

Layouts
    x        [rows, in], a row contiguous; fp32, fp16 or bf16
    packed   int8 [out, in] or uint8 [out, in / 2]: a row's integers side by side
    scales   [out, groups], of any floating type; the groups of a row are equally long
    out      [rows, out], contiguous, of x's type

Grid (out / BLOCK_N) × (rows / BLOCK_M) programs. A program walks along `in` in tiles of BLOCK_K
    numbers, which lie within one group: it unpacks the tile of the weight, multiplies it with the
    tile of x on the matrix units, and adds the fp32 sums, times the group's scale, to its own. So
    the integers enter the matmul as they are, exact in any of x's types, and nothing is rounded
    but the sums. The weight is the left operand: what was just unpacked stays in registers, and a
    few rows of x are padded to 16 columns instead of 64 rows.

Must move: out × in × (1 or 1/2) bytes of integers, the scales (out × groups), x once for each
column of programs and the result; 2 × rows × out × in FLOPs, and one or two operations for each
weight and row of programs to unpack it. With few rows only the weight's bytes matter, a half or a
quarter of a 16-bit weight's; with many rows the product dominates and unpacking comes on top, so 8-
and 4-bit weights are slower than the plain product.

In vLLM v0.33.0: `vllm/model_executor/layers/quantization/` (`auto_gptq.py`, `compressed_tensors/`),
and the w4a16 and w8a16 kernels that they call.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from minivllm.kernels.attention_launch import dot_type
from minivllm.kernels.backend import choose_backend
from minivllm.kernels.cpu.quantized_linear_calls import quantized_linear_cpu
from minivllm.kernels.tuning import fastest
from minivllm.platforms.triton_utils import tl, triton

FEW_ROWS = 16


@dataclasses.dataclass(frozen=True)
class Configuration:
    """Tile sizes of a launch; `block_k` is limited to the group size."""

    block_n: int
    block_m: int
    block_k: int
    num_warps: int
    num_stages: int


FOR_FEW_ROWS = (Configuration(32, 16, 128, 2, 4), Configuration(64, 16, 128, 4, 3), Configuration(16, 16, 128, 1, 4))
FOR_MANY_ROWS = (Configuration(64, 64, 64, 4, 3), Configuration(128, 64, 64, 4, 3), Configuration(64, 32, 128, 4, 3))


@triton.jit(do_not_specialize=["rows"])
def quantized_linear_kernel(
    out,
    x,
    packed,
    scales,
    bias,
    rows,
    x_stride,
    N,
    K,
    GROUP: tl.constexpr,  # numbers that share a scale; 0: a whole row
    INT4: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DOT_TYPE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,  # divides GROUP
):
    """Grid (out tiles, row tiles)."""
    column = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = column < N
    wanted = row < rows
    sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)  # the weight is the left operand
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x_at = x + row.to(tl.int64)[None, :] * x_stride + k[:, None]
        activations = tl.load(x_at, mask=wanted[None, :] & (k < K)[:, None], other=0.0)
        if INT4:
            pair = start // 2 + tl.arange(0, BLOCK_K // 2)
            at = packed + column[:, None] * (K // 2) + pair[None, :]
            both = tl.load(at, mask=inside[:, None] & (pair < K // 2)[None, :], other=0)
            low = (both & 15).to(tl.int8) - 8
            high = (both >> 4).to(tl.int8) - 8
            integers = tl.reshape(tl.join(low, high), (BLOCK_N, BLOCK_K))  # low, high, low, high
        else:
            at = packed + column[:, None] * K + k[None, :]
            integers = tl.load(at, mask=inside[:, None] & (k < K)[None, :], other=0)
        partial = tl.dot(integers.to(DOT_TYPE), activations.to(DOT_TYPE), input_precision="ieee")
        if GROUP > 0:
            scale = tl.load(scales + column * (K // GROUP) + start // GROUP, mask=inside, other=0.0)
            partial = partial * scale.to(tl.float32)[:, None]
        sums += partial
    if GROUP == 0:
        sums = sums * tl.load(scales + column, mask=inside, other=0.0).to(tl.float32)[:, None]
    if HAS_BIAS:
        sums += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[:, None]
    out_at = out + row.to(tl.int64)[None, :] * N + column[:, None]
    tl.store(out_at, sums.to(out.dtype.element_ty), mask=wanted[None, :] & inside[:, None])


def quantized_linear(
    x: Tensor, packed: Tensor, scales: Tensor, bias: Tensor | None = None, *, backend: str | None = None
) -> Tensor:
    """Return `x @ weight.T + bias`, [rows, out], for x [rows, in] and the weight encoded by
    `packed` and `scales`.

    `backend` "triton" or "cpu"; None follows x's device. Shapes are not checked: the loader has
    checked those of the weight.
    """
    x = x.contiguous()
    if choose_backend(backend, x) == "cpu":
        return quantized_linear_cpu(x, packed, scales, bias)
    out = torch.empty(len(x), len(packed), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out

    def launch(configuration: Configuration) -> None:
        width = x.shape[1]
        grid = (triton.cdiv(len(packed), configuration.block_n), triton.cdiv(len(x), configuration.block_m))
        quantized_linear_kernel[grid](
            out, x, packed, scales, out if bias is None else bias, len(x), x.stride(0), len(packed), width,
            INT4=packed.dtype == torch.uint8,
            HAS_BIAS=bias is not None,
            DOT_TYPE=dot_type(x.dtype, x.dtype),
            num_warps=configuration.num_warps,
            num_stages=configuration.num_stages,
            **tiles(width // scales.shape[1], width, configuration),
        )  # fmt: skip

    candidates = FOR_FEW_ROWS if len(x) <= FEW_ROWS else FOR_MANY_ROWS
    if not x.is_cuda:  # the interpreter has nothing to measure
        launch(candidates[0])
    else:
        power_of_two = 1 << (len(x) - 1).bit_length()
        launch(fastest(candidates, (power_of_two, x.dtype, packed.dtype, packed.shape, scales.shape), launch))
    return out


def tiles(group_size: int, width: int, configuration: Configuration) -> dict[str, int]:
    """Return the kernel's constants for this group size and row width."""
    block_k = configuration.block_k
    blocks = {"BLOCK_N": configuration.block_n, "BLOCK_M": configuration.block_m}
    if group_size == width:  # one scale for the whole row, applied to the sum
        return {"GROUP": 0, "BLOCK_K": block_k, **blocks}
    return {"GROUP": group_size, "BLOCK_K": min(block_k, group_size), **blocks}
