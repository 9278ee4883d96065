"""Lesson 12's widget agrees with closed formulas for every number of slots, and with the
engine's steps.
"""

import itertools
import math
import re
from collections import Counter
from functools import cache, partial

import pytest
from lessons.harness import mistaken, script_path

from lessons import widget_harness as harness
from minivllm_lab.exercise import load
from minivllm_lab.pictures.palette import SKY
from minivllm_simulate.cost_model import StepShape
from minivllm_simulate.known_models import known_model
from minivllm_simulate.memory import memory_ledger
from widgets import multi_lora as widget
from widgets.multi_lora import runs
from widgets.multi_lora.state import SLOTS

short_runs = harness.short_runs(runs, 24, 8)
here, swept = partial(harness.known_state, widget), partial(harness.last_state, widget)


# ---- verdicts against theory

SETTINGS = [
    {"slots": slots, "adapters": adapters, "skew": skew, "load": load, "gpu": gpu, "max_rank": max_rank, "rank": 16}
    for slots, (adapters, skew), load, (gpu, max_rank) in itertools.product(
        (1, 4, 16, 64, 256),
        [(1, 1.0), (10, 1.0), (1000, 0.0), (1000, 1.0)],
        (2.0, 60.0),
        [("H100", 16), ("H100", 256), ("L4", 16)],
    )
]
LLAMA_8B = {"q": 4096 + 4096, "k": 4096 + 1024, "v": 4096 + 1024, "o": 4096 + 4096, "mlp": 3 * (4096 + 14336)}
"""Inputs plus outputs of a layer's linears, from its config."""


def slot_bytes(rank: int) -> int:
    return 2 * 32 * rank * sum(LLAMA_8B.values())


def starts(slots: int, rank: int, max_rank: int, gpu: str) -> bool:
    """Return whether the slots, one request's blocks and the null block fit in memory beside the
    weights.
    """
    if rank > max_rank:
        return False
    free = memory_ledger(
        known_model("Llama-3.1-8B"), gpu, max_model_len=runs.MAX_MODEL_LEN, max_num_batched_tokens=runs.TOKEN_BUDGET,
        max_num_seqs=runs.SEATS,
    )  # fmt: skip
    left = free.kv_bytes - slots * slot_bytes(max_rank)
    return left // (16 * free.bytes_per_token) - 1 >= runs.MAX_MODEL_LEN // 16


