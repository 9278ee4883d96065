"""Test the quality benchmark: it reports the bytes of the matrices, however the engine stores them."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from minivllm import LLM
from minivllm.config import EMBEDDED_MODEL
from minivllm_lab.inside import runner_of
from minivllm_lab.results import read_record

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks/results/quality.cpu.json"


@pytest.fixture(scope="module")
def numbers() -> int:
    """Count the elements of the layers' matrices in the checkpoint."""
    tensors = load_file(EMBEDDED_MODEL / "model.safetensors")
    return sum(tensor.numel() for name, tensor in tensors.items() if "_proj." in name)


@pytest.mark.parametrize(("way", "least", "most"), [
    ("float32", 32, 32.6), ("weights int8", 8, 8.2), ("weights int4", 4, 5), ("bfloat16, KV too", 16, 16.4),
])  # fmt: skip
def test_bits_of_a_number_in_the_layers(bench, numbers, way, least, most):
    llm = LLM(EMBEDDED_MODEL, device="cpu", max_model_len=64, **{"dtype": "float32", **bench.WAYS[way]})
    result = bench.projection_bytes(runner_of(llm).model)
    assert least <= 8 * result / numbers <= most
    recorded = read_record(RESULTS, "quality")["figures"]["ways"][way]["projection_bytes"]
    assert recorded == pytest.approx(result, rel=0.02)  # panels are padded to the width of the processor's registers
