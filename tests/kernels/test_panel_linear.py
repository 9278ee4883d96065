"""Matmuls with weights in panels give what float64 gives, on both tile shapes."""

import ctypes
import importlib.util
import platform
import random
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from minivllm.kernels.cpu import panel_linear
from minivllm.kernels.cpu.cells import PanelLinearCells
from minivllm.kernels.cpu.loops import ELEMENTS
from minivllm.kernels.cpu.panel_linear import PanelLinear, can_pack
from minivllm.platforms.threads import run_programs

numba = pytest.importorskip("numba", reason="the loops are numba's; a GPU's image has none")
lanes = pytest.importorskip("minivllm.kernels.cpu.lanes")
numba_linear = pytest.importorskip("minivllm.kernels.cpu.panel_linear_loops")
programs_of = pytest.importorskip("minivllm.kernels.cpu.programs")


@pytest.fixture(scope="module", params=[True, False], ids=["wide registers", "narrow registers"])
def tiles(request):
    """Return the loops compiled for a processor with AVX-512, or for one without."""
    if request.param == lanes.has_wide_registers():
        loops = numba_linear
    else:
        # A module of its own: compiled parts are named after it, and a process uses one of a name
        # for both.
        spec = importlib.util.spec_from_file_location("loops_of_other_registers", numba_linear.__file__)
        assert spec
        assert spec.loader
        loops = importlib.util.module_from_spec(spec)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lanes, "has_wide_registers", lambda: request.param)
            spec.loader.exec_module(loops)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, loops.__name__, loops)  # numba reads its cache by the module's name
        patch.setattr(panel_linear, "_loops", lambda: loops)
        yield loops


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request, tiles):
    return request.param


def expected(x, weight, bias=None, gated=False):
    out = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    if gated:
        gate, up = out.chunk(2, -1)
        out = F.silu(gate) * up
    return out


def assert_rounded_once(actual, exact):
    """Expect fp32 sums; in bf16 the sum is rounded once, by at most half a unit in its last place."""
    half_a_unit = 2**-8 if actual.dtype is torch.bfloat16 else 0.0
    torch.testing.assert_close(actual.double(), exact, rtol=half_a_unit + 1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("features", "wide", "pairs"),
    [
        ("", False, False),
        ("+avx2,+fma,-avx512f,-avx512bf16", False, False),
        ("+avx512f,+avx512vl", True, False),
        ("+avx512f,+avx512bf16", True, True),
    ],
)
def test_the_loops_are_for_the_processor_that_numba_compiles_for(monkeypatch, features, wide, pairs):
    monkeypatch.setattr(lanes.config, "CPU_FEATURES", features)
    monkeypatch.setattr(lanes, "get_host_cpu_features", lambda: {"avx512f": not wide, "avx512bf16": not pairs})
    assert (lanes.has_wide_registers(), lanes.has_products_of_pairs()) == (wide, pairs)
    monkeypatch.setattr(lanes.config, "CPU_FEATURES", None)
    assert (lanes.has_wide_registers(), lanes.has_products_of_pairs()) == (not wide, not pairs)


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "bias"])
def test_products_of_all_shapes_are_what_float64_gives(dtype, has_bias, gated):
    sizes, generator = random.Random(0), torch.Generator().manual_seed(0)
    for _ in range(12):
        rows, width, outputs = (sizes.randint(1, 150) for _ in range(3))
        width += width % 2 if dtype is torch.bfloat16 else 0
        x = torch.randn(rows, width, generator=generator).to(dtype)
        weight = (torch.randn(outputs * (2 if gated else 1), width, generator=generator) / width**0.5).to(dtype)
        bias = torch.randn(len(weight), generator=generator).to(dtype) if has_bias else None
        out = PanelLinear(weight, bias, gated)(x)
        assert out.shape == (rows, outputs)
        assert out.is_contiguous()
        assert_rounded_once(out, expected(x, weight, bias, gated))


