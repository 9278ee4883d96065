"""Lesson 07's widget agrees with the model at every setting, plays a correct step, and detects a
biased rule.
"""

import contextlib
import itertools
import json
import re
import shlex
import statistics
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest
from lessons.harness import REPOSITORY, mistaken, script_path
from lessons.widget_harness import advice_test, challenge_test, endless, preset_test, shaded, unusable_test
from pace import quiet_seconds

from minivllm.errors import MinivllmError
from minivllm_lab.exercise import load
from widgets import speculative_decoding as widget
from widgets.shell.plot import percent
from widgets.shell.session import Session
from widgets.speculative_decoding.figure import FEW, _parts
from widgets.speculative_decoding.state import BATCHES, GPUS, MOST_K, SIBLINGS
from widgets.speculative_decoding.step import VOCABULARY, measured, verify_step

here = widget.sweep
DRAFTERS = [name for _, name in widget.DRAFTER_NAMES]


def fitting(settings: Iterable[dict]) -> Iterator[widget.State]:
    """Yield the states of those settings where both models' weights fit."""
    for knobs in settings:
        with contextlib.suppress(MinivllmError):
            yield here(**knobs)


GRID = [
    {"batch": batch, "k": k, "alpha": alpha, "drafter": drafter, "context": context, "model": model, "gpu": gpu}
    for (batch, k, alpha), (drafter, context), (model, gpu) in itertools.product(
        [(1, 8, 0.2), (4, 3, 0.5), (32, 5, 0.7), (96, 4, 0.6), (192, 1, 0.3), (384, 2, 0.9)],
        itertools.product(DRAFTERS, (256, 2048)),
        [("Llama-3.1-8B", "A100-80"), ("Llama-3.1-8B", "L4"), ("Qwen3-14B", "H100"), ("Meta-Llama-3-70B", "B200")],
    )
]


# ---- what is said


def test_no_verdict_is_false():
    """The tone, figures and cause are the model's at some two hundred settings."""
    tones, said = Counter(), Counter()
    for state in fitting(GRID):
        first, result = state.one, widget.verdict(state)
        words = result.words
        tones[result.tone] += 1
        if state.batch > first.most_batch(state.k):
            assert "no room" in words
            assert f"at most {first.most_batch(state.k):,}" in words
            said["memory"] += 1
            continue
        step, plain = first.step(state.batch, state.k), first.plain(state.batch)
        speedup = first.tokens(state.k) * plain.seconds / step.seconds
        assert (result.tone == "broken") == (round(speedup, 2) < 1)
        assert ("lose" in words) == (round(speedup, 2) < 1)
        if "as fast as without" in words:
            assert f"{speedup:.2f} times as fast" in words
        ratio = re.search(r"([\d.]+) tokens from a step that takes ([\d.]+) times", words)
        assert ratio
        assert float(ratio[1]) == pytest.approx(first.tokens(state.k), abs=0.01)
        assert float(ratio[2]) == pytest.approx(step.seconds / plain.seconds, abs=0.01)
        if "drafts are rejected" in words:
            said["wrong"] += 1
            assert first.tokens(state.k) * plain.seconds < step.seconds - step.draft - (step.compute - plain.compute)
        if "the drafter takes" in words:
            said["draft"] += 1
            assert step.draft > step.compute - plain.compute
        if "arithmetic takes over" in words:
            said["compute"] += 1
            assert step.compute - plain.compute >= step.draft
        by_k = {k: first.speedup(state.batch, k) for k in range(1, MOST_K + 1)}
        if better := re.search(r"With k = (\d) it would be ([\d.]+) times as fast\.$", words):
            assert by_k[int(better[1])] == max(by_k.values()) > speedup
            assert f"{by_k[int(better[1])]:.2f}" == better[2]
            assert max(by_k.values()) > 1
        if "No number" in words:
            assert max(by_k.values()) <= 1
    assert min(tones[tone] for tone in ("fine", "tight", "broken")) >= 5
    assert min(said[cause] for cause in ("memory", "draft", "compute")) >= 5


def test_the_shaded_region_is_where_drafts_lose_or_do_not_fit():
    def regions(**knobs) -> list[str]:
        return shaded(widget, here(**knobs))

    assert regions() == ["loses from 101: arithmetic takes over"]
    text = " ".join((REPOSITORY / "lessons" / "07_speculative_decoding.md").read_text().split())
    assert f"at 59 × {here().tokens:.1f} = {59 * here().tokens:.0f}. The [widget](#turn-the-knobs) says 101," in text
    assert regions(context=2048) == ["memory is full at 212; 222 without a drafter"]
    assert regions(drafter="large", alpha=0.2)[0] == "loses: the drafter takes too long"
    slow_alone = regions(model="Qwen3-14B", alpha=0.2, context=4096)
    assert slow_alone[0] == "loses below 14: the drafter takes too long"
    assert regions(drafter="ngram", k=1, alpha=0.95, gpu="MI300X") == []


