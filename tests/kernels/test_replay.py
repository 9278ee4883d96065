"""Recordings: a replay computes what the function would from its inputs' current contents."""

import pytest
import torch

from minivllm.kernels.elementwise import add_rms_norm, silu_and_mul

pytest.importorskip("numba", reason="the loops are numba's; a GPU's image has none")

from minivllm.kernels.cpu.panel_linear import PanelLinear
from minivllm.kernels.cpu.replay import CannotRecord, CpuRecorder

WIDTH = 64


class Layer:
    """Compiled programs with torch's operators between them, from `x` to `out`."""

    def __init__(self, rows: int) -> None:
        generator = torch.Generator().manual_seed(0)
        up, down = (
            torch.randn(6 * WIDTH, WIDTH, generator=generator),
            torch.randn(WIDTH, 3 * WIDTH, generator=generator),
        )
        self.up, self.down = PanelLinear(up / 8, gated=True), PanelLinear(down / 8)
        self.x, self.residual, self.out = (torch.zeros(rows, WIDTH) for _ in range(3))
        self.weight = torch.linspace(0.5, 2, WIDTH)

    def __call__(self) -> None:
        """Compute, and change the residual in place."""
        normed = add_rms_norm(self.x, self.residual, self.weight, 1e-5)
        halves = self.up(normed, activate=False)
        gated = silu_and_mul(halves) + self.up(normed) * 0.5
        first, second = self.down(gated).chunk(2, dim=-1)
        self.out.copy_(torch.cat((second, first), dim=-1))

    def fill(self, seed: int) -> None:
        """Give the inputs other numbers."""
        generator = torch.Generator().manual_seed(seed)
        self.x.normal_(generator=generator)
        self.residual.normal_(generator=generator)


@pytest.fixture(params=[1, 2, 5])
def threads(request):
    """Run the test on this many threads, which may be more than there are cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@torch.inference_mode()
def test_a_replay_computes_from_what_its_inputs_hold_now(threads):
    layer = Layer(7)
    replay = CpuRecorder()(layer)
    for seed in range(200):
        layer.fill(seed)
        layer()
        out, residual = layer.out.clone(), layer.residual.clone()
        layer.fill(seed)
        layer.out.zero_()
        replay()
        assert torch.equal(layer.out, out)
        assert torch.equal(layer.residual, residual)


@torch.inference_mode()
def test_the_memory_of_a_recording_is_used_for_nothing_else():
    layer = Layer(3)
    replay = CpuRecorder()(layer)
    layer.fill(1)
    replay()
    out = layer.out.clone()
    others = [torch.full((3, width), float("nan")) for width in (WIDTH, 3 * WIDTH, 6 * WIDTH) for _ in range(50)]
    layer.fill(1)
    replay()
    assert torch.equal(layer.out, out)
    assert all(other.isnan().all() for other in others)


@torch.inference_mode()
def test_recordings_of_one_recorder_share_memory():
    recorder, layers = CpuRecorder(), [Layer(rows) for rows in (8, 4, 1)]
    replays = [recorder(layers[0])]
    held = sum(tensor.nbytes for tensor in recorder._memory)
    replays += [recorder(layer) for layer in layers[1:]]
    assert sum(tensor.nbytes for tensor in recorder._memory) == held
    for layer, replay in zip(layers, replays, strict=True):
        layer.fill(2)
        layer()
        out = layer.out.clone()
        layer.fill(2)
        replay()
        assert torch.equal(layer.out, out)


def test_each_result_of_an_operator_is_computed_again():
    x, ends = torch.arange(4.0), torch.zeros(2)
    replay = CpuRecorder()(lambda: torch.stack(tuple(x.aminmax()), out=ends))
    x.add_(10)
    replay()
    assert ends.tolist() == [10, 13]


def test_a_function_that_looks_at_numbers_cannot_be_recorded():
    x = torch.ones(3)
    with pytest.raises(CannotRecord, match="looks at a tensor's numbers"):
        CpuRecorder()(lambda: x.add_(1) if x.sum() > 2 else x)
    x.zero_()
    assert x.sum() == 0, "nothing is recorded any more"


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.add_(1), lambda x: x.__iadd__(1), lambda x: x.__setitem__(0, 5.0), lambda x: x[1:].mul_(3),
        lambda x: torch.add(x, 1, out=x), lambda x: x.copy_(x.flip(0)), lambda x: x.unsqueeze(0).neg_(),
    ],
)  # fmt: skip
def test_what_works_in_place_is_repeated(change):
    x = torch.arange(4.0)
    replay = CpuRecorder()(lambda: change(x))
    x.copy_(torch.arange(4.0))
    replay()
    expected = torch.arange(4.0)
    change(expected)
    assert torch.equal(x, expected)
