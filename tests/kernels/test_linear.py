"""Products with weights in panels: what float64 gives, on both shapes of tiles."""

import importlib.util
import platform

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.kernels import cpu_linear, lanes, numba_linear
from minivllm.kernels.cpu_linear import PanelLinear, can_pack
from minivllm.kernels.programs import array_at, compile_programs
from minivllm.kernels.torch_threads import run_programs

sizes = st.integers(1, 150)


@pytest.fixture(scope="module", params=[True, False], ids=["wide registers", "narrow registers"])
def tiles(request):
    """The loops as a processor with AVX-512 gets them, and as one without does."""
    if request.param == lanes.has_wide_registers():
        loops = numba_linear
    else:
        spec = importlib.util.find_spec("minivllm.kernels.numba_linear")
        assert spec
        assert spec.loader
        loops = importlib.util.module_from_spec(spec)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lanes, "has_wide_registers", lambda: request.param)
            spec.loader.exec_module(loops)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_linear, "_loops", lambda: loops)
        yield loops


def expected(x, weight, bias=None, gated=False):
    out = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    if gated:
        gate, up = out.chunk(2, -1)
        out = F.silu(gate) * up
    return out


def test_a_tile_has_as_many_columns_as_the_registers_hold(tiles):
    assert (64 if tiles.COLUMNS == 4 else 16) == tiles.PANEL
    assert (4 if lanes.has_wide_registers() else 1) == numba_linear.COLUMNS


@settings(max_examples=60, deadline=None)
@given(rows=sizes, width=sizes, outputs=sizes, has_bias=st.booleans(), gated=st.booleans(), seed=st.integers(0, 99))
def test_products_of_all_shapes_are_what_float64_gives(tiles, rows, width, outputs, has_bias, gated, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator)
    weight = torch.randn(outputs * (2 if gated else 1), width, generator=generator) / width**0.5
    bias = torch.randn(outputs, generator=generator) if has_bias and not gated else None
    out = PanelLinear(weight, bias, gated)(x)
    assert out.shape == (rows, outputs)
    assert out.is_contiguous()
    torch.testing.assert_close(out.double(), expected(x, weight, bias, gated), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [*range(1, 14), 47, 48, 49, 95, 97])
def test_every_number_of_rows_is_computed_and_nothing_beside_them_is_written(tiles, rows):
    torch.manual_seed(rows)
    weight, x = torch.randn(2 * tiles.PANEL + 3, 40), torch.randn(rows, 40)
    linear = PanelLinear(weight)
    around = torch.full((rows + 2, len(weight)), 7.0)
    out = around[1:-1]
    addresses = (tensor.data_ptr() for tensor in (x, out, linear.panels))
    run_programs(tiles.programs(), (*out.shape, x.shape[1], 1, *addresses))
    torch.testing.assert_close(out.double(), expected(x, weight), rtol=1e-5, atol=1e-5)
    assert (around[0] == 7).all()
    assert (around[-1] == 7).all()


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
    """Over all lanes; compiled alone."""

    def programs(address):
        block = array_at(address, 3, np.int64)
        numbers = array_at(block[2], block[1], np.float32)
        for at in range(0, block[1], 16):
            lanes.store(numbers, at, lanes.sigmoid(lanes.load(numbers, at)))

    numbers = torch.linspace(-80, 80, 16_000)
    found = numbers.clone()
    run_programs(compile_programs(programs), (len(found), found.data_ptr()), most_threads=1)
    assert ((found.double() / numbers.double().sigmoid()) - 1).abs().max() < 1e-5  # e ** −80, of a rounded product
    near = numbers.abs() < 4
    assert ((found.double() / numbers.double().sigmoid()) - 1)[near].abs().max() < 5e-7


@pytest.mark.parametrize(
    ("weight", "machine", "numba", "packs"),
    [
        (torch.zeros(4, 4), "x86_64", True, True),
        (torch.zeros(4, 4), "AMD64", True, True),
        (torch.zeros(4, 4), "arm64", True, False),
        (torch.zeros(4, 4), "x86_64", False, False),
        (torch.zeros(4, 4, dtype=torch.bfloat16), "x86_64", True, False),
        (torch.zeros(4, 4, device="meta"), "x86_64", True, False),
    ],
)
def test_what_is_packed(monkeypatch, weight, machine, numba, packs):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(cpu_linear, "has_numba", lambda: numba)
    assert can_pack(weight) == packs
