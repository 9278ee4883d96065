"""Recordings: a replay computes what the function would from its inputs' current contents."""

import pytest
import torch
from kernels.harness import on_threads

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


def check_replay(layer: Layer, replay, seed: int) -> None:
    """Expect a replay to leave in `out` and `residual` what the layer itself does."""
    layer.fill(seed)
    layer()
    out, residual = layer.out.clone(), layer.residual.clone()
    layer.fill(seed)
    layer.out.zero_()
    replay()
    assert torch.equal(layer.out, out)
    assert torch.equal(layer.residual, residual)


@pytest.mark.parametrize("threads", [1, 2, 5])  # which may be more than there are cores
@torch.inference_mode()
def test_a_replay_computes_from_what_its_inputs_hold_now(threads):
    layer = Layer(7)
    with on_threads(threads):
        replay = CpuRecorder()(layer)
        for seed in range(200):
            check_replay(layer, replay, seed)


@torch.inference_mode()
def test_the_memory_of_a_recording_is_used_for_nothing_else():
    layer = Layer(3)
    replay = CpuRecorder()(layer)
    others = [torch.full((3, width), float("nan")) for width in (WIDTH, 3 * WIDTH, 6 * WIDTH) for _ in range(50)]
    check_replay(layer, replay, 1)
    assert all(other.isnan().all() for other in others)


@torch.inference_mode()
def test_recordings_of_one_recorder_share_memory():
    recorder, layers = CpuRecorder(), [Layer(rows) for rows in (8, 4, 1)]
    replays = [recorder(layers[0])]
    held = sum(tensor.nbytes for tensor in recorder._memory)
    replays += [recorder(layer) for layer in layers[1:]]
    assert sum(tensor.nbytes for tensor in recorder._memory) == held
    for layer, replay in zip(layers, replays, strict=True):
        check_replay(layer, replay, 2)


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
