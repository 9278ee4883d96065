"""The cost of a step: counts are exact, and a real card's published line is reproduced."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import assert_refused

from minivllm.config import ModelConfig
from minivllm_simulate.cost_model import RooflineCost, StepShape
from minivllm_simulate.hardware import get_hardware
from minivllm_simulate.known_models import CONFIGS, SIGLIP, known_model

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
H200 = json.loads((RESULTS / "gpu_engine.nvidia-h200.json").read_text())
SCHEDULED = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 100)), max_size=8)


def llama_on_h100(**more: float) -> RooflineCost:
    return RooflineCost.of(known_model("Llama-3.1-8B"), get_hardware("H100"), **more)


@given(SCHEDULED)
def test_a_shape_counts_what_attention_visits(scheduled):
    shape = StepShape.of(scheduled)
    pairs = [(q, k) for new, before in scheduled for q in range(before, before + new) for k in range(q + 1)]
    assert shape.num_pairs == len(pairs)
    assert shape.num_reqs == len(scheduled)
    assert shape.num_tokens == sum(new for new, _ in scheduled)
    assert shape.num_keys == sum(new + before for new, before in scheduled)


def test_llama_on_an_h100_has_the_published_line():
    """vLLM's blog of 2026-04-22 gives an inter-token latency of 6.44 ms + 4.37e-5 ms for each token
    of context.
    """
    cost = llama_on_h100()
    near, far = (cost.seconds(StepShape.of([(1, before)])) * 1e3 for before in (0, 100_000))
    assert near == pytest.approx(6.44, rel=0.02)
    assert (far - near) / 100_000 == pytest.approx(4.37e-5, rel=0.02)


def test_bytes_and_operations_by_hand():
    cost = llama_on_h100()
    shape = StepShape.of([(1, 999), (100, 0)])
    assert cost.bytes_moved(shape) == 8_030_261_248 * 2 + 131_072 * (1000 + 100 + 101)
    pairs = 1000 + 100 * 101 // 2
    head = 128_256 * 4096
    layers = 8_030_261_248 - 2 * head
    assert cost.operations(shape) == 2 * layers * 101 + 2 * head * 2 + 4 * 32 * 4096 * pairs


@given(SCHEDULED.filter(bool), st.integers(0, 7))
def test_a_step_is_never_faster_than_the_floor_and_more_work_takes_no_less_time(scheduled, which):
    cost = llama_on_h100()
    shape, index = StepShape.of(scheduled), which % len(scheduled)
    more = list(scheduled)
    more[index] = (more[index][0] + 1, more[index][1])
    assert cost.seconds(shape) > cost.floor_seconds(shape) > 0
    assert cost.seconds(StepShape.of(more)) >= cost.seconds(shape)
    assert cost.seconds(StepShape.of([*scheduled, (1, 0)])) > cost.seconds(shape)


def test_prefill_is_limited_by_arithmetic_and_decode_by_memory():
    cost = llama_on_h100()
    decode, prefill = StepShape.of([(1, 500)]), StepShape.of([(4096, 0)])
    assert cost.floor_seconds(decode) == cost.bytes_moved(decode) / cost.bandwidth
    assert cost.floor_seconds(prefill) == cost.operations(prefill) / cost.flops


@pytest.mark.parametrize("row", H200["figures"]["prefill"][1:], ids=lambda row: f"{row['requests']}x{row['prompt']}")
def test_prefills_are_those_of_our_engine_on_an_h200(row):
    """The model was calibrated on both: one has eight times the other's attention, and one factor
    fits both.
    """
    cost = RooflineCost.of(known_model("Llama-3.1-8B"), get_hardware("H200"))
    shape = StepShape.of([(row["prompt"], 0)] * row["requests"])
    assert cost.seconds(shape) == pytest.approx(row["ms"] / 1e3, rel=0.01)
    assert cost.operations(shape) / row["ms"] == pytest.approx(row["tflops"] * 1e9, rel=0.002), "operations, counted"


def test_at_best_arithmetic_is_as_fast_as_a_bare_product_and_memory_as_before():
    cost, peak = llama_on_h100(), get_hardware("H100").flops_of("bfloat16")
    best = cost.at_best()
    assert best.arithmetic_efficiency == pytest.approx(H200["figures"]["matmul_tflops"] * 1e12 / peak, rel=0.01)
    decode, prefill = StepShape.of([(1, 500)]), StepShape.of([(4096, 0)])
    assert best.seconds(decode) == cost.seconds(decode)
    assert 0.79 < best.seconds(prefill) / cost.seconds(prefill) < 0.8


def test_two_gpus_halve_what_is_shared():
    cost = llama_on_h100()
    two = RooflineCost.of(known_model("Llama-3.1-8B"), get_hardware("H100"), tp=2)
    assert two.kv_bytes_per_token * 2 == cost.kv_bytes_per_token
    assert two.flops_per_token * 2 == cost.flops_per_token
    assert two.weight_bytes == pytest.approx(cost.weight_bytes / 2, rel=0.01)


MIXTRAL, EXPERT = known_model("Mixtral-8x7B-v0.1"), 3 * 4096 * 14336  # a gated MLP of three matrices


def test_a_token_passes_2_of_mixtrals_8_experts():
    """Mistral's paper (arXiv 2401.04088) counts 47 billion parameters, of which a token uses 13
    billion.
    """
    active, head = 46_702_792_704 - 32 * 6 * EXPERT, 32_000 * 4096
    assert round(active / 1e9, 1) == 12.9
    for tp in (1, 2):
        cost = RooflineCost.of(MIXTRAL, get_hardware("H100"), tp=tp)
        assert cost.flops_per_token == 2 * (active - 2 * head) / tp
        assert cost.weight_bytes == pytest.approx(2 * 46_702_792_704 / tp, rel=1e-4), "all experts are kept"


def test_a_step_reads_the_experts_that_its_tokens_choose():
    """One token reads two of eight experts in each layer, two tokens 2 + 2 x 6/8 on average, and
    hundreds read all.
    """
    cost = RooflineCost.of(MIXTRAL, get_hardware("H100"))
    whole = 2 * 46_702_792_704
    for tokens, unread in ((1, 6), (2, 4.5), (1000, 0)):
        assert cost.weight_bytes_read(tokens) == pytest.approx(whole - 2 * 32 * unread * EXPERT)
    keys = cost.kv_bytes_per_token * (100 + 1)
    assert cost.bytes_moved(StepShape.of([(1, 99)])) == pytest.approx(whole - 2 * 32 * 6 * EXPERT + keys)
    assert cost.knee == pytest.approx(46.703 / (12.880 - 0.262) * 989.4e12 / 3.35e12 * 0.64 / 0.9, rel=1e-3)


def test_a_dense_model_has_no_experts_to_leave_out():
    cost = llama_on_h100()
    assert cost.weight_bytes_read(1) == cost.weight_bytes_read(10**6) == cost.weight_bytes


def test_no_text_token_passes_the_vision_tower():
    text = CONFIGS["meta-llama/Llama-3.2-1B"]
    sees = {"model_type": "gemma3", "dtype": "bfloat16", "text_config": text, "vision_config": SIGLIP}
    blind, seeing = (RooflineCost.of(ModelConfig.from_dict(model), get_hardware("H100")) for model in (text, sees))
    assert seeing.weight_bytes > blind.weight_bytes
    assert seeing.flops_per_token == blind.flops_per_token
    assert seeing.weight_bytes_read(1) == blind.weight_bytes


def test_a_model_without_a_number_of_chosen_experts_is_refused():
    no_experts = replace(MIXTRAL, num_experts_per_tok=0)
    assert_refused("num_experts_per_tok", RooflineCost.of, no_experts, get_hardware("H100"))
