"""Test `benchmarks/kernels.py`: what it counts is right, and what it measures on a GPU runs, here
on small steps.
"""

from pathlib import Path

import pytest
import torch

from minivllm_lab.exercise import load

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
bench = load(BENCHMARKS / "kernels.py")
CPU = torch.device("cpu")
HEADS = {"heads": 4, "kv_heads": 2, "head_dim": 32}


@pytest.fixture(autouse=True)
def measured_once(monkeypatch):
    monkeypatch.setattr(bench, "REPEATS", 1)


def test_bytes_and_operations_of_a_step():
    case = bench.Case("", queries=(1, 3), lengths=(5, 4), **HEADS)
    assert case.kv_bytes(torch.bfloat16) == 2 * 9 * 2 * 32 * 2
    assert case.kv_bytes(torch.int8) == 2 * 9 * 2 * (32 + 4)
    assert case.flops == 4 * 32 * 4 * (5 + 2 + 3 + 4)


@pytest.mark.parametrize(("kv", "head_bytes"), [(torch.bfloat16, 64), (torch.int8, 36), (torch.float8_e4m3fn, 32)])
def test_the_decode_that_is_asked_of_a_gpu(kv, head_bytes):
    result = bench.gpu_decode(bench.decodes("two", [40, 17], **HEADS), kv, 1e9, CPU)
    assert result["bytes"] == 2 * 57 * 2 * head_bytes + 2 * (2 * 4 * 32 * 2)
    assert result["share_of_copy"] == pytest.approx(result["gb_per_s"], abs=0.06)


@pytest.mark.parametrize(("drawn", "rows"), [(False, 4), (True, 7)])
def test_the_drafts_that_a_gpu_is_asked_to_verify(drawn, rows):
    case = bench.Verification(2, 3, 100, drawn)
    result = bench.gpu_verification(case, 1e9, CPU)
    assert result["bytes"] == 2 * rows * 100 * 4
    assert result["share_of_copy"] == pytest.approx(result["gb_per_s"], abs=0.06)
    assert {"floor_us", "engine_us", "torch_us"} < bench.cpu_verification(case, 1).keys()


def test_the_prefill_that_is_asked_of_a_gpu():
    result = bench.gpu_prefill(bench.prefill("one", 70, **HEADS), CPU)
    assert result["largest_difference"] < 0.05, "ours and torch's are the same attention"
    assert result["share_of_best"] == pytest.approx(result["torch_ms"][result["best"]] / result["engine_ms"], rel=0.05)
