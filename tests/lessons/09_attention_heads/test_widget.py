"""Lesson 09's widget agrees with closed formulas for every setting, and detects a wrong
replication rule.
"""

import itertools
import json
import re
import shlex
from collections import Counter

import pytest
from lessons.harness import script_path

from lessons import widget_harness as harness
from minivllm.errors import MinivllmError
from minivllm_lab.attention_heads.siblings import with_kv_heads, with_latent
from minivllm_lab.exercise import load
from minivllm_lab.pictures.palette import ORANGE, VERMILLION
from minivllm_simulate.hardware import get_hardware
from minivllm_simulate.known_models import known_model
from minivllm_simulate.memory import memory_ledger
from widgets import attention_heads as widget
from widgets.attention_heads.state import MODELS, TPS

here = widget.sweep


# ---- verdicts against theory


SETTINGS = [
    {"tensor_parallel_size": tp, "kv_heads": heads, "latent": latent, "context": context, "wanted": wanted,
     "model": model, "gpu": gpu}
    for tp, (heads, latent), (context, wanted), (model, gpu) in itertools.product(
        TPS,
        [(1, 0), (4, 0), (8, 0), (64, 0), (8, 128), (8, 512)],
        [(1024, 256), (8192, 32), (32768, 16), (131072, 2)],
        [("Llama-3.1-70B", "H100"), ("Llama-3.1-8B", "L4"), ("Qwen3-32B", "B200"), ("Llama-3.2-1B", "A100-80")],
    )
]  # fmt: skip


