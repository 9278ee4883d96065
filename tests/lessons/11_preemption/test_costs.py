"""The cost of bringing a request back, by hand and compared with published figures."""

import pytest
from refusals import assert_refused

from minivllm.memory import kv_bytes_per_token
from minivllm_lab.preemption import costs
from minivllm_simulate.hardware import get_hardware
from minivllm_simulate.known_models import known_model
from minivllm_simulate.kv_links import LINKS, Link, get_link
from minivllm_simulate.memory import num_parameters

LLAMA, H100, PCIE5 = known_model("Meta-Llama-3-8B"), get_hardware("H100"), get_link("PCIe 5")
FREE = costs.Pieces("without a cost of their own", per_layer=False, seconds=0)


@pytest.mark.parametrize(
    ("name", "kib", "mib"),
    [("Llama-3.1-8B", 32, 2), ("Llama-3.2-1B", 16, 0.5), ("Qwen3-0.6B", 32, 1.75), ("Qwen2.5-7B", 16, 0.875)],
)
def test_pieces_are_as_large_as_published(name: str, kib: float, mib: float):
    """The sizes are those of the old and the new block in vLLM's blog of 2026-01-08, for blocks of
    16 tokens.
    """
    model = known_model(name)
    assert costs.SMALL.bytes_of_copy(model) == kib * 2**10
    assert costs.LARGE.bytes_of_copy(model) == mib * 2**20


def test_a_latent_is_one_tensor_a_layer():
    model = known_model("DeepSeek-V2-Lite")
    assert (costs.SMALL.of_block(model), costs.LARGE.of_block(model)) == (27, 1)


def test_larger_pieces_make_the_published_difference():
    """vLLM's blog saw 5 times the throughput with larger pieces; the smallest ones of FlexKV#193
    reach 0.11 GB/s.
    """
    small, large = (
        costs.effective_bandwidth(PCIE5, pieces.bytes_of_copy(LLAMA)) for pieces in (costs.SMALL, costs.LARGE)
    )
    assert small == pytest.approx(32768 / (2.3e-6 + 32768 / 50e9))
    assert 4 < large / small < 5
    assert costs.effective_bandwidth(PCIE5, 256) / 1e9 == pytest.approx(0.11, abs=0.005)


def test_attention_adds_a_square():
    plain = costs.recompute_seconds(LLAMA, H100, 1000)
    assert plain == pytest.approx(1000 * costs.recompute_seconds(LLAMA, H100, 1))
    pairs = 4 * 32 * 32 * 128 * 1000 * 1001 / 2
    with_attention = costs.recompute_seconds(LLAMA, H100, 1000, attention=True)
    assert with_attention - plain == pytest.approx(pairs / (0.5 * 989.4e12))


@pytest.mark.parametrize("gpu", ["A100-80", "B200", "L4"])
@pytest.mark.parametrize("name", ["Llama-3.2-1B", "Llama-3.1-70B", "DeepSeek-V2-Lite"])
@pytest.mark.parametrize("directions", [1, 2])
def test_the_crossover_is_where_the_formula_says(gpu: str, name: str, directions: int):
    model, hardware = known_model(name), get_hardware(gpu)
    least = costs.break_even_bandwidth(model, hardware, directions)
    rate = 0.5 * hardware.flops_of("bfloat16")
    assert least == pytest.approx(directions * kv_bytes_per_token(model) * rate / (2 * num_parameters(model)))
    for factor in (0.9, 1.1):
        near = costs.Crossover.of(model, hardware, Link("any", factor * least, 0, "invented"), FREE, directions)
        assert near.copying_wins == (factor > 1)
        assert near.recompute / near.swap == pytest.approx(factor)
    for link in LINKS.values():
        for pieces in (costs.SMALL, costs.LARGE):
            crossover = costs.Crossover.of(model, hardware, link, pieces, directions)
            assert crossover.copying_wins == (crossover.swap < crossover.recompute)


def test_a_gpu_without_units_for_the_models_dtype_is_refused():
    assert_refused("bfloat16", costs.recompute_seconds, LLAMA, get_hardware("T4"), 10)