def test_every_number_of_rows_is_computed_and_nothing_beside_them_is_written(tiles, dtype):
    weight = torch.randn(2 * tiles.PANEL + 3, 40).to(dtype)
    linear = PanelLinear(weight)
    for rows in (*range(1, 14), 47, 48, 49, 95, 97):
        x = torch.randn(rows, 40).to(dtype)
        around = torch.full((rows + 2, len(weight)), 7.0, dtype=dtype)
        out = around[1:-1]
        addresses = (tensor.data_ptr() for tensor in (x, out, linear.panels, linear.bias))
        run_programs(tiles.programs_for(ELEMENTS[dtype]), PanelLinearCells(0, *out.shape, x.shape[1], 1, 0, *addresses))
        assert_rounded_once(out, expected(x, weight))
        assert (around[0] == 7).all()
        assert (around[-1] == 7).all()


def test_gate_and_up_can_be_had_side_by_side(tiles, dtype):
    """Adapters need both outputs, because they are added before the activation."""
    torch.manual_seed(0)
    for rows, outputs in ((1, 16), (7, tiles.PANEL + 5), (50, 3)):
        weight, x = torch.randn(2 * outputs, 40).to(dtype), torch.randn(rows, 40).to(dtype)
        linear = PanelLinear(weight, gated=True)
        assert_rounded_once(linear(x, activate=False), expected(x, weight))
        assert_rounded_once(linear(x), expected(x, weight, gated=True))
        assert_rounded_once(PanelLinear(weight)(x, activate=False), expected(x, weight))


def test_no_rows_and_rows_that_do_not_lie_side_by_side(tiles):
    weight, x = torch.randn(50, 30), torch.randn(9, 60)
    linear = PanelLinear(weight)
    assert linear(x[:0, :30]).shape == (0, 50)
    torch.testing.assert_close(linear(x[:, ::2]).double(), expected(x[:, ::2], weight), rtol=1e-5, atol=1e-5)


def test_gates_far_from_zero_neither_overflow_nor_vanish(tiles):
    gates = torch.tensor([-1000.0, -100.0, -88.0, -20.0, -1e-6, 0.0, 1e-6, 20.0, 88.0, 100.0, 1000.0])
    weight = torch.cat((torch.diag(gates), torch.ones(len(gates), len(gates))))
    out = PanelLinear(weight, gated=True)(torch.eye(len(gates)))
    torch.testing.assert_close(out.double(), expected(torch.eye(len(gates)), weight, gated=True), rtol=1e-6, atol=1e-7)


def test_the_sigmoid_is_as_close_as_it_says():
    """All lanes are checked, with the sigmoid compiled alone."""

    def programs(address):
        block = programs_of.array_at(address, 3, np.int64)
        numbers = programs_of.array_at(block[2], block[1], np.float32)
        for at in range(0, block[1], 16):
            lanes.store(numbers, at, lanes.sigmoid(lanes.load(numbers, at)))

    numbers = torch.linspace(-80, 80, 16_000)
    result = numbers.clone()
    run_programs(
        programs_of.compile_programs(programs), (ctypes.c_int64 * 3)(0, len(result), result.data_ptr()), most_threads=1
    )
    assert ((result.double() / numbers.double().sigmoid()) - 1).abs().max() < 1e-5  # e ** −80, of a rounded product
    near = numbers.abs() < 4
    assert ((result.double() / numbers.double().sigmoid()) - 1)[near].abs().max() < 5e-7


@pytest.mark.parametrize(
    ("shape", "dtype", "machine", "numba", "packs"),
    [
        ((4, 4), torch.float32, "x86_64", True, True),
        ((4, 4), torch.float32, "AMD64", True, True),
        ((4, 4), torch.float32, "arm64", True, False),
        ((4, 4), torch.float32, "x86_64", False, False),
        ((4, 4), torch.bfloat16, "x86_64", True, True),
        ((4, 3), torch.bfloat16, "x86_64", True, False),
        ((4, 4), torch.float16, "x86_64", True, False),
    ],
)
def test_what_is_packed(monkeypatch, shape, dtype, machine, numba, packs):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(panel_linear, "has_numba", lambda: numba)
    assert can_pack(torch.zeros(shape, dtype=dtype)) == packs
    assert not can_pack(torch.zeros(shape, dtype=dtype, device="meta"))
