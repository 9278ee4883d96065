"""Lesson 04's widget: the load that static and continuous batching can carry, on the same arrivals.

The engine's own scheduler decides every step, under a virtual clock; a step's time is that of Llama-3.1-8B on an H100,
modelled. Load is given as a share of what the slots could serve if none ever stood empty.

The picture in the lesson's text: `uv run python -P -m widgets continuous_batching lessons/figures/04_slots.svg`
"""

from __future__ import annotations

from typing import Any

from widgets.continuous_batching.curves import SERVICE, START, Curve, State, seconds, share, sweep, title
from widgets.continuous_batching.figure import figure
from widgets.continuous_batching.runs import REQUESTS
from widgets.shell.knobs import choice, entry, slider, steps
from widgets.shell.lesson_widget import LessonWidget
from widgets.shell.spec import Challenge, Guess, Progress, Spec, Verdict


def verdict(state: State) -> Verdict:
    """What this load means for both policies, in one line."""
    over = [curve for curve in state.curves if curve.stretch.rows > state.slots]
    over += [curve for curve in state.curves if any(one.most_running > state.slots for one in curve.points.values())]
    if over:
        most = max(over[0].stretch.rows, *(one.most_running for one in over[0].points.values()), 0)
        return Verdict(f"Your schedule lets {most} requests run at once, and max_num_seqs is {state.slots}.", "broken")
    if not state.known:
        return Verdict(f"{REQUESTS} requests are being served at this load, under one policy and the other.", "tight")
    broken = [curve for curve in state.curves if curve.broken(state.load)]
    fine = [curve for curve in state.curves if curve not in broken]
    if not broken:
        words = " and ".join(f"{_in_time(curve, state)} under {title(curve)}" for curve in fine)
        return Verdict(f"Both carry this load: {words} have their first token in time.", "fine")
    if not fine:
        why = "More arrives than full slots can serve, so no policy helps. " * (state.load > 1)
        return Verdict(why + " ".join(_breaks(curve, state) for curve in broken), "broken")
    held = f"{title(fine[0]).capitalize()} serves the same arrivals, {_in_time(fine[0], state)} of them in time."
    return Verdict(f"{_breaks(broken[0], state)} {held}", "tight" if fine[0].name != "static" else "broken")


def _in_time(curve: Curve, state: State) -> str:
    return share(curve.points[state.load].goodput(state.limit))


def _breaks(curve: Curve, state: State) -> str:
    point, name = curve.points[state.load], title(curve).capitalize()
    in_time = f"{_in_time(curve, state)} have their first token within {seconds(state.limit)}"
    if curve.queue_grows(state.load):
        return f"{name} cannot keep up: {point.queue} of {REQUESTS} wait when the last one comes, and {in_time}."
    return f"{name} keeps up, but too late: {in_time}, and {share(SERVICE)} is asked."


def command(state: State) -> str:
    """The server, and the load on it."""
    goal = f"--goodput ttft:{state.limit * 1e3:g}"
    return "\n".join(
        [
            "# Continuous batching is all that vLLM does; static batching has no flag.",
            f"# Load {state.load:g} is {state.rate:.3g} requests a second of these lengths (modelled). From outside:",
            f"# vllm bench serve --request-rate {state.rate:.3g} --burstiness {state.burstiness:g} {goal}",
            f"vllm serve meta-llama/Llama-3.1-8B --max-num-seqs {state.slots}",
        ]
    )


def _carried(least: float, slots: int, spread: float, state: State) -> Progress:
    """Whether static batching carries a load, in so many slots, with lengths so uneven."""
    if not state.known:
        return Progress(False, "The requests are being served.")
    static, load = state.curves[0], state.load
    words = f"Load {load:g}, {state.slots} slots: {_in_time(static, state)} in time under static batching."
    alike = f"The lengths spread by {state.spread:.3g} of their mean: make them as uneven as {spread:g}."
    asked = (
        (state.slots < slots, f"Slots: {slots} or more are asked."),
        (state.spread < spread, alike),
        (load < least, f"Load: at least {least:g} is asked. What would a static batch have to look like to carry it?"),
        (static.queue_grows(load), _too_much(state)),
        (static.late(load), _too_late(state)),
    )
    advice = next((words for wrong, words in asked if wrong), "")
    return Progress(not advice, words, advice)


