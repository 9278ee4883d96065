"""Lesson 08's widget agrees with the capacities of prefill, link and decode, and says which knob to
turn when.
"""

import itertools
import json
import re
import shlex
import xml.etree.ElementTree as ET
from collections import Counter
from functools import partial

import pytest
from lessons.harness import mistaken, script_path
from lessons.widget_harness import advice_test, challenge_test, endless, known_state, shaded, unusable_test

from minivllm_lab.disaggregation.goodput import Disaggregated
from minivllm_lab.exercise import load
from minivllm_simulate.hardware import get_hardware
from minivllm_simulate.known_models import known_model
from minivllm_simulate.kv_links import Transfer, get_link
from widgets import disaggregation as widget
from widgets.disaggregation.state import LADDER, experiment


def here(**knobs) -> widget.State:
    """Return the first state that knows the result of the reader's own rate."""
    return next(state for state in widget.sweep(**knobs) if state.rate in state.mine.points)


known = partial(known_state, widget)


SETTINGS = [
    {"prefill": prefill, "decode": decode, "link": link, "rate": rate, "prompt": prompt, "output": 16, "tpot": tpot}
    for (prefill, decode), link, (prompt, rates), tpot in itertools.product(
        [(1, 1), (1, 3), (3, 1)],
        ["NVLink 4", "10 Gb/s"],
        [(256, (7.0, 40.0, 160.0, 900.0)), (1024, (3.0, 10.0, 56.0, 224.0)), (2048, (1.0, 5.0, 28.0, 112.0))],
        (0.0075, 0.05),
    )
    for rate in rates
]


def test_no_verdict_contradicts_the_capacities(monkeypatch: pytest.MonkeyPatch):
    """A rate of twice the least capacity is broken, by the part that has it, and a sixth is not if
    a request alone is in time.
    """
    monkeypatch.setattr("widgets.disaggregation.state.COUNTED", 24)
    said = Counter()
    for knobs in SETTINGS:
        state = here(**knobs)
        system = experiment(
            (state.model, state.gpu, state.mine.prefill, knobs["decode"], state.link, state.layer_wise), state.work
        ).system
        assert isinstance(system, Disaggregated)
        bounds = system.bounds(state.work, state.objective)
        outcome = widget.verdict(state)
        least, second = sorted(bounds.values())[:2]
        share = state.mine.share(state.rate)
        assert f"{share * 100:.0f} % are in time" in outcome.words
        assert (outcome.tone == "broken") == (share < 0.9 or state.rate > least)
        said[outcome.tone] += 1
        if state.rate > 2 * least and state.rate > 30:
            assert outcome.tone == "broken"
        alone = Transfer.of(known_model(state.model), get_hardware(state.gpu), state.work.prompt, get_link(state.link))
        if state.rate < least / 6 and alone.prefill + alone.seconds < state.objective.ttft / 3:
            assert outcome.tone != "broken", knobs
        if outcome.tone == "broken" and share >= 0.9:  # only in the long run, by what has the least capacity
            why = {"prefill": "queue", "link": "link", "decode": "tpot"}[min(bounds, key=bounds.__getitem__)]
            assert widget.cause_words(why, state) in outcome.words, knobs
            assert "in the long run" in outcome.words
            said["long run"] += 1
        if state.rate > 4 * least and second > 3 * least and share < 0.5:
            cause = state.mine.points[state.rate].cause(state.objective)
            which = min(bounds, key=bounds.__getitem__)
            assert (
                cause in {"prefill": ("queue",), "link": ("link", "room"), "decode": ("tpot", "decode", "room")}[which]
            )
            assert widget.cause_words(cause, state) in outcome.words
            said[which] += 1
    assert min(said["broken"], said["tight"], said["link"], said["prefill"], said["long run"]) >= 5, said


def test_the_right_guess_is_what_the_start_shows():
    state = known()
    assert widget.GUESS.right == 0
    assert 0.35 < state.gain < 0.7
    assert state.mine.cause == "tpot"
    hidden = [
        (step.decodes + step.chunk) * step.token / step.weights for step in (*state.steps, here(budget=8192).steps[1])
    ]
    assert hidden[0] < 0.2 < 0.7 < hidden[1] < 1 < hidden[2], "only a small chunk hides beneath the weights"


def test_the_one_pool_that_two_are_compared_with_has_the_best_budget_of_the_ladder():
    """No other budget makes the four colocated GPUs better, and a bad one makes them worse than two
    pools.
    """
    tuned = known()
    assert tuned.both.budget in LADDER
    others = [known(budget=budget) for budget in (128, 256, 384, 512, 8192)]
    assert all(other.both.goodput <= tuned.both.goodput for other in others)
    assert others[-1].gain > 1.5