def test_the_right_guess_is_the_break_even_at_the_start():
    state = here()
    assert state.losing[0][0] == pytest.approx(100, abs=2)
    assert "100" in widget.GUESS.options[widget.GUESS.right]
    at = state.one.step(100, state.k).seconds / state.one.plain(100).seconds
    assert f"At 100 the step takes {at:.1f} times" in widget.GUESS.because
    assert f"{state.tokens:.1f} tokens" in widget.GUESS.because
    assert state.one.step(44, 4).compute == 0 < state.one.step(46, 4).compute


def test_the_command_is_what_vllm_takes():
    lines = {drafter: widget.command(here(drafter=drafter, k=3)).splitlines()[-1] for drafter in DRAFTERS}
    settings = {drafter: json.loads(shlex.split(line)[-1]) for drafter, line in lines.items()}
    assert settings["ngram"] == {
        "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1,
    }  # fmt: skip
    assert settings["small"]["model"] == "meta-llama/Llama-3.2-1B"
    assert settings["small"]["method"] == "draft_model"
    assert settings["head"]["method"] == settings["parallel"]["method"] == "eagle3"
    assert settings["parallel"]["parallel_drafting"] is True
    assert "HEAD: an EAGLE-3 checkpoint" in widget.command(here())
    assert "--max-cudagraph-capture-size 1280" in widget.command(here(batch=256))
    assert "--max-cudagraph" not in widget.command(here(batch=96))
    assert '"synthetic_acceptance_length": 2.31' in widget.command(here())


# ---- challenges

SOLUTIONS = (
    {"batch": 128, "k": 1},
    {"batch": 64, "alpha": 0.7, "context": 4096},
    {"model": "Qwen3-14B", "context": 4096, "batch": 32, "alpha": 0.7},
)


test_each_challenge_can_be_met_and_by_what_it_is_about = challenge_test(
    widget, here, SOLUTIONS,
    [(0, {"k": 2}), (1, {"context": 2048}), (1, {"alpha": 0.6}), (2, {"drafter": "small"})],
)  # fmt: skip


test_advice_names_the_knob_that_is_wrong = advice_test(
    widget,
    [
        (0, {"gpu": "B200"}, "Use an H100"),
        (0, {"recorded": "ngram"}, 'Set "Recorded" to "no, use the slider"'),
        (0, {"batch": 16}, "Raise the batch to 128 (now 16)"),
        (0, {"context": 1024}, "Lower the context to 256 (now 1K)"),
        (1, {"drafter": "ngram"}, "Use the EAGLE-3 head as the drafter"),
        (1, {"k": 2}, "Raise the drafts a step to 4 (now 2)"),
        (1, {"alpha": 0.9}, "Lower the acceptance to 0.7 (now 0.9)"),
        (1, {"batch": 128, "context": 4096}, "Shorten the context"),
        (2, {}, "Use Qwen3-14B"),
        (2, {"model": "Qwen3-14B", "context": 4096, "drafter": "ngram"}, "Use a trained drafter"),
    ],
)


test_no_preset_meets_a_challenge = preset_test(widget, here, tone=None)


# ---- one step


@pytest.mark.parametrize("certain", [False, True])
@pytest.mark.parametrize("rate", [0.2, 0.6, 0.95])
def test_a_played_step_agrees_as_often_as_the_knobs_ask(certain: bool, rate: float):
    for seed in range(20):
        step = verify_step((rate,) * 4, certain, seed)
        for place in step.places:
            assert place.agreement == pytest.approx(rate)
            assert sum(place.p) == pytest.approx(sum(place.q)) == pytest.approx(1)
            assert min(place.p) >= 0
            assert not certain or place.q[place.draft] == 1
            assert place.q[place.draft] > 0
        kept = [place.uniform < place.ratio for place in step.places]
        assert step.kept == (kept.index(False) if False in kept else 4)
        if step.rejected:
            assert step.places[step.kept].p[step.token] > step.places[step.kept].q[step.token]


def test_played_steps_yield_as_many_tokens_as_expected_and_the_models_own():
    steps = [verify_step((0.6,) * 4, False, seed) for seed in range(1500)]
    assert statistics.mean(len(step.tokens) for step in steps) == pytest.approx(here().tokens, abs=0.15)
    out = [step.places[0].draft if step.kept else step.token for step in steps]
    for token in range(len(VOCABULARY)):
        expected = statistics.mean(step.places[0].p[token] for step in steps)
        assert out.count(token) / len(steps) == pytest.approx(expected, abs=0.04)


