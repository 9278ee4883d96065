"""The bytes of a kernel are counted exactly, its races are found, and no memory outside its
arguments is touched.
"""

import runpy
import sys

import numpy as np
import pytest
import torch
from refusals import assert_refused

from minivllm.platforms.triton_utils import tl, triton
from minivllm_lab.checks.kernel_trace import trace_kernel

pytestmark = pytest.mark.interpreted


@triton.jit
def scale_kernel(out, x, count, BLOCK: tl.constexpr):
    """Double BLOCK elements in each program."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, 2 * tl.load(x + at, mask=at < count), mask=at < count)


@triton.jit
def overlapping_kernel(out, x, STEP: tl.constexpr, BLOCK: tl.constexpr):
    """Copy pieces that overlap where STEP is less than BLOCK."""
    at = tl.program_id(0) * STEP + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at))


@triton.jit
def shift_kernel(x, BLOCK: tl.constexpr):
    """Shift in place: each program reads its left neighbour's last element."""
    program = tl.program_id(0)
    at = program * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at - 1, mask=at > 0, other=0.0))


@triton.jit
def reread_kernel(out, x, TIMES: tl.constexpr):
    total = 0.0
    for _ in range(TIMES):
        total += tl.load(x)
    tl.store(out + tl.program_id(0), total)


@triton.jit
def add_kernel(out, x):
    tl.atomic_add(out, tl.load(x + tl.program_id(0)))


@triton.jit
def mixed_kernel(out, x):
    program = tl.program_id(0)
    if program == 0:
        tl.store(out, 1.0)
    else:
        tl.atomic_add(out, 1.0)


@triton.jit
def scatter_kernel(out, x, slots, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + tl.load(slots + at), tl.load(x + at))


@triton.jit
def grid_kernel(out, x, COLUMNS: tl.constexpr):
    row, column = tl.program_id(0), tl.program_id(1)
    tl.store(out + row * COLUMNS + column, tl.load(x + row * COLUMNS + column))


@triton.jit
def scalar_in_mask_kernel(out, x, allowed, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    mask = (lane < 3) & (tl.load(allowed + tl.program_id(0)) != 0)
    tl.store(out + lane, tl.load(x + lane, mask=mask, other=0), mask=mask)


@triton.jit
def stub(x):
    raise NotImplementedError("write me")


@triton.jit
def raising_kernel(x):
    stub(x)


def numbers(*shape, dtype=torch.float32):
    return torch.arange(int(np.prod(shape)), dtype=dtype).view(shape)


# ---- bytes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.int8, 1)])
def test_only_what_the_mask_lets_through_is_counted(dtype, size):
    out, x = torch.zeros(10, dtype=dtype), numbers(10, dtype=dtype)
    trace = trace_kernel(scale_kernel, (3,), out, x, 10, BLOCK=4)
    assert torch.equal(out, 2 * x), "the arguments hold what the kernel wrote"
    assert (trace.programs, trace.bytes_read, trace.bytes_read_once, trace.bytes_written) == (3, *[10 * size] * 3)
    assert trace.arguments["x"].bytes_read == trace.arguments["out"].bytes_written == 10 * size
    assert trace.arguments["x"].bytes_written == trace.arguments["out"].bytes_read == 0
    assert trace.races == trace.out_of_bounds == []


def test_a_mask_may_be_made_of_a_vector_and_a_scalar():
    """A GPU accepts it too; Triton's own interpreter makes integers of the two and refuses them."""
    out, x = torch.zeros(4), numbers(4) + 1
    trace = trace_kernel(scalar_in_mask_kernel, (2,), out, x, torch.tensor([0, 1], dtype=torch.int32), BLOCK=4)
    assert out.tolist() == [1, 2, 3, 0]
    assert trace.arguments["x"].bytes_read == trace.arguments["out"].bytes_written == 12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.float8_e4m3fn])
def test_numbers_that_numpy_does_not_know_have_their_size_too(dtype):
    out, x = torch.zeros(4, dtype=dtype), numbers(4).to(dtype)
    trace = trace_kernel(overlapping_kernel, (1,), out, x, STEP=4, BLOCK=4)
    assert torch.equal(out.view(torch.uint8), x.view(torch.uint8))
    assert trace.bytes_read == trace.bytes_written == x.nbytes


