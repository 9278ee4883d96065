"""Each lever changes what it claims to and nothing else, published measurements are reproduced, and
counts agree with those by hand.
"""

from dataclasses import fields, replace
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import assert_refused

from minivllm_simulate.cost_model import MEMORY_EFFICIENCY, RooflineCost, StepShape
from minivllm_simulate.hardware import get_hardware
from minivllm_simulate.known_models import known_model
from minivllm_simulate.levers import (
    LADDER,
    LeverCost,
    Levers,
    LeverWorkload,
    lever_ledger,
    lever_model,
    lever_weight_bytes,
    long_and_short,
    shared_chat,
    throughput,
)
from minivllm_simulate.virtual_clock import SimulatedRequest

H100, A100, L4 = (get_hardware(name) for name in ("H100", "A100", "L4"))
LLAMA = known_model("Llama-3.1-8B")
SERVING = Levers(kv_cache=True, paging=True, continuous_batching=True, flash_attention=True, gqa=True)
FULL = replace(SERVING, chunked_prefill=True, prefix_caching=True, cuda_graphs=True)
EVEN = LeverWorkload("even", "eight alike", (SimulatedRequest(40, 20),) * 8, max_model_len=256, acceptance=0.5)
ONE_DECODE = StepShape.of([(1, 50)])


def cost(levers: Levers, name: str = "Llama-3.1-8B", gpu=H100) -> LeverCost:
    return LeverCost.of(levers, lever_model(levers, known_model(name)), gpu)


def run(levers: Levers, workload: LeverWorkload = EVEN, gpu=H100, model=LLAMA):
    return throughput(levers, model, gpu, workload)


# Against what others measured


def test_with_everything_plain_a_decode_costs_what_the_roofline_says():
    assert cost(FULL).seconds(ONE_DECODE) == pytest.approx(RooflineCost.of(LLAMA, H100).seconds(ONE_DECODE))


def test_tensor_parallel_scales_as_gpt_fast_does_on_a100():
    """The time of an all-reduce was taken from these runs of Llama-2-7B on 1, 2, 4 and 8 GPUs."""
    measured = (104.9, 168.84, 254.02, 328.43)
    alone, *several = (
        cost(replace(FULL, tensor_parallel=tp), "Llama-2-7b-hf", A100).seconds(ONE_DECODE) for tp in (1, 2, 4, 8)
    )
    for seconds, rate in zip(several, measured[1:], strict=True):
        assert alone / seconds == pytest.approx(rate / measured[0], rel=0.04)


def test_weight_only_kernels_gain_what_gpt_fast_gains_at_batch_1_and_lose_where_arithmetic_is_the_limit():
    small, large = {}, {}
    for bits in (16, 8, 4):
        this = cost(replace(FULL, weight_bits=bits), "Llama-2-7b-hf", A100)
        small[bits], large[bits] = this.seconds(ONE_DECODE), this.seconds(StepShape.of([(4096, 0)]))
    assert small[16] / small[8] == pytest.approx(155.58 / 104.9, rel=0.08)
    assert small[16] / small[4] == pytest.approx(196.80 / 104.9, rel=0.08)
    assert large[8] > large[4] > large[16]


def test_graphs_gain_what_was_measured_on_a_small_model_and_nothing_on_large_steps():
    """vLLM takes 4.8 ms a token without graphs and 1.3 ms with them for GPT-2 on an H200
    (DeepSpeed#8352), and gains 14 % for Llama-2-7B on an A100 (vllm#1440).
    """
    eager, graphs = replace(FULL, cuda_graphs=False), FULL
    h200 = get_hardware("H200")
    assert cost(eager, "gpt2", h200).seconds(ONE_DECODE) * 1e3 == pytest.approx(1e3 / 207.7, rel=0.1)
    assert cost(graphs, "gpt2", h200).seconds(ONE_DECODE) * 1e3 == pytest.approx(1e3 / 766.6, rel=0.12)
    slower = cost(eager, "Llama-2-7b-hf", A100).seconds(ONE_DECODE)
    assert slower / cost(graphs, "Llama-2-7b-hf", A100).seconds(ONE_DECODE) == pytest.approx(1.20 / 1.05, rel=0.1)
    for large in (StepShape.of([(1, 2000)] * 512), StepShape.of([(2048, 0)])):
        assert cost(eager).seconds(large) == cost(graphs).seconds(large)


def test_steps_larger_than_the_largest_graph_are_launched_kernel_by_kernel():
    """A small model computes even 513 tokens before the host has launched them."""
    graphs, eager = (cost(replace(FULL, cuda_graphs=on), "Qwen3-0.6B") for on in (True, False))
    captured, larger = StepShape.of([(512, 0)]), StepShape.of([(513, 0)])
    assert graphs.seconds(captured) < 0.7 * eager.seconds(captured)
    assert graphs.seconds(larger) == eager.seconds(larger)


