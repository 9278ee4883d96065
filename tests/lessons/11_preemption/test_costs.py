"""Costs of a preemption by closed formulas, by hand, and beside published figures."""

import pytest

from minivllm.errors import MinivllmError
from minivllm.memory import kv_bytes_per_token, num_parameters
from minivllm_lab.preemption.costs import (
    LARGE,
    SMALL,
    Crossover,
    Pieces,
    break_even_bandwidth,
    copy_seconds,
    effective_bandwidth,
    host_link,
    num_copies,
    recompute_seconds,
)
from minivllm_simulate.hardware import HARDWARE, get_hardware
from minivllm_simulate.known_models import known_model
from minivllm_simulate.kv_links import LINKS, Link, get_link

LLAMA, H100, PCIE5 = known_model("Meta-Llama-3-8B"), get_hardware("H100"), get_link("PCIe 5")
FREE = Pieces("without a cost of their own", per_layer=False, seconds=0)


def test_llama_8b_on_an_h100_as_computed_by_hand():
    """2 x 8.03e9 / (0.5 x 989.4e12) = 32.5 µs to compute a token again; 131,072 B / 50 GB/s = 2.62 µs to copy it."""
    back, both = (Crossover.of(LLAMA, H100, PCIE5, FREE, directions) for directions in (1, 2))
    assert back.recompute == pytest.approx(2 * 8.03e9 / (0.5 * 989.4e12), rel=1e-3)
    assert back.copy == pytest.approx(2.62e-6, rel=1e-3)
    assert back.ratio == pytest.approx(12.4, abs=0.05)
    assert both.ratio == pytest.approx(6.2, abs=0.05)
    assert back.break_even / 1e9 == pytest.approx(4.04, abs=0.01)
    assert both.break_even / 1e9 == pytest.approx(8.08, abs=0.01)


@pytest.mark.parametrize(
    ("name", "kib", "mib"),
    [("Llama-3.1-8B", 32, 2), ("Llama-3.2-1B", 16, 0.5), ("Mistral-7B-v0.3", 32, 2), ("Qwen3-0.6B", 32, 1.75),
     ("Qwen2.5-7B", 16, 0.875), ("Qwen2.5-1.5B", 8, 0.4375)],
)  # fmt: skip
def test_pieces_are_as_large_as_published(name: str, kib: float, mib: float):
    """Old and new block size of vLLM's blog of 2026-01-08, for blocks of 16 tokens."""
    model = known_model(name)
    assert SMALL.bytes_of_copy(model) == kib * 2**10
    assert LARGE.bytes_of_copy(model) == mib * 2**20


def test_the_layout_makes_the_difference_that_was_published():
    """vLLM's blog saw 5 times the throughput with larger pieces; the smallest ones of FlexKV#193 come to 0.11 GB/s."""
    small, large = (effective_bandwidth(PCIE5, pieces.bytes_of_copy(LLAMA)) for pieces in (SMALL, LARGE))
    assert small == pytest.approx(32768 / (2.3e-6 + 32768 / 50e9))
    assert 4 < large / small < 5
    assert effective_bandwidth(PCIE5, 256) / 1e9 == pytest.approx(0.11, abs=0.005)


def test_a_copy_by_hand():
    """100 tokens are 7 blocks of 16. In small pieces 7 x 64 copies of 32 KiB, in large ones 7 of 2 MiB."""
    assert num_copies(LLAMA, 100, SMALL) == 448
    assert num_copies(LLAMA, 100, LARGE) == 7
    assert num_copies(known_model("DeepSeek-V2-Lite"), 100, SMALL) == 7 * 27
    seconds = 2e-5 + 448 * 2.3e-6 + 7 * 2**21 / 50e9
    assert copy_seconds(LLAMA, 100, PCIE5, SMALL) == pytest.approx(seconds)
    assert copy_seconds(LLAMA, 100, PCIE5, LARGE) == pytest.approx(seconds - 441 * 2.3e-6)
    assert copy_seconds(LLAMA, 0, PCIE5, SMALL) == 0


def test_attention_is_a_square_beside_the_straight_line():
    plain = recompute_seconds(LLAMA, H100, 1000)
    assert plain == pytest.approx(1000 * recompute_seconds(LLAMA, H100, 1))
    pairs = 4 * 32 * 32 * 128 * 1000 * 1001 / 2
    whole = recompute_seconds(LLAMA, H100, 1000, attention=True)
    assert whole - plain == pytest.approx(pairs / (0.5 * 989.4e12))


@pytest.mark.parametrize("gpu", ["A100-80", "H100", "B200", "L4"])
@pytest.mark.parametrize("name", ["Llama-3.2-1B", "Llama-3.1-70B", "Qwen3-32B", "DeepSeek-V2-Lite"])
@pytest.mark.parametrize("directions", [1, 2])
def test_the_crossover_is_where_the_formula_says(gpu: str, name: str, directions: int):
    model, hardware = known_model(name), get_hardware(gpu)
    least = break_even_bandwidth(model, hardware, directions)
    rate = 0.5 * hardware.flops_of("bfloat16")
    assert least == pytest.approx(directions * kv_bytes_per_token(model) * rate / (2 * num_parameters(model)))
    for factor in (0.9, 1.1):
        found = Crossover.of(model, hardware, Link("any", factor * least, 0, "made up"), FREE, directions)
        assert found.copying_wins == (factor > 1)
        assert found.ratio == pytest.approx(factor)
    for link in LINKS.values():
        for pieces in (SMALL, LARGE):
            found = Crossover.of(model, hardware, link, pieces, directions)
            assert found.copying_wins == (found.swap < found.recompute)
            # The latency aside, a request of any length comes to the same.
            long = directions * (copy_seconds(model, 1600, link, pieces) - link.latency)
            assert found.copying_wins == (long < recompute_seconds(model, hardware, 1600))


def test_two_gpus_halve_both_sides():
    one, two = (Crossover.of(LLAMA, H100, PCIE5, FREE, tp=tp) for tp in (1, 2))
    assert (one.recompute / two.recompute, one.copy / two.copy) == pytest.approx((2, 2))


def test_a_gpus_way_to_its_host():
    """50 GB/s on PCIe 5, about 25 on PCIe 4: what the table of links says too."""
    for gpu, name in (("H100", "PCIe 5"), ("A100-80", "PCIe 4")):
        assert host_link(get_hardware(gpu)).bandwidth == pytest.approx(get_link(name).bandwidth, rel=0.01)
    assert all(host_link(gpu).bandwidth > 0 for gpu in HARDWARE.values())


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: break_even_bandwidth(LLAMA, H100, 3), "directions"),
        (lambda: copy_seconds(LLAMA, -1, PCIE5, SMALL), "0 tokens or more"),
        (lambda: recompute_seconds(LLAMA, H100, 10, share_of_peak=0), "share_of_peak"),
        (lambda: LARGE.bytes_of_copy(LLAMA, 0), "a block has"),
        (lambda: Pieces("x", per_layer=True, seconds=-1), "seconds"),
        (lambda: recompute_seconds(LLAMA, get_hardware("T4"), 10), "bfloat16"),
    ],
)
def test_what_makes_no_sense_is_refused(call, said: str):
    with pytest.raises(MinivllmError, match=said):
        call()