def requests(tp: int, heads: int, latent: int, context: int, model: str, gpu: str, **_) -> float:
    """Return how many requests fit: the ledger's room for keys and values divided by the formula's
    bytes per request.
    """
    whole = known_model(model)
    many, layers = whole.num_attention_heads, whole.num_hidden_layers
    shared = min(heads, many)
    if many % tp:
        return 0.0
    per_token = layers * 2 * (latent + 64) if latent else layers * 2 * max(1, shared / tp) * whole.head_dim * 2
    sibling = with_latent(whole, latent) if latent else with_kv_heads(whole, shared)
    try:
        settings = {"max_num_batched_tokens": 2048, "gpu_memory_utilization": 0.92}
        ledger = memory_ledger(sibling, get_hardware(gpu), max_model_len=1, tp=tp, check=False, **settings)
    except MinivllmError:
        return 0.0
    return (ledger.kv_bytes // (16 * per_token) - 1) * 16 / context


def test_no_verdict_contradicts_the_formulas():
    """Check 672 settings: too few GPUs, only copies, or fine, with the figures of the formulas; and
    for some of them that copies and what does not fit are drawn.
    """
    assert len(SETTINGS) >= 600
    said = Counter()
    for knobs in SETTINGS:
        tp, heads, latent = knobs["tensor_parallel_size"], knobs["kv_heads"], knobs["latent"]
        result, state = widget.verdict(here(**knobs)), here(**knobs)
        setting = {**knobs, "heads": heads, "latent": latent}
        fits = requests(tp, **setting)
        before = requests(tp // 2, **setting) if tp > 1 else 0.0
        holders = 1 if latent else min(heads, state.query_heads)
        cause = "few" if int(fits) < knobs["wanted"] else ""
        if not cause and tp > holders and fits < 1.25 * before:
            cause = "copies"
        if not fits:
            cause = "stopped"
        if knobs["context"] > known_model(knobs["model"]).max_position_embeddings:
            cause = "long"
        said[cause or result.tone] += 1
        assert state.here.fits == pytest.approx(fits), knobs
        assert (result.tone == "broken") == bool(cause), knobs
        if cause == "few":
            assert f"{int(fits)} of {knobs['wanted']} requests fit" in result.words
        if cause == "copies":
            assert f"{tp // holders} GPUs keep the same" in result.words
            assert f"{tp} GPUs hold {int(fits):,}, {tp // 2} hold {int(before):,}." in result.words
        if cause in ("stopped", "long"):
            assert "does not start" in result.words
        if not cause:
            assert (result.tone == "tight") == (tp > holders)
            assert result.words.startswith(f"{int(fits):,} requests fit")
        if said.total() % 17 == 0:
            picture, drawn = widget.figure(state), state.here.divisible
            assert picture.count(f'fill="{ORANGE}" stroke="none"/>') - 1 == max(0, tp - holders) * drawn, "but its key"
            full = drawn and int(fits) < knobs["wanted"]
            assert full == (f'stroke="{VERMILLION}" stroke-width="2.5"' in picture), knobs
    assert min(said[each] for each in ("few", "copies", "stopped", "long", "fine", "tight")) >= 8, said


def test_on_as_many_gpus_as_query_heads_all_kinds_keep_one_head_each():
    """All kinds hold the same there; until then MHA gains with each doubling, MQA only by its
    weights.
    """
    state = here(kv_heads=64, tensor_parallel_size=64)
    for kind in (state.published, here(kv_heads=1).mine):
        assert kind.at(64).fits == pytest.approx(state.here.fits, rel=1e-3)
        assert kind.at(64).kv_bytes == state.here.kv_bytes
    assert all(state.mine.gain(tp) > 2 for tp in (8, 16, 32, 64))
    assert all(here(kv_heads=1).mine.gain(tp) < 1.5 for tp in (8, 16, 32, 64))


def test_a_request_alone_reads_2_of_mixtrals_8_experts_and_hundreds_read_all():
    """Each has half of 93.4 GB of weights, of which a token skips 67.6 GB, six experts a layer."""
    alone, many = (
        here(model="Mixtral-8x7B-v0.1", tensor_parallel_size=2, context=1024, wanted=wanted).here for wanted in (1, 256)
    )
    read = {1: (93.4 - 67.6) / 2 * 1e9, 256: 93.4 / 2 * 1e9}
    for wanted, place in ((1, alone), (256, many)):
        seconds = wanted / place.tokens_per_second
        moved = read[wanted] + wanted * 1024 * place.kv_bytes
        assert seconds - moved / (3.35e12 * 0.9) == pytest.approx(1.9e-3, abs=3e-4), "the overhead, and the links"


def test_what_is_shaded_is_where_something_is_wrong():
    def regions(**knobs) -> list[str]:
        return harness.shaded(widget, here(**knobs))

    assert regions() == ["14 of 32 requests fit on 4"]
    assert regions(kv_heads=64) == ["26 of 32 requests fit on 32"]
    assert regions(latent=512, tensor_parallel_size=8) == ["18 of 32 requests fit on 8"]
    assert regions(model="Llama-3.1-8B", kv_heads=32) == [
        "16 of 32 requests fit on 4",
        "32 query heads cannot be split over 64",
    ]
    assert regions(model="Qwen3-32B", context=65536) == ["Qwen3-32B supports at most 40,960 tokens"]


def test_every_models_query_heads_can_be_divided_by_powers_of_two():
    assert all(known_model(model).num_attention_heads.bit_count() == 1 for model in MODELS)


# ---- what is said


def test_the_right_guess_is_what_the_start_shows():
    state = here()
    assert int(state.mine.at(8).fits) == 42
    assert round(state.mine.at(16).fits, -1) == 50
    assert widget.GUESS.options[widget.GUESS.right] == "about 50"


SOLUTIONS = (
    {"tensor_parallel_size": 8},
    {"tensor_parallel_size": 64, "kv_heads": 64},
    {"model": "Llama-3.1-8B", "latent": 512, "tensor_parallel_size": 1},
)


test_each_challenge_can_be_met_and_by_what_it_is_about = harness.challenge_test(
    widget, here, SOLUTIONS,
    [(0, {"tensor_parallel_size": 4}), (0, {"tensor_parallel_size": 16}), (1, {"kv_heads": 16}),
     (1, {"kv_heads": 32}), (2, {"tensor_parallel_size": 2}), (2, {"latent": 256})],
)  # fmt: skip


test_advice_names_the_knob_that_is_wrong = harness.advice_test(
    widget,
    [
        (0, {"gpu": "H200"}, "Use an H100"), (0, {"context": 1024}, "Raise the context to 32K (now 1K)"),
        (0, {"latent": 512}, 'Set "Latent width" to "none"'), (0, {"kv_heads": 1}, "Raise the KV heads to 8 (now 1)"),
        (0, {"wanted": 1}, "Raise the requests to 32 (now 1)"), (1, {"model": "Qwen3-32B"}, "Use Llama-3.1-70B"),
        (1, {"tensor_parallel_size": 64, "latent": 512}, 'Set "Latent width" to "none"'), (2, {}, "Use Llama-3.1-8B"),
        (2, {"model": "Llama-3.1-8B", "tensor_parallel_size": 64, "latent": 512}, "Change the GPUs (TP)"),
    ],
)  # fmt: skip


test_no_preset_meets_a_challenge = harness.preset_test(widget, here)


def test_the_command_is_what_vllm_takes():
    words = shlex.split(widget.command(here()).splitlines()[-1])
    assert words[words.index("--tensor-parallel-size") + 1] == "16"
    assert "--hf-overrides" not in words
    words = shlex.split(widget.command(here(kv_heads=4)).splitlines()[-1])
    assert json.loads(words[words.index("--hf-overrides") + 1]) == {"num_key_value_heads": 4}
    assert words[words.index("--load-format") + 1] == "dummy"
    assert "no flag" in widget.command(here(latent=512))
    assert "refuses to start" in widget.command(here(tensor_parallel_size=1))


def test_a_byte_serves_the_query_heads_that_share_it_and_twice_as_many_in_a_latent():
    """DeepSeek-V3 has 512 numbers of latent, key and value, and 64 that are only keys."""
    uses = {use.name: (use.query_heads, use.kv_heads, use.operations) for use in here().uses}
    assert uses == {
        "Llama-2-7B": (32, 32, 1),
        "Llama-3.1-70B": (64, 8, 8),
        "1 of your 16 GPUs": (4, 1, 4),
        "DeepSeek-V3": (128, 1, pytest.approx(128 + 128 * 512 / 576)),
    }
    assert here(kv_heads=4).published == here(latent=128).published == here().mine


# ---- the reader's own rule


@pytest.mark.parametrize("tp", TPS)
@pytest.mark.parametrize("heads", [1, 8, 64])
def test_the_right_rule_changes_nothing(tp: int, heads: int):
    knobs = {"tensor_parallel_size": tp, "kv_heads": heads}
    assert here(**knobs, kv_heads_of_rank=load(script_path("09")).kv_heads_of_rank) == here(**knobs)


WRONG = {
    "neighbours apart": (lambda rank, tp, heads: [rank % heads], {}, r"rank 1 of 16 need KV head 0, .* KV head 1"),
    "all on each": (lambda rank, tp, heads: list(range(heads)), {"tensor_parallel_size": 8}, "0, 1, 2, 3, 4, 5, 6, 7"),
    "first for all": (lambda rank, tp, heads: [0], {"tensor_parallel_size": 4}, "rank 0 of 4 .* KV heads 0, 1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_is_reported(name: str):
    rule, knobs, about = WRONG[name]
    state = here(**knobs, kv_heads_of_rank=rule)
    result = widget.verdict(state)
    assert result.tone == "broken"
    assert re.search(about, result.words), result.words
    assert widget.figure(state)


def test_a_rule_that_keeps_all_heads_takes_all_their_bytes():
    state = here(tensor_parallel_size=8, kv_heads_of_rank=WRONG["all on each"][0])
    assert state.here.kv_bytes == 8 * here(tensor_parallel_size=8).here.kv_bytes


test_a_rule_that_gives_no_heads_is_refused = harness.unusable_test(
    here,
    [
        ({"kv_heads_of_rank": lambda *_: 3}, "returns 3"),
        ({"kv_heads_of_rank": lambda *_: []}, r"returns \[\]"),
        ({"kv_heads_of_rank": lambda *_: [8]}, r"from 0 to 7"),
        ({"kv_heads_of_rank": harness.endless}, "never end"),
    ],
    patience="widgets.attention_heads.state.PATIENCE",
)
