"""Test that our shortcuts in Triton's interpreter change no kernel's results, and leave the
language unchanged.
"""

import pytest
import torch

from minivllm.platforms.triton_utils import tl, triton

pytestmark = pytest.mark.interpreted


@triton.jit
def doubled(x):
    return x + x


@triton.jit
def totals(numbers, out, length: tl.constexpr):
    row = tl.program_id(0)
    x = tl.load(numbers + row * length + tl.arange(0, length))
    tl.store(out + row, tl.sum(doubled(x), axis=0) + tl.max(doubled(x), axis=0))


@triton.jit
def broken(numbers, out, length: tl.constexpr):
    x = tl.load(numbers + tl.arange(0, length))
    tl.store(out, tl.sum(doubled(x), axis=0) + tl.zeros((3,), tl.int32))


@triton.jit
def squared(numbers, length: tl.constexpr):
    places = numbers + tl.arange(0, length)
    tl.store(places, tl.load(places) * tl.load(places))


def launch() -> list[int]:
    numbers, out = torch.arange(12, dtype=torch.int32).view(3, 4), torch.zeros(3, dtype=torch.int32)
    totals[(3,)](numbers, out, length=4)
    return out.tolist()


EXPECTED = [2 * (0 + 1 + 2 + 3) + 6, 2 * (4 + 5 + 6 + 7) + 14, 2 * (8 + 9 + 10 + 11) + 22]


@pytest.fixture
def patched(monkeypatch):
    """Return the names of the language's functions that the interpreter replaces with its own."""
    from triton.runtime import interpreter

    patches, functions = interpreter._patch_lang, []
    patch = patches._patch
    monkeypatch.setattr(patches, "_patch", lambda function: functions.append(function.__name__) or patch(function))
    return functions


def test_each_module_of_the_language_is_patched_once_in_a_launch(patched):
    for _ in range(2):
        patched.clear()
        assert launch() == EXPECTED
        assert patched[0] == "totals"
        assert len(patched) == 2, "the kernel's, and that of `tl.sum`; not again for each program and call"


def test_after_a_launch_the_language_is_as_it_was():
    def language():
        return tl.load, tl.core.load, tl.program_id, tl.range, tl.tensor.__add__, hasattr(tl.tensor, "__bool__")

    before = language()
    launch()
    assert language() == before
    assert tl.core.is_builtin(tl.core.load), "Triton's own, whatever ran before"
    with pytest.raises(triton.runtime.errors.InterpreterError):
        broken[(1,)](torch.ones(4, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), length=4)
    assert language() == before
    assert launch() == EXPECTED


def test_whether_integers_fit_is_computed_in_debug_mode_only(monkeypatch):
    from triton.runtime import interpreter

    semantic, looked = interpreter.interpreter_semantic, []
    look = semantic.device_assert
    monkeypatch.setattr(semantic, "device_assert", lambda *arguments: looked.append(arguments) or look(*arguments))
    numbers = torch.tensor([3, 1 << 20], dtype=torch.int32)
    squared[(1,)](numbers, length=2)
    assert numbers.tolist() == [9, 0], "they wrap around, as on a GPU"
    assert not looked
    monkeypatch.setattr(semantic.builder, "options", interpreter.InterpreterOptions(debug=True))
    squared[(1,)](numbers, length=2)
    assert looked
    with pytest.raises(triton.runtime.errors.InterpreterError, match="overflow"):
        squared[(1,)](torch.tensor([3, 1 << 20], dtype=torch.int32), length=2)


def test_a_type_has_the_dtype_that_it_had():
    from triton.runtime import interpreter

    kinds = [(tl.int1, "bool"), (tl.bfloat16, "uint16"), (tl.float32, "float32"), (tl.pointer_type(tl.int1), "uint64")]
    blocks = [(tl.block_type(kind, [4]), dtype) for kind, dtype in kinds]
    for _ in range(2):
        for kind, dtype in kinds + blocks:
            assert interpreter._get_np_dtype(kind) == dtype
