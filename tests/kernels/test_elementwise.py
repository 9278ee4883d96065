"""Norm with residual, gated product and rotation: against float64, kernel against twin, compiled
for every target.
"""

import pytest
import torch
from kernels.harness import DTYPES, HEAD_DIMS, assert_close, assert_compiles, assert_twin, each_twin, on_threads

from minivllm.kernels import elementwise
from minivllm.kernels import elementwise as module

TOKENS = (0, 1, 7, 300)  # 300: many programs of the twin, the last one not full
WIDTHS = (48, 256, 688)
EPS = 1e-5


form_name = each_twin(elementwise, "triton")


@pytest.fixture
def form(form_name):
    """Return the `backend` that runs each of the three forms."""
    return "triton" if form_name == "triton" else "cpu"


def random(*shape, dtype=torch.float32, scale=1.0):
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def norm_in_float64(x, residual, weight):
    total = (x.double() + residual.double()).to(x.dtype).double()
    return total, total * (total.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()


@pytest.mark.interpreted
@pytest.mark.parametrize("width", WIDTHS)
def test_norm_of_the_sum(form, width):
    for tokens in TOKENS[: 3 if form == "triton" else None]:
        x, residual, weight = random(tokens, width), random(width, tokens).T.contiguous(), random(width)
        total, expected = norm_in_float64(x, residual, weight)
        out = module.add_rms_norm(x, residual, weight, EPS, backend=form)
        assert_close(out, expected)
        assert_close(residual, total)


def test_rows_apart_and_positions_of_any_kind():
    """The compiled loops read memory by address, so inputs in an unexpected layout must be
    converted first.
    """
    table, heads = random(50, 16), random(40, 3, 16)
    positions = torch.arange(40) * 7 % 50
    expected = heads.clone()
    module.rotate_heads(expected, positions, table, backend="cpu")
    for arguments in (positions.int(), positions.short(), torch.stack((positions, positions), 1)[:, 0]):
        turned = heads.clone()
        module.rotate_heads(turned, arguments, table, backend="cpu")
        assert torch.equal(turned, expected)
    turned = heads.clone().transpose(1, 2).contiguous().transpose(1, 2)
    module.rotate_heads(turned, positions, table, backend="cpu")
    assert_close(turned, expected.double())
    wide, residual, weight = random(40, 128), random(40, 64), random(128)[::2]
    total, norm = norm_in_float64(wide[:, :64], residual, weight)
    assert_close(module.add_rms_norm(wide[:, :64], residual, weight, EPS, backend="cpu"), norm)
    assert_close(residual, total)
    gate, up = wide[:, 64:].double().chunk(2, -1)
    assert_close(module.silu_and_mul(wide[:, 64:], backend="cpu"), gate * torch.sigmoid(gate) * up, scale=2)


@pytest.mark.parametrize("threads", [1, 3])
def test_as_many_threads_as_there_are(threads):
    """Threads take programs one at a time, leaving no token out and computing none twice."""
    x, residual, weight = random(333, 64), random(64, 333).T.contiguous(), random(64)
    total, expected = norm_in_float64(x, residual, weight)
    with on_threads(threads):
        for _ in range(20):
            again = residual.clone()
            assert_close(module.add_rms_norm(x, again, weight, EPS, backend="cpu"), expected)
            assert_close(again, total)


@pytest.mark.interpreted
@pytest.mark.parametrize("width", WIDTHS)
def test_gated_product(form, width):
    for tokens in TOKENS[: 3 if form == "triton" else None]:
        gate_up = random(tokens, 2 * width, scale=4.0)
        gate, up = gate_up.double().chunk(2, -1)
        assert_close(module.silu_and_mul(gate_up, backend=form), gate * torch.sigmoid(gate) * up, scale=2)


def test_gated_product_of_extreme_gates():
    gate = torch.tensor([[-1e4, -200.0, -90.0, -0.0, 0.0, 90.0, 200.0, 1e4]])
    result = module.silu_and_mul(torch.cat((gate, torch.ones_like(gate)), -1), backend="cpu")
    assert_close(result, gate.double() * torch.sigmoid(gate.double()))


@pytest.mark.interpreted
@pytest.mark.parametrize("positions_of", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("head_dim", [8, *HEAD_DIMS])
def test_rotation(form, positions_of, head_dim):
    angles = torch.rand(50, head_dim // 2, dtype=torch.float64) * 6
    table = torch.cat((angles.cos(), angles.sin()), -1).float()
    for tokens in TOKENS[: 3 if form == "triton" else None]:
        fused = random(tokens, 5, head_dim)  # three heads to turn, two that stay
        before, heads = fused.clone(), fused[:, :3]
        positions = torch.arange(tokens) * 7 % 50
        turns = torch.polar(torch.ones(()).double(), angles[positions])[:, None]
        first, second = heads.double().chunk(2, -1)
        turned = torch.complex(first, second) * turns
        module.rotate_heads(heads, positions.to(positions_of), table, backend=form)
        assert_close(heads, torch.cat((turned.real, turned.imag), -1))
        assert torch.equal(fused[:, 3:], before[:, 3:])
        module.rotate_heads(before, positions.to(positions_of), table, 3, backend=form)
        assert torch.equal(before, fused)


@pytest.mark.parametrize(("width", "head_dim"), [(48, 32), (256, 64), (688, 128)])
def test_passes_over_bf16_round_once(width, head_dim):
    """The result is the float64 outcome, rounded: off by at most one unit in the last place of
    bf16.
    """
    pytest.importorskip("numba")
    numbers = {"dtype": torch.bfloat16}
    x, weight = random(33, width, **numbers), random(width, **numbers)
    residual = random(width, 33, **numbers).T.contiguous()
    assert elementwise._cpu().can_run(width, x, residual, weight)
    total, expected = norm_in_float64(x, residual, weight)
    assert_rounded(module.add_rms_norm(x, residual, weight, EPS, backend="cpu"), expected)
    assert torch.equal(residual.double(), total), "the sum is rounded before it is normalised"
    gate_up = random(33, 2 * width, **numbers, scale=4.0)
    gate, up = gate_up.double().chunk(2, -1)
    assert_rounded(module.silu_and_mul(gate_up, backend="cpu"), gate * torch.sigmoid(gate) * up)
    heads, table, positions = random(33, 3, head_dim, **numbers), random(50, head_dim, **numbers), torch.arange(33)
    (first, second), (cos, sin) = heads.double().chunk(2, -1), table[positions].double().unsqueeze(1).chunk(2, -1)
    module.rotate_heads(heads, positions, table, backend="cpu")
    assert_rounded(heads, torch.cat((first * cos - second * sin, second * cos + first * sin), -1))


def assert_rounded(actual, exact):
    """Expect the exact numbers rounded to bfloat16, except where fp32 has tipped a tie."""
    assert actual.dtype is torch.bfloat16
    expected = exact.to(torch.bfloat16)
    assert (actual == expected).double().mean() > 0.99
    assert ((actual.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()


def test_bf16_keeps_what_is_no_number():
    pytest.importorskip("numba")
    x = torch.ones(1, 32, dtype=torch.bfloat16)
    x[0, 3], x[0, 20] = torch.nan, torch.inf
    total = torch.zeros_like(x)
    module.add_rms_norm(x, total, torch.ones_like(x[0]), EPS, backend="cpu")
    assert total[0, 3].isnan()
    assert total[0, 20].isinf()
    assert (total[0, :3] == 1).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_and_twin_are_alike(device, dtype):
    x, residual, weight = random(5, 80, dtype=dtype), random(80, 5, dtype=dtype).T.contiguous(), random(80, dtype=dtype)
    on_device, twin = residual.to(device).clone(), residual.clone()
    kernel = module.add_rms_norm(x.to(device), on_device, weight.to(device), EPS, backend="triton")
    assert_twin(kernel, module.add_rms_norm(x, twin, weight, EPS, backend="cpu"))
    assert_twin(on_device, twin)
    assert_twin(module.silu_and_mul(x.to(device), backend="triton"), module.silu_and_mul(x, backend="cpu"), scale=2)
    angles = torch.rand(9, 20)
    table = torch.cat((angles.cos(), angles.sin()), -1).to(dtype)
    heads, twin = x.view(5, 2, 40).to(device).clone(), x.view(5, 2, 40).clone()
    module.rotate_heads(heads, torch.arange(5).to(device), table.to(device), backend="triton")
    module.rotate_heads(twin, torch.arange(5), table, backend="cpu")
    assert_twin(heads, twin)


def test_compiled_for_every_target():
    norm = {"out": "*bf16", "residual": "*bf16", "x": "*bf16", "weight": "*bf16", "eps": 1e-5}
    assert_compiles(
        module.add_rms_norm_kernel, {**norm, "WIDTH": 4096, "PADDED_WIDTH": 4096}, {"num_warps": 8}, load_bytes=16
    )
    product = {"out": "*bf16", "gate_up": "*bf16", "WIDTH": 14336, "CHUNK": module.CHUNK}
    assert_compiles(module.silu_and_mul_kernel, product, load_bytes=16)
    rotation = {"heads": "*bf16", "positions": "*i64", "table": "*bf16", "token_stride": 6144}
    assert_compiles(module.rotate_heads_kernel, {**rotation, "HEAD_DIM": 128, "PADDED_HALF": 64}, {"num_warps": 1})