def test_n_grams_name_one_token_and_others_a_distribution():
    certain = {drafter: {max(place.q) == 1 for place in here(drafter=drafter).step.places} for drafter in DRAFTERS}
    assert certain == {drafter: {drafter == "ngram"} for drafter in DRAFTERS}


def test_the_frames_tell_the_step():
    for knobs in ({}, {"step": 1}, {"step": 5}, {"drafter": "ngram", "k": 1}):
        state = here(**knobs)
        frames = json.loads(ET.fromstring(widget.detail(state)).get("data-frames", "[]"))
        assert len(frames) == 3 + min(state.step.kept + 1, state.k)
        assert sum("so it is accepted" in frame for frame in frames) == state.step.kept
        assert ("so it is rejected" in frames[-2]) == state.step.rejected
        assert frames[-1].endswith(" ".join(state.step.tokens))


# ---- the reader's own rule


right = load(script_path("07")).accept


BIASED = "two hundredths too generous"
WRONG = BIASED, "forgets q", "q over p", "without the random number", "goes on after a rejection", "the next row of p"


@pytest.mark.parametrize("knobs", [{}, {"k": 8, "alpha": 0.95}, {"drafter": "ngram"}, {"recorded": "draft_model"}])
def test_the_rule_itself_is_found_right(knobs: dict):
    state = here(accept=right, **knobs)
    assert state.own
    assert state.own.wrong is None
    assert state.own.off < 0.01
    assert state.step == here(**knobs).step
    assert "as it must" in " ".join(ET.fromstring(widget.detail(state)).itertext())


@pytest.mark.parametrize("k", [2, 8])
@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_rule_is_seen_at_once(mistake: str, k: int):
    state = here(accept=mistaken("07", mistake).accept, k=k)
    assert state.own
    assert state.own.wrong is not None
    said = widget.verdict(state)
    assert said.tone == "broken"
    assert percent(state.own.rates[state.own.wrong], 1) in said.words
    assert "Σ min(p, q) is 60.0 %" in said.words


def test_a_biased_rule_is_off_by_its_bias():
    """The rule u < p + 0.02, with certain drafts, generates the draft too often by 0.02, and all
    others too seldom.
    """
    result = measured((0.6, 0.6), True, 3, mistaken("07", BIASED).accept)
    assert result.rates == pytest.approx((0.62, 0.62), abs=1e-3)
    assert result.off == pytest.approx(0.02, abs=1e-3)


test_what_is_no_count_of_drafts_is_said_in_a_line = unusable_test(
    here,
    [({"accept": lambda *_: None}, "None"), ({"accept": lambda *_: 99}, "from 0 to 4"),
     ({"accept": lambda *_: 0.5}, "whole number"), ({"accept": endless}, "never end")],
    patience="widgets.speculative_decoding.step.PATIENCE",
)  # fmt: skip


# ---- the picture


def test_the_bars_compare_the_plain_steps_of_as_many_tokens_with_one_step():
    for state in fitting(GRID[::7]):
        words = "|".join(ET.fromstring(widget.figure(state)).itertext())
        assert f"{state.tokens:.2f} plain steps|" in words
        assert f"{state.longer:.2f} plain steps|" in words
        assert state.tokens / state.longer == pytest.approx(state.speedup)
        assert ("|lose|" in words) <= (state.speedup < 1)
        assert ("|win|" in words) <= (state.speedup > 1)
        if state.fits and state.best_k:
            best = max((state.one.speedup(state.batch, k), k) for k in range(1, MOST_K + 1))
            assert f"|k\u2009=\u2009{best[1]}|{best[0]:.2f}|" in words
        few = replace(state, batch=FEW)
        assert _parts(few)[1].value < 0.01, "the pale bar has no extra arithmetic"


def test_every_pair_of_model_and_gpu_is_drawn_or_refused_in_a_line():
    fits = 0
    for gpu, model, drafter in itertools.product(GPUS, SIBLINGS, ("parallel", "large")):
        view = Session(widget.SPEC).settle(gpu=gpu, model=model, drafter=drafter, context=32768, batch=2)
        assert view["trace"] == ""
        assert view["stale"] is ("nothing is left for the KV cache" in view["words"])
        fits += not view["stale"]
    assert fits > 30


def test_a_redraw_takes_little():
    session = Session(widget.SPEC, accept=right)
    session.settle()
    seconds = [quiet_seconds(lambda batch=batch: session.settle(batch=batch)) for batch in BATCHES * 2]
    assert statistics.median(seconds) < 0.02
