"""The harness itself: what it reads from compiled code is really there, and what does not fit is caught."""

import json
from pathlib import Path

import pytest
from kernels.harness import assert_compiles
from refusals import assert_refused

from minivllm.platforms.triton_utils import tl, triton
from minivllm_lab import aot
from minivllm_lab.aot import compile_for
from minivllm_lab.exercise import load


@triton.jit
def matmul_kernel(a, b, c, K: tl.constexpr, TILE: tl.constexpr):
    row, column, inner = tl.arange(0, TILE), tl.arange(0, TILE), tl.arange(0, 64)
    total = tl.zeros([TILE, TILE], tl.float32)
    for k in range(0, K, 64):
        left = tl.load(a + row[:, None] * K + k + inner[None, :])
        right = tl.load(b + (k + inner[:, None]) * TILE + column[None, :])
        total += tl.dot(left, right)
    tl.store(c + row[:, None] * TILE + column[None, :], total)


MATMUL = {"a": "*bf16", "b": "*bf16", "c": "*fp32", "K": 512, "TILE": 128}


def test_spills_and_shared_memory_are_caught():
    with pytest.raises(AssertionError, match="spilled"):
        assert_compiles(matmul_kernel, MATMUL, {"num_warps": 1, "num_stages": 1}, targets=["sm_80"])
    with pytest.raises(AssertionError, match="shared memory"):
        assert_compiles(matmul_kernel, MATMUL, {"num_warps": 8, "num_stages": 8}, targets=["sm_90"])


def test_the_compiler_s_words_reach_the_reader():
    assert_refused("dtype", compile_for, "sm_90", matmul_kernel, {**MATMUL, "b": "*fp32"})
    assert_refused("K, TILE", compile_for, "sm_90", matmul_kernel, {"a": "*bf16", "b": "*bf16", "c": "*fp32"})
    assert_refused("target", compile_for, "sm_70", matmul_kernel, MATMUL)


def test_the_record_says_what_the_compiler_says_wherever_a_kernel_stands_in_its_file(monkeypatch, tmp_path):
    """A worker with an empty record compiles what `compiled.json` says, and a kernel that has moved
    down in its file only once.
    """
    options = {"num_warps": 8, "num_stages": 2}

    def compiled(kernel=matmul_kernel) -> list[aot.Compiled]:
        return [compile_for(target, kernel, MATMUL, options) for target in ("sm_90", "gfx942")]

    recorded, record, moved = compiled(), tmp_path / "record.json", tmp_path / "moved.py"
    aot._ask.cache_clear()
    aot._worker.cache_clear()
    monkeypatch.setenv("MINIVLLM_COMPILED", str(record))
    monkeypatch.setenv("MINIVLLM_COMPILED_WRITE", "1")
    assert recorded == compiled()
    moved.write_text("\n\n" + Path(__file__).read_text())
    assert recorded == compiled(load(moved).matmul_kernel)
    assert len(json.loads(record.read_text())) == 2
    aot._worker().kill()
    aot._worker.cache_clear()  # the tests after this one have the figures of `compiled.json` again