def _too_much(state: State) -> str:
    used = f"{state.formula:.1%} of the slots' time, mean length / mean longest of {state.slots}"
    if state.load > 1:
        return "The load: above 1, no policy serves it."
    return f"Not the service level: the queue grows, since full batches use {used}. Load, spread or slots must give."


def _too_late(state: State) -> str:
    wait = seconds(state.curves[0].points[state.load].ttft(SERVICE))
    return (
        f"The queue does not grow, but who comes waits for the batch to end, {wait} for one in twenty. Shorter "
        f"batches, or a service level above {seconds(state.limit)}."
    )


CHALLENGES = (
    Challenge(
        "Find a load of at least 0.3 that static batching carries within the service level, in 8 slots or more.",
        lambda state: _carried(0.3, 8, 0.0, state),
        "A static batch has a knee too. It lies where its empty slots leave it, far below 1.",
    ),
    Challenge(
        "Let static batching carry a load of at least 0.8, in 8 slots or more.",
        lambda state: _carried(0.8, 8, 0.0, state),
        "Static batching wastes nothing where all answers end together. It is the spread of the lengths that costs.",
    ),
    Challenge(
        "Lengths are uneven: a spread of 0.5 at least. Let static batching carry a load of 0.6 or more, in as many "
        "slots as it can, which is 4 or more.",
        lambda state: _carried(0.6, 4, 0.5, state),
        "Mean length / mean longest of the batch is the load at which the queue begins to grow: more slots lower it.",
    ),
)

GUESS = Guess(
    "The longest of 8 answers is 2.7 times the mean. From which load on is static batching broken?",
    ("0.2", "0.35", "0.5", "0.65"),
    1,
    "A batch lasts as long as its longest answer, so 8 slots do the work of 8 / 2.7. Continuous batching holds to 1.",
)

SPREADS = [("all alike", 0.0), ("0.25", 0.25), ("0.5", 0.5), ("1", 1.0), ("1.5", 1.5)]
LIMITS = [(seconds(limit), limit) for limit in (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)]
BURSTS = [("in bursts", 0.25), ("at random", 1.0), ("evenly", 16.0)]
KNOBS = {
    "The server": {
        "load": slider("Load", 0.1, 1.5, 0.1, START["load"], "arrivals, as a share of what full slots could serve"),
        "slots": steps("Slots", [1, 2, 4, 8, 16], START["slots"], "max_num_seqs: requests that may run at once"),
        "limit": steps("First token in", LIMITS, START["limit"], "the service level: for 95 % of the requests"),
    },
    "The requests": {
        "spread": steps("Length spread", SPREADS, START["spread"], "of outputs: deviation / mean; 1 is exponential"),
        "burstiness": choice("They come", BURSTS, START["burstiness"], "gaps between arrivals; at random: Poisson"),
        "file": entry(
            "Own lengths", "", "a file, or azure-code", "a file, or a workload's name: in place of the spread"
        ),
    },
}

SPEC = Spec(
    name="continuous_batching",
    title="Who sits in the batch, and what load it carries",
    lead="The same requests come to a static and to a continuous batch. Drag the load: where does each break?",
    knobs=KNOBS,
    presets={
        "More than it can serve": {"load": 1.2},
        "More slots": {"slots": 16, "load": 0.3},
        "In a hurry": {"limit": 0.1, "load": 0.3},
    },
    sweep=sweep,
    figure=figure,
    verdict=verdict,
    command=command,
    challenges=CHALLENGES,
    guess=GUESS,
    own={"schedule": "decides who gets how many tokens in a step, in place of continuous batching"},
)


def show(**knobs: Any) -> LessonWidget:
    """The widget; `schedule=` is your own from exercise 04."""
    return LessonWidget(SPEC, **knobs)
