"""Lesson 11's widget agrees with closed formulas for every pool, and with a plain simulation's
counts.
"""

import itertools
import re
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache, partial

import pytest
from lessons.harness import script_path

from lessons import widget_harness as harness
from minivllm.errors import MinivllmError
from minivllm.memory import kv_bytes_per_token
from minivllm_lab.exercise import load
from minivllm_lab.preemption.victims import SwapSpace
from minivllm_simulate.cost_model import StepShape
from minivllm_simulate.memory import memory_ledger, num_parameters
from minivllm_simulate.virtual_clock import SimulatedRequest, percentile, simulate
from widgets import preemption as widget
from widgets.preemption import runs
from widgets.preemption import state as preemption_state
from widgets.preemption.state import POOLS


def least_block_seconds(serving: runs.Serving) -> float:
    """Return the least block-seconds of a mean request, whose answer takes one step per token."""
    step = serving.cost.seconds(StepShape.of([(1, 1)]))
    blocks = (-(-(each.prompt_tokens + done) // 16) for each in serving.lengths for done in range(each.output_tokens))
    return step * sum(blocks) / len(serving.lengths)


@pytest.fixture
def short_runs(monkeypatch: pytest.MonkeyPatch):
    """Run few requests and count them all, for many settings, without changing other tests'
    runs.
    """
    monkeypatch.setattr(preemption_state, "experiment", lru_cache(runs.experiment.__wrapped__))
    monkeypatch.setattr(runs, "COUNTED", 10)
    monkeypatch.setattr(runs, "AFTER", 0)


here, swept = partial(harness.known_state, widget), partial(harness.last_state, widget)


# ---- verdicts against theory


SETTINGS = [
    {
        "pool": pool, "load": load, "prompt": prompt, "answer": answer, "gpu": gpu, "model": model, "limit": limit,
        "policy": policy, "link": link, "rule": rule, "admission": admission,
    }
    for (index, pool), (load, prompt, answer), (gpu, model, limit, policy, link) in itertools.product(
        enumerate((8192, 16384, 49152, 262144)),
        [(1.0, 512, 128), (6.0, 256, 512), (14.0, 1024, 64), (25.0, 2048, 128), (30.0, 128, 256)],
        [("H100", "Llama-3.1-8B", 5.0, "recompute", "PCIe 5"), ("H100", "Llama-3.1-8B", 20.0, "small", "PCIe 4"),
         ("L4", "Llama-3.1-8B", 15.0, "large", "10 Gb/s"), ("B200", "Llama-3.1-8B", 3.0, "small", "PCIe 5"),
         ("A100-80", "Qwen3-14B", 10.0, "small", "100 Gb/s"), ("MI300X", "Llama-3.2-3B", 2.0, "recompute", "PCIe 5")],
    )
    for rule, admission in [(runs.RULES[(index + prompt // 128) % 6], ("whole", "chunk")[answer > 200])]
]  # fmt: skip


def swap_by_hand(state: widget.State) -> tuple[float, float]:
    """Return the seconds per token to recompute it, and to copy it out and back."""
    serving = state.serving
    recompute = 2 * num_parameters(serving.model) / (0.5 * serving.gpu.flops_of("bfloat16"))
    each = kv_bytes_per_token(serving.model)
    copies = 2 * serving.model.num_hidden_layers if serving.policy == "small" else 1
    return recompute, 2 * (each / serving.link.bandwidth + copies * 2.3e-6 / 16)


def check_crossover(state: widget.State, words: str, said: Counter) -> None:
    recompute, swap = swap_by_hand(state)
    result = state.serving.crossover
    assert (result.recompute, result.swap) == pytest.approx((recompute, swap))
    assert ("Swapping is cheaper" in words) == (swap < recompute)
    assert ("Recomputing is cheaper" in words) == (swap > recompute)
    said["swap" if swap < recompute else "recompute"] += 1


@pytest.mark.usefixtures("short_runs")
def test_no_verdict_contradicts_the_formulas():
    """A load that cannot fit, fills the pool or cannot be in time is broken; tokens and crossover
    are exact.
    """
    said = Counter()
    for knobs in SETTINGS:
        state = here(**knobs)
        result, serving, pool = widget.verdict(state), state.serving, state.pool
        said[result.tone] += 1
        longest = round(1.75 * serving.prompt) + round(1.75 * serving.answer)
        try:
            room = memory_ledger(
                serving.model, serving.gpu, max_model_len=longest, max_num_batched_tokens=512, max_num_seqs=256
            )
            fits = longest <= pool <= room.usable_blocks * 16
        except MinivllmError:
            fits = False
        assert state.refused == (not fits), knobs
        if state.refused:
            said["refused"] += 1
            assert "does not start" in result.words
            continue
        check_crossover(state, result.words, said)
        point, cause = state.points[pool], state.cause(pool)
        assert (result.tone == "broken") == bool(cause)

        useful = sum(each.total - 1 for each in serving.lengths)
        assert point.computed - point.recomputed == useful, knobs
        assert (point.copied > 0) == (serving.policy != "recompute" and point.preemptions > 0)
        assert point.recomputed == 0 or serving.policy == "recompute"
        blocks = sum(-(-each.total // 16) for each in serving.lengths)
        if blocks <= pool // 16:
            said["room for all"] += 1
            assert point.preemptions == 0
        if serving.load * least_block_seconds(serving) > 1.05 * pool / 16:
            said["full"] += 1
            assert cause == "queue", knobs
            assert result.words.startswith(("Pool full on average: ", "Too slow: any pool"))
        step = serving.cost.seconds(StepShape.of([(1, 1)]))
        if step * max(each.output_tokens for each in serving.lengths) > state.limit:
            said["too slow alone"] += 1
            assert cause, knobs
        if not cause:
            assert state.latency(pool) <= state.limit
            assert widget.seconds(state.latency(pool)) in result.words
        if cause == "thrash":
            said["thrash"] += 1
            assert point.recomputed / point.computed >= 0.05
    expected = ("fine", "broken", "refused", "room for all", "full", "too slow alone", "swap", "recompute")
    assert min(said[each] for each in expected) >= 5, said


def lost_tokens(point: runs.Point) -> Iterator[int]:
    """Yield what each preemption took from a request that has come back."""
    spans = sorted(point.spans, key=lambda span: (span.request, span.start))
    for before, out, after in zip(spans, spans[1:], spans[2:], strict=False):
        if out.kind == runs.OUT and after.request == out.request:
            yield before.held


@pytest.mark.parametrize(
    "knobs",
    [
        {"pool": 16384},
        {"pool": 12288, "admission": "chunk", "rule": "least computed"},
        {"pool": 12288, "rule": "worst priority"},
        {"pool": 12288, "load": 30.0, "answer": 128, "admission": "chunk", "rule": "fewest left"},
        {"pool": 16384, "rule": "most blocks", "prompt": 1024, "load": 6.0},
    ],
)
@pytest.mark.usefixtures("short_runs")
def test_latencies_and_counts_are_those_of_a_plain_simulation(knobs: dict, monkeypatch: pytest.MonkeyPatch):
    """Single steps agree exactly; stretches of similar steps, as the widget runs them, within
    two percent.
    """
    monkeypatch.setattr(runs, "COUNTED", 40)
    state = here(**knobs)
    serving, pool = state.serving, state.pool
    engine = serving.scheduler(pool, None, SwapSpace(runs.BLOCK_SIZE))
    work = [
        SimulatedRequest(each.prompt_tokens, each.output_tokens, at, int(index % runs.URGENT != 0))
        for index, (each, at) in enumerate(zip(serving.lengths, serving.arrivals, strict=True))
    ]
    plain = simulate(work, engine, serving.cost)
    monkeypatch.setattr(runs.OpenEngine, "steps_alike", lambda engine, running: 1)
    one_by_one = runs.Experiment(serving, None)
    list(one_by_one.runs.run(pool))
    exact = one_by_one.runs.found[pool]
    assert exact.preemptions == plain.num_preemptions > 0
    assert exact.recomputed == engine.num_recomputed_tokens
    assert exact.latencies == pytest.approx(sorted(each.latency for each in plain.requests))
    out = Counter(span.request for span in exact.spans if span.kind == runs.OUT)
    assert out == +Counter({index: each.num_preemptions for index, each in enumerate(plain.requests)})
    assert sum(lost_tokens(exact)) == exact.recomputed

    point = state.points[pool]
    for share in (0.5, 0.99):
        assert point.latency(share) == pytest.approx(percentile(exact.latencies, share), rel=0.02)
    assert point.computed - point.recomputed == exact.computed - exact.recomputed


def test_a_swap_waits_for_its_copies():
    """The clock includes the copies, counted by hand, and nothing is recomputed."""
    state = here(policy="small", link="10 Gb/s", load=8.0)
    point = state.points[state.pool]
    by_hand = 2**21 / 1.25e9 + 64 * 2.3e-6
    assert state.serving.block_seconds == pytest.approx(by_hand)
    assert point.copying == pytest.approx(point.copied * by_hand)
    assert point.recomputed == 0
    assert state.cause(state.pool) == "copies"
    assert "copies: steps wait for them" in widget.verdict(state).words.lower()


test_a_region_is_shaded_where_the_pools_are_wrong = harness.region_test(
    widget, POOLS, [{}, {"admission": "chunk", "limit": 2.0}, {"gpu": "L4"}, {"model": "Qwen3-32B", "gpu": "H100"}]
)


def test_the_edge_lies_where_the_load_fills_the_pool():
    """The edge is Little's law: requests in the system times the blocks of each."""
    state = swept()
    (_, edge), *_ = state.late
    assert edge == pytest.approx(state.saturation, rel=0.02)
    inside = state.saturation / state.serving.held
    step = state.serving.steady().step_seconds(inside)
    assert inside == pytest.approx(14 * state.serving.answer * step, rel=0.02)
    first = min(pool for pool in state.run if not state.points[pool].preemptions)
    assert edge < first < 2 * edge
    assert [state.latency(pool) > state.latency(first) for pool in state.run] == [pool < edge for pool in state.run]


# ---- what is said


def test_the_right_guess_is_what_is_computed_again():
    state = here()
    assert f"{state.here.wasted:.0%}" == "24%"
    assert widget.GUESS.options[widget.GUESS.right] == "about a quarter"
    assert "24 %" in widget.GUESS.because
    assert ">24 %</text>" in widget.figure(state)
    assert f"the pool holds {state.pool // 1024}K" in widget.GUESS.question
    assert f"{state.saturation / 1024:.0f}K" == "57K"
    assert "needs 57K" in widget.GUESS.question


SOLUTIONS = (
    {"pool": 65536},
    {"pool": 32768, "load": 8.0, "admission": "chunk", "rule": "least computed"},
    {"gpu": "B200", "policy": "large"},
)


def solved(index: int, knobs: dict) -> widget.Progress:
    """Return a challenge's check once it knows the results of this pool and the next smaller
    one.
    """
    for state in widget.sweep(**knobs):
        result = widget.CHALLENGES[index].check(state)
        if result.met or (
            state.known and (index > 0 or result.advice.startswith(("Raise the pool", "Lower the pool")))
        ):
            return result
    raise AssertionError("the check does not end")


test_each_challenge_can_be_met_and_by_what_it_is_about = harness.challenge_test(
    widget, here, SOLUTIONS,
    [(0, {"pool": 49152}), (0, {"pool": 131072}), (1, {"rule": "last in"}), (1, {"rule": "most blocks"}),
     (2, {"policy": "small"}), (2, {"policy": "recompute"}), (2, {"link": "10 Gb/s"})],
    solved,
)  # fmt: skip


test_advice_names_the_knob_that_is_wrong = harness.advice_test(
    widget,
    [
        (0, {"gpu": "H200"}, "Use Llama-3.1-8B on an H100"), (0, {"load": 5.0}, "Raise the load"),
        (0, {"limit": 60.0}, "Lower the latency limit to 10 s (now 60 s)"),
        (0, {"prompt": 128}, "Raise the prompts to 512 (now 128)"), (1, {"answer": 64}, "Raise the answers"),
        (1, {}, 'Set "Admit if"'), (1, {"admission": "chunk", "policy": "large"}, 'Set "Victim then"'),
        (1, {"admission": "chunk", "pool": 65536}, "Lower the pool to 32K (now 64K)"), (2, {}, "Use a B200"),
        (2, {"gpu": "B200", "model": "Qwen3-14B"}, "Use Llama-3.1-8B"),
    ],
)  # fmt: skip


test_no_preset_meets_a_challenge = harness.preset_test(widget, here)


def test_the_command_is_a_server_and_its_load():
    state = next(iter(widget.sweep(pool=16384, rule="worst priority", admission="chunk", policy="large")))
    lines = widget.command(state).splitlines()
    flags = {"num_gpu_blocks_override": 1025, "max_model_len": 1792, "scheduling_policy": "priority"}
    assert "--no-scheduler-reserve-full-isl" in harness.served_with(lines[-1], **flags)
    assert any("--kv-offloading-size" in line for line in lines)
    assert "--request-rate 14" in lines[1]
    assert "refuses to start" in widget.command(next(iter(widget.sweep(gpu="L4", model="Qwen3-32B"))))


def test_what_breaks_is_shaded_with_its_cause():
    def regions(state: widget.State) -> list[str]:
        return harness.shaded(widget, state)

    assert regions(swept()) == ["pool full on average: this load needs 57K tokens, not 32K"]
    assert "pool full on average: this load needs 57K tokens, not 48K" in regions(swept(pool=2**17)), "at the edge"
    said = regions(next(iter(widget.sweep(gpu="L4"))))
    assert any(re.match(r"does not start: the L4 has room for [\d,]+ tokens", words) for words in said)
    slow = regions(here(policy="small", link="10 Gb/s", load=8.0))
    assert any(words.startswith("copies: steps wait") for words in slow)


# ---- the reader's own choice


@pytest.mark.usefixtures("short_runs")
@pytest.mark.parametrize("rule", ["last in", "worst priority"])
def test_the_right_victim_changes_nothing(rule: str):
    knobs = {"rule": rule, "pool": 8192, "load": 30.0}
    yours, ours = here(**knobs, victim=load(script_path("11")).victim), here(**knobs)
    assert yours.like_the_engine
    assert yours.points[8192] == ours.points[8192]
    assert ours.points[8192].preemptions > 0
    assert widget.verdict(yours) == widget.verdict(ours)
    assert "by your function" in " ".join(ET.fromstring(widget.figure(yours)).itertext())


@pytest.mark.usefixtures("short_runs")
@pytest.mark.parametrize("rule", ["last in", "worst priority"])
def test_another_victim_is_reported(rule: str):
    result = widget.verdict(here(rule=rule, pool=8192, load=30.0, victim=lambda running, policy: running[0]))
    assert result.tone == "broken"
    assert result.words.startswith("Your function picks different victims")


test_a_choice_that_cannot_be_carried_out_is_refused = harness.unusable_test(
    here, [({"victim": lambda *_: None}, "your victim returns None"), ({"victim": harness.endless}, "never end")]
)