def test_what_is_read_again_counts_again_but_once():
    trace = trace_kernel(reread_kernel, (2,), torch.zeros(2), torch.ones(1), TIMES=5)
    assert (trace.bytes_read, trace.bytes_read_once) == (2 * 5 * 4, 4)
    assert (trace.bytes_written, trace.bytes_written_once) == (8, 8)


def test_each_access_knows_its_program_and_elements():
    trace = trace_kernel(scale_kernel, (2,), torch.zeros(6), numbers(6), 6, BLOCK=4)
    results = [(access.kind, access.program, access.argument, access.elements.tolist()) for access in trace.accesses]
    assert results == [
        ("load", (0,), "x", [0, 1, 2, 3]),
        ("store", (0,), "out", [0, 1, 2, 3]),
        ("load", (1,), "x", [4, 5]),
        ("store", (1,), "out", [4, 5]),
    ]


# ---- races ---------------------------------------------------------------------------------------


def test_two_programs_that_write_one_element():
    trace = trace_kernel(overlapping_kernel, (3,), torch.zeros(10), numbers(10), STEP=3, BLOCK=4)
    assert trace.races == ["programs 0 and 1 both write out[3] (and 1 more element)"]
    assert trace.bytes_read == 3 * 4 * 4 == trace.bytes_read_once + 2 * 4
    assert trace_kernel(overlapping_kernel, (3,), torch.zeros(12), numbers(12), STEP=4, BLOCK=4).races == []


def test_a_program_that_reads_what_another_writes():
    trace = trace_kernel(shift_kernel, (3,), numbers(12), BLOCK=4)
    assert trace.races == ["program 1 reads what program 0 writes: x[3] (and 1 more element)"]
    assert trace_kernel(shift_kernel, (1,), numbers(4), BLOCK=4).races == [], "its own writes are not a race"


def test_the_same_memory_under_two_names_is_one_memory():
    x = numbers(9)
    trace = trace_kernel(overlapping_kernel, (2,), x[:8], x[1:], STEP=4, BLOCK=4)
    assert any("reads what program" in race for race in trace.races)
    assert x.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 8]


def test_places_are_named_as_in_python():
    trace = trace_kernel(overlapping_kernel, (2,), torch.zeros(2, 4), numbers(8), STEP=0, BLOCK=8)
    assert trace.races == ["programs 0 and 1 both write out[0, 0] (and 7 more elements)"]
    trace = trace_kernel(grid_kernel, (2, 3), torch.zeros(6), numbers(6), COLUMNS=2)
    assert trace.races == ["programs (0, 2) and (1, 0) both write out[2]"]


def test_atomic_updates_do_not_race_with_each_other():
    out = torch.zeros(1)
    trace = trace_kernel(add_kernel, (3,), out, numbers(3))
    assert out.item() == 3
    assert trace.races == []
    assert trace.arguments["out"].bytes_written == 12
    assert trace_kernel(mixed_kernel, (2,), out, out.clone()).races == [
        "program 1 updates and program 0 plainly writes out[0]"
    ]


def test_one_store_with_two_values_for_one_element():
    trace = trace_kernel(scatter_kernel, (1,), torch.zeros(9), numbers(4), torch.tensor([5, 2, 5, 7]), BLOCK=4)
    assert trace.races == ["one store of program 0 writes several values to out[5]"]
    trace = trace_kernel(scatter_kernel, (1,), torch.zeros(9), torch.ones(4), torch.tensor([5, 2, 5, 7]), BLOCK=4)
    assert trace.races == [], "the same value twice does no harm"


# ---- bounds --------------------------------------------------------------------------------------


def test_what_lies_outside_is_said_and_not_touched():
    cache = numbers(3, 6)
    before = cache.clone()
    trace = trace_kernel(overlapping_kernel, (2,), cache[1], cache[0], STEP=4, BLOCK=4)
    assert trace.out_of_bounds == [
        "program 1 loads element 6 of x, which has 6 in shape [6] (and 1 more)",
        "program 1 stores to element 6 of out, which has 6 in shape [6] (and 1 more)",
    ]
    assert torch.equal(cache[1], before[0])
    assert torch.equal(cache[2], before[2]), "what lies behind the argument is as it was"


