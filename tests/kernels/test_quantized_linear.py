"""Matmuls with packed weights: the kernel and its twins give what the unpacked numbers give;
packing loses nothing.
"""

import functools

import numpy as np
import pytest
import torch
from kernels.harness import DTYPES, assert_close, assert_twin, compile_launches, each_twin
from refusals import assert_refused

from minivllm.kernels import quantized_linear as module
from minivllm.kernels.cpu import quantized_linear_calls
from minivllm.kernels.packed_weights import (
    check_group_size,
    default_group_size,
    dequantize_weight,
    pack_int4,
    quantize_weight,
    unpack,
)
from minivllm.kernels.quantized_linear import quantized_linear

KINDS = {"int8": ("int8", None), "int4": ("int4", 32), "int4, short groups": ("int4", 16), "int4, rows": ("int4", 0)}
SHAPES = [(1, 40, 96), (3, 33, 64), (17, 70, 160), (16, 1, 32)]  # rows, out, in


def make(kind, rows, out, width, dtype=torch.float32, scale_dtype=None):
    """Return x, packed, scales, bias, and the float64 answer for the numbers that the integers
    stand for.
    """
    torch.manual_seed(rows + out + width)
    quantization, group = KINDS[kind]
    packed, scales = quantize_weight(torch.randn(out, width), quantization, width if group == 0 else group)
    scales = scales.to(scale_dtype or scales.dtype)
    x, bias = torch.randn(rows, width).to(dtype), torch.randn(out).to(dtype)
    integers = [[int(number) for number in row] for row in unpack(packed)]
    groups = np.repeat(scales.double().numpy(), width // scales.shape[1], axis=1)
    weight = torch.from_numpy(np.array(integers) * groups)
    return x, packed, scales, bias, x.double() @ weight.T + bias.double()


# ---- packing -------------------------------------------------------------------------------------


def test_packing_keeps_every_integer_and_puts_the_first_into_the_lower_half():
    integers = torch.arange(-8, 8, dtype=torch.int8).repeat(3, 2)
    packed = pack_int4(integers)
    assert packed.shape == (3, 16)
    assert packed[0, 0] == 0 + (1 << 4)
    assert torch.equal(unpack(packed), integers)
    words = packed.view(torch.int32)  # eight to a word, the lowest bits first: what checkpoints have
    for place in range(8):
        assert torch.equal((words >> (4 * place)) & 15, integers[:, place::8].int() + 8)


@pytest.mark.parametrize("group_size", [16, 32, 96])
def test_numbers_are_off_by_half_a_scale_at_most(group_size):
    torch.manual_seed(0)
    weight = torch.randn(50, 96)
    weight[3], weight[4, 7] = 0, 100.0
    for quantization, least, most in (("int8", -127, 127), ("int4", -8, 7)):
        packed, scales = quantize_weight(weight, quantization, group_size)
        assert scales.shape == (50, 96 // group_size)
        integers, steps = unpack(packed), scales.float().repeat_interleave(group_size, 1)
        assert least <= integers.min() < integers.max() <= most
        error = (dequantize_weight(packed, scales) - weight).abs()
        clipped = (weight / steps).nan_to_num(0.0) > 7.5 if quantization == "int4" else torch.zeros_like(weight).bool()
        assert (error <= 0.51 * steps.abs())[~clipped].all()
        assert (error <= 1.05 * steps.abs()).all()
        assert not dequantize_weight(packed, scales)[3].any()
    assert torch.equal(unpack(packed).view(50, -1, group_size).amin(-1)[:3], torch.full((3, 96 // group_size), -8))


def test_default_groups_are_long_in_wide_rows_and_always_fit():
    assert [default_group_size(width) for width in (256, 688, 896, 1024, 4864, 14336)] == [32, 16, 32, 128, 128, 128]
    assert_refused(r"\b40\b.*\b16\b.*: .*\b40\b", default_group_size, 40)
    assert_refused(r"\b96\b.*\b48\b.*16, 32, 96", check_group_size, 48, 96)
    assert_refused(r"\b64\b.*16, 32, 96", quantize_weight, torch.zeros(2, 96), "int4", 64)
    assert_refused(r"int3.*int8, int4", quantize_weight, torch.zeros(2, 96), "int3")
    assert_refused("odd", quantize_weight, torch.zeros(2, 33), "int4", 33)


# ---- numerics ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "shape"), [*zip(KINDS, SHAPES, strict=True), *zip(KINDS, SHAPES[::-1], strict=True)])
def test_the_kernel_multiplies_by_what_the_integers_stand_for(device, kind, shape):
    x, packed, scales, bias, expected = make(kind, *shape)
    arguments = [item.to(device) for item in (x, packed, scales)]
    actual = quantized_linear(*arguments, bias.to(device), backend="triton")
    assert_close(actual, expected)
    assert_close(quantized_linear(*arguments, backend="triton"), expected - bias)
    assert_twin(actual, quantized_linear(x, packed, scales, bias, backend="cpu"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_the_kernel_in_other_precisions(device, kind, dtype):
    *arguments, expected = make(kind, 5, 20, 160, dtype, torch.float16)
    actual = quantized_linear(*(argument.to(device) for argument in arguments), backend="triton")
    assert actual.dtype == dtype
    assert_close(actual, expected)


def test_rows_that_end_inside_a_tile_of_the_kernel(device):
    """A width of 200 is one tile of 128 and 72 numbers of the next; poison follows the last row."""
    for kind in ("int8", "int4, rows"):
        x, packed, scales, bias, expected = make(kind, 3, 7, 200)
        behind = torch.full((4, 200), torch.nan)
        behind[:3] = x
        arguments = [item.to(device) for item in (behind[:3], packed, scales, bias)]
        assert_close(quantized_linear(*arguments, backend="triton"), expected)


twin = each_twin(quantized_linear_calls)


@pytest.mark.parametrize("kind", KINDS)
def test_the_twins_multiply_by_what_the_integers_stand_for(twin, kind):
    for out, width in ((1, 32), (37, 96), (16, 160)):
        x, packed, scales, bias, expected = make(kind, 33, out, width)
        for rows in (0, 1, 2, 3, 4, 6, 17, 33):
            assert_close(quantized_linear(x[:rows], packed, scales, bias), expected[:rows])


@pytest.mark.parametrize("scale_dtype", DTYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_twins_know_every_type_of_scale(twin, scale_dtype, dtype):
    x, packed, scales, bias, expected = make("int4", 5, 20, 64, dtype, scale_dtype)
    actual = quantized_linear(x, packed, scales, bias)
    assert actual.dtype == dtype
    assert_close(actual, expected)


# ---- compiled ------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantization", ["int4", "int8"])
@pytest.mark.parametrize("rows", [7, 700], ids=["few rows", "many rows"])
def test_the_kernel_compiles_everywhere(monkeypatch, quantization, rows):
    compile_launches(monkeypatch, module, "quantized_linear_kernel", tensor_core=True, load_bytes=16)
    bf16 = functools.partial(torch.empty, dtype=torch.bfloat16, device="meta")
    packed, scales = bf16(4096, 2048).to(torch.uint8), bf16(4096, 32)
    if quantization == "int8":
        packed, scales = bf16(4096, 4096).to(torch.int8), bf16(4096, 1).float()
    quantized_linear(bf16(rows, 4096), packed, scales, bf16(4096), backend="triton")
