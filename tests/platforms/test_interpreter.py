"""Triton's interpreter as this process runs it: no work of which nothing is seen, and results as they were."""

from unittest import mock

import pytest
import torch

from minivllm.platforms.triton_utils import tl, triton

pytestmark = pytest.mark.interpreted


@triton.jit
def next_of(numbers, step):
    return numbers + step + tl.zeros([4], tl.int32)


@triton.jit
def kernel(into, step, fails: tl.constexpr):
    tl.static_assert(not fails)
    places = tl.program_id(0) * 4 + tl.arange(0, 4)
    tl.store(into + places, next_of(next_of(tl.load(into + places), step), step))


def test_the_language_is_patched_once_a_launch_and_restored():
    from triton.runtime import interpreter

    numbers = torch.arange(12, dtype=torch.int32)
    kernel[(1,)](numbers, 0, False)  # what Triton's own functions know of the language is patched once in a process
    with mock.patch.object(interpreter, "_patch_lang", side_effect=interpreter._patch_lang) as patched:
        kernel[(3,)](numbers, 5, False)
    assert patched.call_count == 1
    assert numbers.tolist() == list(range(10, 22))
    assert tl.core.is_builtin(tl.load)


def test_sums_of_integers_are_computed_once_and_wrap_around():
    from triton.runtime.interpreter import interpreter_builder

    numbers = torch.tensor([2**31 - 3] * 4, dtype=torch.int32)
    with mock.patch.object(interpreter_builder, "binary_op", side_effect=interpreter_builder.binary_op) as computed:
        kernel[(1,)](numbers, 2, False)
    assert numbers.tolist() == [-(2**31) + 1] * 4
    assert computed.call_count == 6  # for the places a product and a sum, and twice two sums


def test_an_error_in_a_kernel_is_still_one():
    from triton.runtime.errors import InterpreterError

    with pytest.raises(InterpreterError):
        kernel[(1,)](torch.zeros(4, dtype=torch.int32), 1, True)