# What each lever changes


@pytest.mark.parametrize("tp", [1, 2])
def test_weights_by_hand(tp):
    linear = 32 * (4096 * (32 + 2 * 8) * 128 + 32 * 128 * 4096 + 3 * 4096 * 14336) // tp
    plain = 2 * 128_256 * 4096 // tp + 65 * 4096
    for bits, size in ((16, 2.0), (8, 1.0), (4, 0.515625)):
        levers = replace(FULL, weight_bits=bits, tensor_parallel=tp)
        assert lever_weight_bytes(levers, LLAMA) == round(2 * plain + size * linear)


def test_scores_are_stored_and_blocks_gathered_only_without_flash_attention():
    shape = StepShape.of([(1, 999), (100, 0)])
    naive = cost(replace(FULL, flash_attention=False))
    flash = naive.roofline.kv_bytes_per_token * (1000 + 100 + 101)
    scores = 4 * 2 * 32 * 32 * (1000 + 100 * 101 // 2)  # two bytes, written and read twice, for 32 heads of 32 layers
    gather = 2 * 131_072 * (1000 + 100)
    bandwidth = MEMORY_EFFICIENCY * H100.bandwidth
    assert cost(FULL).attention_seconds(shape) == flash / bandwidth
    assert naive.attention_seconds(shape) == (flash + scores + gather) / bandwidth
    contiguous = cost(replace(FULL, flash_attention=False, paging=False))
    assert contiguous.attention_seconds(shape) == (flash + scores) / bandwidth


def test_an_all_reduce_is_paid_twice_a_layer_and_its_bytes_once_a_token():
    two = cost(replace(FULL, tensor_parallel=2))
    sent = 2 * (2 - 1) / 2 * 4096 * 2 * 100  # hidden states in 16 bits, of 100 tokens
    assert two.link_seconds(StepShape.of([(100, 0)])) == pytest.approx(64 * (1e-5 + sent / 450e9))
    assert cost(FULL).link_seconds(StepShape.of([(100, 0)])) == 0
    slow = cost(replace(FULL, tensor_parallel=2), gpu=L4)
    assert slow.link == 32e9, "without NVLink they talk over PCIe"


def test_capacity_follows_from_the_levers():
    def held(**more):
        levers = replace(FULL, **more)
        return lever_ledger(levers, lever_model(levers, LLAMA), H100, EVEN).kv_bytes

    plain = run(FULL).kv_tokens
    assert run(replace(FULL, kv_dtype="fp8")).kv_tokens == pytest.approx(2 * plain, rel=1e-4)
    assert run(replace(FULL, kv_dtype="int8")).kv_tokens == pytest.approx(2 * plain * 128 / 132, rel=1e-4)
    assert held(weight_bits=4) - held() == pytest.approx(1.484375 * 32 * 218_103_808, rel=1e-6)
    assert run(replace(FULL, gqa=False)).kv_tokens < plain / 4
    graphs = 2**29 // 131_072  # half a GiB that graphs no longer take, in tokens
    assert run(replace(FULL, cuda_graphs=False)).kv_tokens - plain == pytest.approx(graphs, abs=16)
    assert run(replace(FULL, kv_cache=False)).kv_tokens == 0


def test_without_a_cache_every_step_computes_whole_contexts():
    """Each of eight requests of 40 + 20 tokens is recomputed at every length from 40 to 59."""
    assert run(Levers()).computed_tokens == 8 * sum(range(40, 60))
    assert run(replace(Levers(), kv_cache=True)).computed_tokens == 8 * 59


def test_without_paging_as_many_run_as_whole_reservations_fit():
    work = LeverWorkload("many", "", (SimulatedRequest(16, 8),) * 60)
    reserved = run(replace(FULL, paging=False, gqa=False), work)
    assert reserved.slots == 27
    assert run(replace(FULL, gqa=False), work).mean_batch == 60
    # 27, 27 and 6 at a time, 8 steps each
    assert (reserved.steps, reserved.mean_batch) == (24, 20)


def test_requests_wait_or_are_preempted_where_the_pool_is_full():
    work = LeverWorkload("large", "", (SimulatedRequest(900, 200),) * 12)
    result = run(replace(FULL, gqa=False), work, L4)
    assert result.kv_tokens < 6 * 1100
    assert result.preemptions > 0
    assert result.mean_batch < 6
    assert run(FULL, work, L4).mean_batch > 11


def test_without_chunks_a_prompt_waits_for_a_step_that_it_fits_into():
    """Five prompts of 3,000 tokens at 8,192 a step take three steps (two, two and one), or two with
    chunks (8,192 and the rest).
    """
    work = LeverWorkload("long", "", (SimulatedRequest(3000, 1),) * 5)
    assert run(replace(FULL, chunked_prefill=False), work).steps == 3
    assert run(FULL, work).steps == 2


def test_a_static_batch_waits_for_its_longest():
    work = LeverWorkload("spread", "", tuple(SimulatedRequest(60, 4 + 32 * (i % 2)) for i in range(400)), 96)
    static, continuous = run(replace(FULL, continuous_batching=False), work), run(FULL, work)
    assert static.steps == 2 * 36  # two batches of 256 whole prompts at most, each as long as its longest
    assert continuous.steps < 0.7 * static.steps
    assert static.computed_tokens == continuous.computed_tokens


def test_no_more_run_at_once_than_the_server_lets_in():
    assert run(FULL, replace(EVEN, max_num_seqs=2)).mean_batch == 2
    assert run(FULL, replace(EVEN, max_num_seqs=2)).steps == 4 * 20
    assert run(FULL).steps == 20


def test_prefix_caching_finds_the_system_prompt_once_it_is_published():
    work = shared_chat(24, system_tokens=512)
    result = run(FULL, work)
    prompts = sum(request.prompt_tokens for request in work.requests)
    assert result.prefix_hit_rate == pytest.approx(23 * 512 / prompts)
    assert run(replace(FULL, prefix_caching=False), work).prefix_hit_rate == 0
    saved = run(replace(FULL, prefix_caching=False), work).computed_tokens - result.computed_tokens
    assert saved == 23 * 512


@pytest.mark.parametrize(("acceptance", "steps"), [(1.0, 5), (0.0, 20)])
def test_speculation_takes_as_many_steps_as_drafts_are_accepted(acceptance, steps):
    """Each step gives all 3 drafts and one more, after a first step without drafts, or only one of
    the 20 tokens.
    """
    work = replace(EVEN, acceptance=acceptance)
    result = run(replace(FULL, speculative_tokens=3), work)
    assert result.steps == (steps + 1 if acceptance else steps)
    if not acceptance:
        assert result.tokens_per_second < run(FULL, work).tokens_per_second, "rejected drafts only cost"


@settings(max_examples=25, deadline=None)
@given(st.sets(st.sampled_from(LADDER)), st.sampled_from([H100, A100, L4]))
def test_every_combination_serves_all_tokens_and_no_step_beats_the_data_sheet(rungs, gpu):
    levers = Levers()
    for rung in rungs:
        levers = rung.pull(levers)
    result = run(levers, gpu=gpu)
    assert result.tokens_per_second == pytest.approx(EVEN.output_tokens / result.seconds)
    assert result.computed_tokens >= 8 * 59
    assert 0 < result.mean_batch <= 8
    weights = lever_weight_bytes(levers, lever_model(levers, LLAMA))
    assert result.seconds > result.steps * weights / gpu.bandwidth


def test_the_ladder_has_every_lever_once_and_ends_with_all_of_them():
    assert sorted(rung.field for rung in LADDER) == sorted(field.name for field in fields(Levers))
    steps = list(accumulate(LADDER, lambda levers, rung: rung.pull(levers), initial=Levers()))
    assert all(before != after for before, after in pairwise(steps))
    assert run(steps[-1]).tokens_per_second > 3 * run(steps[0]).tokens_per_second


def test_workloads_are_as_they_say():
    chat, mixed = shared_chat(40, 100), long_and_short(40)
    assert len({request.prompt_token_ids[:100] for request in chat.requests if request.prompt_token_ids}) == 1
    assert len({request.prompt_token_ids[100] for request in chat.requests if request.prompt_token_ids}) == 40
    assert max(item.prompt_tokens + item.output_tokens for item in (*chat.requests, *mixed.requests)) <= 4096
    prompts = [request.prompt_tokens for request in mixed.requests]
    assert max(prompts) > 10 * min(prompts)
    quarter = [request.output_tokens for request in shared_chat(40, 100, shorter=4).requests]
    assert quarter == [max(1, request.output_tokens // 4) for request in chat.requests]
    assert mixed.output_tokens == sum(request.output_tokens for request in mixed.requests)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: run(replace(FULL, tensor_parallel=3)), "divided"),
        (lambda: run(FULL, gpu=get_hardware("T4")), "T4"),
        (lambda: run(FULL, LeverWorkload("late", "", (SimulatedRequest(1, 1, arrival=1.0),))), "start"),
        (lambda: run(replace(FULL, kv_dtype="int3")), "int3"),
        (lambda: run(FULL, replace(EVEN, max_model_len=131_072), L4), "max_model_len"),
    ],
)
def test_what_cannot_be_is_refused_by_name(make, words):
    assert_refused(words, make)