@pytest.mark.parametrize("slot", [-1, 9, 10**12, -(10**12)])
def test_a_wild_address_does_not_end_the_process(slot):
    out = torch.zeros(9)
    trace = trace_kernel(scatter_kernel, (1,), out, torch.ones(4), torch.tensor([0, 1, slot, 3]), BLOCK=4)
    assert out.tolist() == [1, 1, 0, 1, 0, 0, 0, 0, 0]
    assert len(trace.out_of_bounds) == 1
    assert "stores to" in trace.out_of_bounds[0]
    assert trace.bytes_written == 12


def test_a_view_owns_only_its_own_elements():
    wide = numbers(4, 8)
    x = wide[:, :4]
    trace = trace_kernel(overlapping_kernel, (1,), torch.zeros(8), x, STEP=8, BLOCK=8)
    assert trace.out_of_bounds == [
        "program 0 loads memory beside the elements of x, a view of shape [4, 4] (and 3 more)"
    ]
    assert trace.arguments["x"].bytes_read == 16
    trace = trace_kernel(overlapping_kernel, (1,), torch.zeros(4), wide.t()[0], STEP=2, BLOCK=2)
    assert trace.accesses[0].elements.tolist() == [0]


def test_elements_of_a_transposed_view_are_numbered_as_it_shows_them():
    x = numbers(2, 3).t()  # [3, 2]; in memory the other way round
    trace = trace_kernel(overlapping_kernel, (1,), torch.zeros(2), x, STEP=2, BLOCK=2)
    assert trace.accesses[0].elements.tolist() == [0, 2], "0 and 1 in memory are x[0, 0] and x[1, 0]"


# ---- errors --------------------------------------------------------------------------------------


def test_errors_come_out_as_they_were_raised_and_leave_the_interpreter_as_it_was():
    with pytest.raises(NotImplementedError, match="write me"):
        trace_kernel(raising_kernel, (1,), torch.zeros(1))
    out = torch.zeros(4)
    scale_kernel[(1,)](out, numbers(4), 4, BLOCK=4)
    assert out.tolist() == [0, 2, 4, 6]
    assert trace_kernel(scale_kernel, (1,), out, numbers(4), 4, BLOCK=4).bytes_read == 16


@triton.jit
def sum_kernel(out, x, n, BLOCK: tl.constexpr, GUARDED: tl.constexpr):
    at = tl.arange(0, BLOCK)
    if GUARDED:
        tl.store(out, tl.sum(tl.load(x + at, mask=at < n, other=0.0), axis=0))
    else:
        tl.store(out, tl.sum(tl.load(x + at, mask=at < n), axis=0))


def test_what_a_mask_leaves_out_is_undefined_unless_other_says_what_it_is():
    """The interpreter puts 0 there and a GPU anything, so a kernel that relies on the 0 must not
    pass here.
    """
    for dtype in (torch.float16, torch.float32):
        out = torch.zeros(1, dtype=dtype)
        trace_kernel(sum_kernel, (1,), out, numbers(4).to(dtype), 3, BLOCK=4, GUARDED=True)
        assert out.item() == 3
        trace_kernel(sum_kernel, (1,), out, numbers(4).to(dtype), 3, BLOCK=4, GUARDED=False)
        assert out.isnan().all()


def test_what_is_no_interpreted_kernel_and_tensors_elsewhere_are_refused():
    assert_refused("TRITON_INTERPRET=1", trace_kernel, lambda x: x, (1,), torch.zeros(1))
    elsewhere = torch.zeros(1, device="meta")
    assert_refused("x is on meta", trace_kernel, raising_kernel, (1,), elsewhere)


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")  # it has been imported here as well
def test_exercises_are_checked_in_the_interpreter_also_beside_a_gpu(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.py").write_text("import os\nraise ValueError(f\"interpret: {os.environ['TRITON_INTERPRET']}\")\n")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(sys, "argv", ["exercise", "01", "--file", str(tmp_path / "mine.py")])
    with pytest.raises(SystemExit):
        runpy.run_module("minivllm_lab.exercise", run_name="__main__")
    assert "interpret: 1" in capsys.readouterr().err
