"""Lesson 10's widget agrees with closed formulas for every budget, and with a plain simulation's
gaps.
"""

import itertools
import re
import statistics
import xml.etree.ElementTree as ET
from collections import Counter
from functools import partial

import pytest
from lessons.harness import script_path

from lessons import widget_harness as harness
from minivllm_lab.exercise import load
from minivllm_simulate.cost_model import StepShape
from minivllm_simulate.load_sweep import spans
from minivllm_simulate.virtual_clock import SimulatedRequest, StepRecord, percentile, simulate
from widgets import chunked_prefill as widget
from widgets.chunked_prefill import runs, strip
from widgets.chunked_prefill.state import BUDGETS

short_runs = harness.short_runs(runs, 16, 6)
here, swept = partial(harness.known_state, widget), partial(harness.last_state, widget)


# ---- verdicts against theory


SETTINGS = [
    {"budget": budget, "load": load, "long": long, "prompt": prompt, "gpu": gpu, "gap": gap, "ttft": ttft}
    for budget, (load, long, prompt), (gpu, gap, ttft) in itertools.product(
        (64, 256, 512, 2048, 16384),
        [(0.5, 0.1, 2048), (3.0, 0.1, 8192), (10.0, 0.2, 4096), (25.0, 0.1, 8192), (40.0, 0.4, 2048),
         (2.0, 0.2, 16384)],
        [("H100", 0.025, 0.5), ("H100", 0.05, 2.0), ("L4", 0.1, 5.0), ("B200", 0.01, 0.1)],
    )
]  # fmt: skip


def most_rate(serving: runs.Serving, budget: int) -> float:
    """Return the maximum requests per second, in steps of the best size and without attention."""
    best = max(size / serving.cost.seconds(StepShape(1, size, size, 0)) for size in range(16, budget + 1, 16))
    return best / statistics.mean(each.total for each in serving.lengths)


def alone(serving: runs.Serving, budget: int) -> float:
    starts = range(0, serving.prompt, budget)
    chunks = ((min(budget, serving.prompt - start), start) for start in starts)
    return sum(serving.cost.seconds(StepShape.of([chunk])) for chunk in chunks)


def longest_step(serving: runs.Serving, budget: int) -> float:
    """Return the time of a step whose tokens are all at the end of the longest contexts."""
    others = min(runs.SEATS, budget) - 1
    shape = [(budget - others, serving.longest), *[(1, serving.longest)] * others]
    return serving.cost.seconds(StepShape.of(shape))


@pytest.mark.usefixtures("short_runs")
def test_no_verdict_contradicts_the_formulas():
    """Overload, or a prompt too slow when alone, is broken; a gap that no step takes is no stall."""
    said = Counter()
    for knobs in SETTINGS:
        state = here(**knobs)
        result, serving, budget = widget.verdict(state), state.serving, state.budget
        said[result.tone] += 1
        if state.refused:
            assert "does not start" in result.words
            continue
        causes = state.causes(budget)
        assert (result.tone == "broken") == bool(causes)
        if state.serving.load > most_rate(serving, budget):
            said["queue"] += 1
            assert "queue" in causes, knobs
            assert "queue grows" in result.words
        if alone(serving, budget) > state.ttft:
            said["alone"] += 1
            assert {"queue", "chunks"} & set(causes), knobs
        if longest_step(serving, budget) <= state.gap:
            said["short steps"] += 1
            assert "stall" not in causes, knobs
        met = serving.load * serving.share * runs.ANSWER * serving.cost.seconds(StepShape.of([(1, 0)]))
        full = min(budget, serving.prompt) - runs.SEATS
        if met > 0.4 and full > 0 and serving.cost.seconds(StepShape.of([(full, 0)])) > state.gap:
            said["long steps"] += 1
            assert "stall" in causes, knobs
        if "stall" in causes:
            assert f"of the clients wait up to {strip.two_digits(state.waited(budget))}" in result.words
        if not causes:
            assert widget.seconds(state.first(budget)) in result.words
    assert min(said[each] for each in ("fine", "broken", "queue", "alone", "short steps", "long steps")) >= 10, said


def made_of(step: StepRecord, serving: runs.Serving) -> Counter:
    """Count tokens by kind. A decode has one token, and no prompt here leaves a single token for
    a step.
    """
    built = Counter(long=0, chat=0, decodes=0)
    for key, tokens in step.scheduled.items():
        kind = "long" if serving.lengths[int(key)].prompt_tokens > runs.CHAT else "chat"
        built["decodes" if tokens == 1 else kind] += tokens
    return built