@cache
def at_once(adapters: int, skew: float, rank: int, max_rank: int, load: float, gpu: str) -> float:
    """Return the number of concurrent requests as the fixed point of Little's law and a step's
    time.
    """
    serving = runs.experiment("Llama-3.1-8B", gpu, adapters, skew, rank, max_rank, load).serving
    batch = 1.0
    for _ in range(40):
        count = max(1, round(batch))
        shape = StepShape.of([(1, runs.PROMPT + runs.ANSWER // 2)] * count)
        asked = sum(1 - (1 - share) ** count for share in serving.shares)
        step = serving.cost.seconds(shape, round(asked))
        batch = min(0.5 * batch + 0.5 * serving.load * runs.ANSWER * step, 256)
    return batch


def adapters_at_once(state: widget.State, most: float = math.inf) -> float:
    each = state.serving
    batch = min(at_once(each.adapters, each.skew, each.rank, each.max_lora_rank, each.load, each.gpu.name), most)
    return sum(1 - math.exp(-batch * share) for share in state.serving.shares)


@pytest.mark.usefixtures("short_runs")
def test_no_verdict_contradicts_the_formulas():
    """Memory decides whether it starts, adapters and slots whether requests queue."""
    said = Counter()
    for knobs in SETTINGS:
        state = here(**knobs)
        result = widget.verdict(state)
        said[result.tone] += 1
        if not starts(knobs["slots"], knobs["rank"], knobs["max_rank"], knobs["gpu"]):
            said["refused"] += 1
            assert state.refused
            assert "does not start" in result.words
            continue
        assert not state.refused, knobs
        cause, wanted = state.cause(state.slots), adapters_at_once(state)
        assert (result.tone == "broken") == bool(cause)
        if state.slots >= min(knobs["adapters"], runs.COUNTED + runs.AFTER):
            assert state.here.held == 0
        if state.slots >= knobs["adapters"]:
            said["a slot for each"] += 1
            assert cause != "slots", knobs
        if wanted < state.slots / 2:
            said["plenty"] += 1
            assert cause != "slots", knobs
        if adapters_at_once(state, runs.COUNTED / 2) > 3 * state.slots:  # more requests than come cannot be there
            said["far too few"] += 1
            assert cause == "slots", (knobs, wanted)
            assert "too few slots" in result.words.lower()
            assert f"the KV cache is {widget.percent(1 - state.here.cache_used)} free" in result.words
        assert state.here.distinct <= min(state.slots, knobs["adapters"])
    least = min(said[each] for each in ("fine", "broken", "refused", "a slot for each", "plenty", "far too few"))
    assert least >= 8, said


@pytest.mark.usefixtures("short_runs")
def test_too_few_slots_in_the_long_run_are_reported_however_short_the_run():
    """20 requests a second use 16 adapters at once: twelve slots serve a few of them in time,
    but not all.
    """
    for slots, ttft, tone in ((12, 5.0, "tight"), (12, 2.0, "broken"), (8, 5.0, "broken"), (24, 2.0, "fine")):
        state = here(slots=slots, ttft=ttft)
        assert state.first(slots) < ttft
        result = widget.verdict(state)
        assert result.tone == tone, (slots, ttft, result)
        assert result.words.count("in the long run") == (slots < 16)
        assert result.words.count("have their first token") == 1
        if tone == "broken":
            assert result.words.startswith("Too few slots")


@pytest.mark.parametrize("slots", [1, 3, 8, 32])
@pytest.mark.parametrize(("adapters", "load"), [(10, 5.0), (1000, 20.0)])
def test_no_step_has_more_adapters_than_slots_and_all_of_a_step_have_one(slots: int, adapters: int, load: float):
    state = here(slots=slots, adapters=adapters, load=load)
    assert state.here.strip
    for moment in state.here.strip:
        assert len(moment.in_use) <= slots
        assert moment.in_use <= set(moment.slots)
        assert len(moment.held_for) <= moment.waiting
        assert not set(moment.held_for) & moment.in_use
    last = [moment for moment in state.here.strip if moment.start < state.serving.window[1]][-1]
    in_use = last.in_use if last.end >= state.serving.window[1] else set()
    assert len(re.findall(rf'<rect [^>]*fill="{SKY}"[^>]*data-at="\d+ 23"', widget.figure(state, 1200))) == len(in_use)


@pytest.mark.parametrize(
    "knobs", [{}, {"slots": 24}, {"slots": 2, "load": 5.0}, {"adapters": 10, "slots": 4}, {"slots": 6, "skew": 0.0}]
)
def test_stretches_of_steps_are_what_single_steps_are(knobs: dict, monkeypatch: pytest.MonkeyPatch):
    fast = here(**knobs).here
    monkeypatch.setattr(runs._Slotted, "steps_alike", lambda self, running: 1)
    runs.experiment.cache_clear()
    exact = here(**knobs).here
    runs.experiment.cache_clear()
    assert (fast.hits, fast.asked, fast.loads) == (exact.hits, exact.asked, exact.loads)
    assert list(fast.ttfts) == pytest.approx(list(exact.ttfts), rel=0.02, abs=1e-3)
    assert (fast.distinct, fast.held) == pytest.approx((exact.distinct, exact.held), 0.02)


@pytest.mark.parametrize(("adapters", "skew", "load"), [(1000, 1.0, 20.0), (1000, 0.0, 20.0), (50, 1.0, 40.0)])
def test_adapters_at_once_are_those_of_the_formula_where_slots_suffice(adapters: int, skew: float, load: float):
    state = here(adapters=adapters, skew=skew, load=load, slots=256)
    assert state.wanted == pytest.approx(adapters_at_once(state), rel=0.1)
    assert state.here.distinct == pytest.approx(state.wanted, rel=0.25)  # the run begins and ends with nobody


def test_adapters_cost_what_the_counts_say():
    state = here(slots=32)
    cost, count = state.serving.cost, state.applied
    base, launch = cost.base.seconds(StepShape.of([(1, runs.PROMPT + runs.ANSWER // 2)] * state.batch)), 2e-3 / 448
    together = max(256 * launch, count * slot_bytes(16) / (3.35e12 * 0.9))
    assert state.step_seconds[0] == pytest.approx(base)
    assert [step - base for step in state.step_seconds[1:]] == pytest.approx([together, count * 256 * launch], rel=0.05)
    assert {state.serving.copies_that_fit} == {4}


test_a_region_is_shaded_where_slots_are_wrong = harness.region_test(
    widget, SLOTS, [{}, {"max_rank": 256}, {"gpu": "L4", "load": 2.0}, {"rank": 64}]
)


# ---- what is said


def test_the_right_guess_is_where_the_queue_ends():
    state = next(state for state in widget.sweep(slots=16) if {12, 16, 24} <= set(state.points))
    ((low, edge),) = state.late
    assert low is None
    assert edge == pytest.approx(17, abs=1.5)
    assert "17" in widget.GUESS.options[widget.GUESS.right]
    assert f"{state.wanted:.0f}" == "16"
    assert "about 16" in widget.GUESS.because
    assert "1 more would do" in widget.figure(state)
    assert state.serving.at_once == pytest.approx(20, abs=1)


SOLUTIONS = (
    {"slots": 48, "load": 40.0, "rank": 64, "max_rank": 64},
    {"slots": 8, "model": "Llama-3.2-1B"},
    {"slots": 2, "load": 60.0},
)


test_each_challenge_can_be_met_and_by_what_it_is_about = harness.challenge_test(
    widget, here, SOLUTIONS,
    [(0, {"slots": 16}), (0, {"slots": 64}), (0, {"max_rank": 128}), (1, {"model": "Llama-3.1-8B"}),
     (1, {"gpu": "L4"}), (2, {"slots": 64}), (2, {"slots": 12}), (2, {"load": 0.5})],
)  # fmt: skip


test_advice_names_the_knob_that_is_wrong = harness.advice_test(
    widget,
    [
        (0, {"adapters": 10}, "Raise the adapters to 1,000 (now 10)"),
        (0, {"skew": 2.0}, "Lower the skew to 1 (now 2)"), (0, {"gpu": "H200"}, "Use Llama-3.1-8B on an H100"),
        (0, {}, "Raise the load to 40 (now 20)"), (0, {"load": 40.0}, "Raise the rank to 64 (now 16)"),
        (0, {"load": 40.0, "rank": 64}, "Raise the slot rank to 64 (now 16)"),
        (0, {"load": 40.0, "rank": 64, "ttft": 5.0}, "Lower the TTFT limit to 200 ms (now 5 s)"),
        (1, {"slots": 16}, "Lower the slots to 8 (now 16)"), (1, {"load": 2.0}, "Raise the load to 20 (now 2)"),
        (2, {"max_rank": 256, "slots": 64}, "Lower the slots or the slot rank: the engine does not start"),
    ],
)  # fmt: skip


test_no_preset_meets_a_challenge = harness.preset_test(widget, here, Enough="fine")


def test_the_command_is_a_server_with_adapters():
    line = widget.command(next(iter(widget.sweep(max_rank=64)))).splitlines()[-1]
    assert "--enable-lora" in harness.served_with(line, max_loras=8, max_lora_rank=64, max_cpu_loras=1000)
    nothing_fits = next(iter(widget.sweep(model="Qwen3-14B", gpu="L4")))
    assert nothing_fits.refused
    assert "0 of 1 fit" in widget.SPEC.pictures(nothing_fits, 640)
    assert "it refuses to start" in widget.command(next(iter(widget.sweep(max_rank=8, rank=16))))


@pytest.mark.usefixtures("short_runs")
def test_what_breaks_is_shaded_with_its_cause():
    def regions(**knobs) -> list[str]:
        return harness.shaded(widget, swept(**knobs))

    assert [re.sub(r"[\d.]+ %", "… %", words) for words in regions()] == [
        "too few slots: requests wait while the KV cache is … % free",
        "does not start",
    ]
    assert "does not start" in regions(max_rank=256)
    assert regions(rank=64) == ["does not start"]
    assert regions(adapters=1, gpu="H200") == []


# ---- the reader's own parts


lesson = load(script_path("12"))


@pytest.mark.parametrize("own", [{"table": lesson.AdapterSlots}, {"admit": lesson.admit}])
@pytest.mark.parametrize("knobs", [{}, {"slots": 32}])
def test_the_right_parts_change_nothing(own: dict, knobs: dict):
    yours, ours = here(**knobs, **own), here(**knobs)
    assert yours.like_the_engine
    assert yours.here == ours.here
    assert widget.verdict(yours) == widget.verdict(ours)


@pytest.mark.parametrize(
    ("part", "name", "mistake", "slots"),
    [("table", "AdapterSlots", "slots: first come, first gone", 32), ("admit", "admit", "gate: holds the line", 8)],
)
def test_wrong_parts_are_reported(part: str, name: str, mistake: str, slots: int):
    result = widget.verdict(here(slots=slots, **{part: getattr(mistaken("12", mistake), name)}))
    assert result.tone == "broken"
    assert result.words.startswith("Your parts decide differently")


test_parts_that_cannot_be_carried_out_are_refused = harness.unusable_test(
    here,
    [({"table": mistaken("12", "slots: returns the adapter").AdapterSlots}, "your table put"),
     ({"admit": lambda *_: [7]}, "your admit returns"), ({"admit": harness.endless}, "never end"),
     ({"table": harness.endless}, "never end")],
)  # fmt: skip