def test_the_picture_does_not_answer_the_guess():
    """The picture before the guess has neither a step nor a figure of the colocated GPUs."""
    state = known()
    picture = ET.fromstring(widget.figure(state))
    parents = {child: parent for parent in picture.iter() for child in parent}

    def is_hidden(part) -> bool:
        return part.get("data-answer") is not None or (part in parents and is_hidden(parents[part]))

    told = (f"{state.both.goodput:.1f}/s", f"{state.steps[1].decodes:.0f} answers each", "for free")
    telling = [part for part in picture.iter() if any(words in (part.text or "") for words in told)]
    assert len(telling) == len(told)
    assert all(map(is_hidden, telling))


SOLUTIONS = (
    {"budget": 8192},
    {"prompt": 4096, "output": 16, "prefill": 3, "decode": 1, "ttft": 0.5, "tpot": 0.01, "rate": 14.0},
    {"model": "Qwen3-14B", "prompt": 2048, "output": 64, "link": "25 Gb/s", "rate": 5.0, "tpot": 0.025,
     "layer_wise": True},
)  # fmt: skip


test_each_challenge_can_be_met_and_by_what_it_is_about = challenge_test(
    widget, known, SOLUTIONS,
    [(0, {"budget": 0}), (1, {"prefill": 2, "decode": 2}), (2, {"layer_wise": False})],
)  # fmt: skip


def test_the_slow_link_is_borne_with_room_to_spare():
    """The margin is more than one request of sixty, which any change of the scheduler could make
    late.
    """
    state = here(**SOLUTIONS[2])
    assert state.mine.share(state.rate) >= 0.95
    assert here(**{**SOLUTIONS[2], "layer_wise": False}).mine.share(state.rate) <= 0.85


test_advice_names_the_knob_that_is_wrong = advice_test(
    widget,
    [
        (0, {"gpu": "H200"}, "Use an H100"), (0, {"prefill": 1}, "Use 4 GPUs in all"),
        (0, {"prompt": 512}, "Raise the prompt to 1K (now 512)"), (0, {}, "Use chunks of 8K"),
        (1, {}, "Raise the prompt to 2K (now 1K)"), (1, {"prompt": 2048, "budget": 2048}, "Use the best chunks"),
        (2, {}, "Use Qwen3-14B"), (2, {"model": "Qwen3-14B", "prompt": 2048}, "Use a link of at most 25 Gb/s"),
        (2, {"model": "Qwen3-14B", "prompt": 2048, "link": "25 Gb/s", "rate": 4.0}, "Raise the rate to 5 (now 4)"),
    ],
)  # fmt: skip


def test_the_command_is_two_servers_a_proxy_and_the_load():
    lines = widget.command(next(iter(widget.sweep(prefill=1, decode=3)))).splitlines()
    serves = [shlex.split(line) for line in lines if line.startswith("vllm serve")]
    roles = [json.loads(words[words.index("--kv-transfer-config") + 1])["kv_role"] for words in serves]
    assert roles == ["kv_producer", "kv_consumer"]
    proxy = next(line for line in lines if line.startswith("minivllm proxy"))
    assert len(re.findall(r"http://prefill\d", proxy)) == 1
    assert len(re.findall(r"http://decode\d", proxy)) == 3


def test_what_breaks_is_shaded_with_its_cause_and_its_bar_ends_there():
    def region(part: str, **knobs) -> str:
        state = known(**knobs)
        assert all((rate > state.mine.most(part)) == state.mine.breaks(rate) for rate in state.mine.rates)
        return shaded(widget, state)[0]

    assert "decoding takes over 7.5 ms a token" in region("decode", output=128)
    assert "prompts wait for a GPU that prefills" in region("prefill", output=64)
    assert "the link is too slow" in region("link", output=16, link="10 Gb/s", prompt=2048)


# ---- the reader's own connector


lesson = load(script_path("08"))


def test_the_lessons_own_connector_gives_the_same_points(monkeypatch: pytest.MonkeyPatch):
    """This holds even where engines are short of blocks and requests are preempted."""
    monkeypatch.setattr("widgets.disaggregation.state.COUNTED", 24)
    tight = {"model": "Qwen3-32B", "prompt": 256, "output": 256, "rate": 160.0, "prefill": 3, "decode": 1}
    for knobs in ({}, {"layer_wise": True, "rate": 80.0}, tight):
        yours, ours = (here(**knobs, **own) for own in ({"connector": lesson.ConnectorScheduler}, {}))
        assert yours.mine.points == ours.mine.points


WRONG = {
    "within the step": r"\(1026, False\) for a prompt of 1026 tokens",
    "never from elsewhere": "that is remote",
    "hands over again": "build_connector_meta",
    "holds nothing": "request_finished frees",
}


class Endless(lesson.ConnectorScheduler):
    build_connector_meta = endless


test_a_connector_that_would_lose_a_transfer_is_told_so = unusable_test(
    here,
    [*(({"connector": mistaken("08", name).ConnectorScheduler}, about) for name, about in WRONG.items()),
     ({"connector": Endless}, "never end")],
)  # fmt: skip
