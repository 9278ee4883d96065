"""Adapters' matmuls: kernels and CPU forms give what each row's own adapter gives, whatever the
rows beside it are.
"""

import itertools

import numpy as np
import pytest
import torch
from kernels.harness import DTYPES, assert_close, compile_launches, each_twin, trace_launches

from minivllm.kernels import lora_linear as module
from minivllm.kernels.cpu import lora_calls
from minivllm.kernels.lora_linear import FEW_ROWS, lora_linear
from minivllm.kernels.lora_metadata import LoRAKernelMeta

CPU = torch.device("cpu")
CASES = {
    "one row, one slot": ([0], 8, 32, (48,)), "nobody has one": ([-1, -1, -1], 8, 32, (48,)),
    "mixed, three slices": ([2, -1, 0, 2, 0, 1, -1, 2], 16, 96, (64, 32, 32)),
    "a whole tile and one": ([1] * 17, 8, 48, (80,)), "a narrow slice": ([0, 1], 4, 16, (16, 16)),
    "ranks beyond a tile": ([1, 0, 1], 80, 64, (32, 96)), "a long sum in parts": ([0, 2, 0], 8, 1200, (32,)),
    "many rows of one slot": ([2] * (FEW_ROWS + 5) + [0] * 3, 8, 64, (32,)),
    "not of whole lanes": ([0, 1, -1, 1], 8, 37, (21, 5)), "rank 1": ([0, 1, 1], 4, 32, (32,)),
}  # fmt: skip


def make(case, dtype=torch.float32, device=CPU, slots=3):
    """Return (y, x, a, b, ranks, bounds, meta) and the float64 answer. Numbers beyond a slot's rank
    are NaN.
    """
    rows_slots, max_rank, width, slices = CASES[case]
    torch.manual_seed(len(rows_slots) + max_rank + width)
    rows, outputs = len(rows_slots), sum(slices)
    x, y = torch.randn(rows, width), torch.randn(rows, outputs)
    a = torch.randn(len(slices), slots, max_rank, width) / width**0.5
    b = torch.randn(slots, max_rank, outputs)
    ranks = torch.randint(0, max_rank + 1, (len(slices), slots), dtype=torch.int32)
    ranks[0, rows_slots[-1]] = max_rank
    if case == "rank 1":
        ranks[:] = 1
    bounds = torch.tensor([0, *slices]).cumsum(0).int()
    x, y, a, b = (item.to(dtype) for item in (x, y, a, b))
    expected = y.double()
    for row, slot in enumerate(rows_slots):
        for piece, (first, last) in enumerate(itertools.pairwise(bounds)):
            rank = int(ranks[piece, slot])
            if slot >= 0 and rank:
                small = a[piece, slot, :rank].double() @ x[row].double()
                expected[row, first:last] += small @ b[slot, :rank, first:last].double()
    for slot in range(slots):
        for piece in range(len(slices)):
            a[piece, slot, ranks[piece, slot] :] = torch.nan
        for piece, (first, last) in enumerate(itertools.pairwise(bounds)):
            b[slot, ranks[piece, slot] :, first:last] = torch.nan
    meta = LoRAKernelMeta(rows, slots, device)
    meta.prepare(np.array(rows_slots, np.int32))
    return *(item.to(device) for item in (y, x, a, b, ranks, bounds)), meta, expected


MIXED = "mixed, three slices"


@pytest.mark.parametrize(
    ("case", "dtype"), [*((case, torch.float32) for case in CASES), *((MIXED, dtype) for dtype in DTYPES[1:])]
)
def test_the_kernels_give_each_row_its_own_adapter(device, case, dtype):
    *arguments, expected = make(case, dtype, device)
    lora_linear(*arguments, backend="triton")
    assert arguments[0].dtype == dtype
    assert_close(arguments[0], expected, scale=1 if dtype == torch.float32 else 4)


def test_a_grid_that_knows_no_counts_gives_the_same(device):
    """A CUDA graph's grid is launched for whatever slots and counts there are."""
    for case in (MIXED, "nobody has one", "many rows of one slot"):
        *arguments, expected = make(case, device=device)
        lora_linear(*arguments, backend="triton", fixed_grid=True)
        assert_close(arguments[0], expected)


twin = each_twin(lora_calls)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_twins_give_each_row_its_own_adapter(twin, case, dtype):
    *arguments, expected = make(case, dtype)
    lora_linear(*arguments, backend="cpu")
    assert_close(arguments[0], expected, scale=4)


def test_rows_that_lie_apart_and_dtypes_that_differ():
    for dtype in (torch.float32, torch.bfloat16):
        y, x, a, b, *rest, expected = make(MIXED, dtype)
        wide = torch.full((len(x), 2 * x.shape[1]), torch.nan, dtype=dtype)
        wide[:, : x.shape[1]] = x
        lora_linear(y, wide[:, : x.shape[1]], a, b, *rest)
        assert_close(y, expected, scale=4)
    y, x, a, b, *rest, expected = make(MIXED)
    lora_linear(y, x, a.double(), b.double(), *rest)
    assert_close(y, expected)


def test_no_adapter_no_launch(monkeypatch):
    *arguments, expected = make("nobody has one")
    monkeypatch.setattr(module, "lora_linear_cpu", None)
    monkeypatch.setattr(module, "_launch", None)
    lora_linear(*arguments)
    assert torch.equal(arguments[0].double(), expected)


# ---- traced, compiled, refused -------------------------------------------------------------------


@pytest.mark.interpreted
def test_nothing_is_written_twice_or_read_outside(monkeypatch):
    traces = trace_launches(monkeypatch, module, "lora_shrink_kernel", "lora_expand_kernel")
    *arguments, expected = make(MIXED)
    lora_linear(*arguments, backend="triton")
    assert_close(arguments[0], expected)
    shrink, expand = traces.values()
    ranks, slots = arguments[4], CASES[MIXED][0]
    sums = 4 * sum(int(ranks[piece, slot]) for slot in slots if slot >= 0 for piece in range(3))
    assert shrink.bytes_written == shrink.bytes_written_once == sums
    widths = CASES[MIXED][3]
    changed = sum(4 * widths[piece] for slot in slots if slot >= 0 for piece in range(3) if ranks[piece, slot])
    assert expand.bytes_written == expand.bytes_written_once == changed


@pytest.mark.parametrize("rows", [7, 700], ids=["few rows", "many rows"])
@pytest.mark.parametrize("max_rank", [16, 128])
def test_the_kernels_compile_everywhere(monkeypatch, rows, max_rank):
    compile_launches(monkeypatch, module, "lora_shrink_kernel", tensor_core=True, load_bytes=16)
    # 16 of 64 numbers for 256 threads
    compile_launches(monkeypatch, module, "lora_expand_kernel", tensor_core=True, load_bytes=8)
    meta, edges = LoRAKernelMeta(rows, 4, CPU), [0, 4096, 6144, 8192]
    meta.prepare(np.zeros(rows, np.int32))
    with torch.device("meta"):
        shapes = (rows, 8192), (rows, 4096), (3, 4, max_rank, 4096), (4, max_rank, 8192)
        tensors = [torch.empty(shape, dtype=torch.bfloat16) for shape in shapes]
        ranks = torch.empty(3, 4, dtype=torch.int32)
        lora_linear(*tensors, ranks, ranks[0], meta, edges=edges, backend="triton")