@pytest.mark.parametrize(
    "knobs",
    [
        {}, {"budget": 256}, {"threshold": 512, "budget": 8192}, {"threshold": 128, "budget": 512, "load": 20.0},
        {"policy": "first", "budget": 16384}, {"policy": "whole", "budget": 8192, "load": 25.0},
    ],
)  # fmt: skip
def test_gaps_and_first_tokens_are_those_of_a_plain_simulation(knobs: dict):
    """Single steps agree exactly; stretches of similar steps, as the widget runs them, within
    one percent.
    """
    state = here(**knobs)
    serving, budget = state.serving, state.budget
    engine = serving.scheduler(budget, None)
    work = [
        SimulatedRequest(each.prompt_tokens, each.output_tokens, at)
        for each, at in zip(serving.lengths, serving.arrivals, strict=True)
    ]
    plain = simulate(work, engine, serving.cost)
    seen = plain.requests[: runs.COUNTED]
    gaps = [gap for each in seen for gap in each.itls]
    longest = [max(each.itls) for each in seen]
    long = [each.ttft for each, spec in zip(seen, work, strict=False) if spec.prompt_tokens > runs.CHAT]

    one_by_one = runs.Experiment(serving, None, True)
    list(one_by_one.runs.run(budget))
    exact = one_by_one.runs.found[budget]
    assert [exact.gap(share) for share in (0.5, 0.99)] == pytest.approx([percentile(gaps, 0.5), percentile(gaps, 0.99)])
    assert exact.longest == pytest.approx(sorted(longest))
    assert exact.long_ttft == pytest.approx(sorted(long))
    low, high = serving.window
    steps = [each for each in plain.steps if each.start + each.seconds > low and each.start < high]
    built = [made_of(each, serving) for each in steps]
    assert [Counter(long=each.long, chat=each.chat, decodes=each.decodes) for each in exact.strip] == built
    assert [each.start for each in exact.strip] == pytest.approx([each.start for each in steps])

    point = state.points[budget]
    for share in (0.9, 1.0):  # half the clients may be on either side of a stall
        assert point.longest_gap(share) == pytest.approx(exact.longest_gap(share), rel=0.01)
    assert point.gap(0.5) == pytest.approx(exact.gap(0.5), rel=0.01)
    assert point.long_ttft == pytest.approx(exact.long_ttft, rel=0.02)


test_a_region_is_shaded_where_the_budgets_are_wrong = harness.region_test(
    widget, BUDGETS, [{}, {"judged": "gaps"}, {"policy": "first", "load": 20.0}, {"gpu": "L4", "gap": 0.1}]
)


def test_what_does_not_start_neither_stalls_nor_is_late():
    state = swept(policy="first", load=20.0)
    assert state.stopped == [(None, 8192)]
    assert state.stalled == [(8192, None)]


def test_both_ends_break_at_the_start_and_a_pooled_percentile_is_blind_to_the_largest_budgets():
    start, pooled = swept(), swept(judged="gaps")
    assert start.late[0][0] is None
    assert start.stalled[0][1] is None
    (low, high), *_ = pooled.stalled
    assert low
    assert high
    assert high < BUDGETS[-1]
    last = pooled.points[BUDGETS[-1]]
    assert last.gap(0.99) < pooled.gap < 5 * pooled.gap < last.longest_gap(0.9)
    words = widget.verdict(here(judged="gaps", budget=BUDGETS[-1])).words
    assert "Yet 41 % of the clients wait longer" in words


def test_a_threshold_bounds_stalls_whatever_the_budget():
    for budget in (1024, 16384):
        state = here(threshold=512, budget=budget)
        assert state.causes(budget) == []
        assert max(step.long for step in state.points[budget].strip) == 512


def test_spans_are_cut_where_the_line_between_two_values_crosses():
    assert spans([1, 4], [0.5, 2]) == [(2, None)]
    assert spans([1, 4], [2, 0.5]) == [(None, 2)]
    assert spans([1, 4, 16], [0.5, 2, 0.5]) == [(2, 8)]
    assert spans([1, 4], [2, 3]) == [(None, None)]
    assert spans([1, 4], [1, 0.1]) == spans([], []) == []


# ---- what is said


def test_the_right_guess_is_where_the_stalls_begin():
    state = swept()
    assert state.stalled[0][0] == pytest.approx(850, rel=0.05)
    assert "850" in widget.GUESS.options[widget.GUESS.right]
    for budget, words in ((1024, "28 ms"), (2048, "55")):
        middle = state.serving.cost.seconds(StepShape.of([(budget, 4096)]))
        assert f"{middle * 1e3:.0f}" == words.removesuffix(" ms")
        assert words in widget.GUESS.because


SOLUTIONS = ({"budget": 256, "gap": 0.015}, {"budget": 4096, "threshold": 256}, {"budget": 8192, "judged": "gaps"})


test_each_challenge_can_be_met_and_by_what_it_is_about = harness.challenge_test(
    widget, here, SOLUTIONS,
    [(0, {"budget": 1024}), (0, {"budget": 96}), (1, {"threshold": 2048}), (1, {"threshold": 0}),
     (2, {"judged": "clients"}), (2, {"budget": 4096}), (2, {"budget": 256})],
)  # fmt: skip


test_advice_names_the_knob_that_is_wrong = harness.advice_test(
    widget,
    [
        (0, {"gpu": "H200"}, "Use Llama-3.1-8B on an H100"),
        (0, {"load": 5.0}, "Raise the load to 10 (now 5)"),
        (0, {}, "Lower the budget"),
        (0, {"budget": 64}, "Raise the budget"),
        (0, {"budget": 256}, "Lower the gap limit to 15 ms (now 25 ms)"),
        (0, {"gap": 0.015, "threshold": 512}, 'Set "Threshold" to "off"'),
        (0, {"budget": 256, "gap": 0.015, "ttft": 5.0}, "Lower the TTFT limit"),
        (1, {"prompt": 2048}, "Raise the long prompt to 8K (now 2K)"),
        (1, {}, "Raise the budget to 4,096 (now 2,048)"),
        (2, {"long": 0.05}, "Raise the long share to 10 % (now 5 %)"),
        (2, {"policy": "whole"}, "Cut the prompts into chunks or raise the budget"),
    ],
)


test_no_preset_meets_a_challenge = harness.preset_test(widget, here)


def test_the_command_is_one_server_and_two_loads():
    lines = widget.command(next(iter(widget.sweep(threshold=512, policy="whole")))).splitlines()
    flags = {"max_num_batched_tokens": 2048, "max_model_len": 8192, "long_prefill_token_threshold": 512}
    assert "--no-enable-chunked-prefill" in harness.served_with(lines[-1], **flags)
    assert "refuses to start" in lines[0]
    rates = [float(rate) for rate in re.findall(r"--request-rate ([\d.]+)", "\n".join(lines))]
    assert sum(rates) == pytest.approx(10)


def test_what_breaks_is_shaded_with_its_cause():
    def regions(**knobs) -> list[str]:
        return harness.shaded(widget, swept(**knobs))

    assert sorted(regions()) == ["first token late", "stalls over 25 ms"]
    assert regions(load=60.0, gap=1.0) == ["queue grows"]
    assert "does not start: 8K tokens are never cut" in regions(policy="first", budget=16384)


def test_a_bar_is_as_high_as_the_wait_for_its_step():
    state = here(policy="first", budget=16384, load=20.0)
    for step in state.here.strip:
        parts = strip.parts_of(step, state)
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(max(step.gap, step.end - step.start))


def test_few_steps_stall_where_a_pooled_percentile_is_blind_and_a_small_budget_takes_many():
    words = "".join(ET.fromstring(widget.figure(here(budget=16384))).itertext())
    assert "1 step stalls everyoneyet 99 % of gaps ≤ 13 ms" in words
    assert "each long prompt takes 128 steps" in widget.figure(here(budget=64))


def test_the_good_ranges_are_what_lies_between_those_that_break():
    state = swept()
    ((low, high),) = state.good
    assert (low, high) == (state.late[0][1], state.stalled[0][0])
    assert all(bool(state.causes(budget)) == (not low <= budget < high) for budget in BUDGETS)
    assert f"{low:,.0f} to {high:,.0f}" in "".join(ET.fromstring(widget.figure(state)).itertext())
    assert swept(load=60.0).good == []
    assert swept(policy="first").good == [], "whole prompts stall, and smaller budgets do not start"
    assert swept(gap=0.5).good == [(low, BUDGETS[-1])]
    assert len(swept(judged="gaps").good) == 2, "the longest steps stall so rarely that most gaps are short"


# ---- the reader's own caps


CAPPED = {"threshold": 512, "budget": 4096, "load": 5.0}


@pytest.mark.parametrize("part", ["chunk_limit", "running_tokens", "admitted_tokens"])
@pytest.mark.parametrize("knobs", [CAPPED, {"budget": 512}])
def test_the_right_caps_change_nothing(part: str, knobs: dict):
    yours, ours = here(**knobs, **{part: getattr(load(script_path("10")), part)}), here(**knobs)
    assert yours.like_the_engine
    point, engine = (each.points[each.budget] for each in (yours, ours))
    assert point.longest_gap(0.9) == pytest.approx(engine.longest_gap(0.9), rel=0.01)
    assert widget.verdict(yours).tone == widget.verdict(ours).tone


WRONG = {
    "forgets who is alone": {"chunk_limit": lambda budget, threshold, requests, adaptive: threshold or budget},
    "caps nothing": {"chunk_limit": lambda budget, *_: budget},
    "a token at a time": {"admitted_tokens": lambda missing, limit, left, cut: 1},
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_caps_are_reported(name: str):
    result = widget.verdict(here(**CAPPED, **WRONG[name]))
    assert result.tone == "broken"
    assert result.words.startswith("Your functions build different steps")


test_caps_that_cannot_be_carried_out_are_refused = harness.unusable_test(
    here,
    [({"chunk_limit": lambda *_: 0}, "your chunk_limit returns 0"), ({"chunk_limit": harness.endless}, "never end")],
)
