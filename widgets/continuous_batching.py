"""Lesson 04's widget: the slots of a batch under two policies, with requests that keep coming.

The engine's own scheduler decides every step, under a virtual clock; a step's time is that of Llama-3.1-8B on an H100,
modelled. Load is given as a share of what the slots could serve if none ever stood empty.

The picture in the lesson's text: `uv run python -P -m widgets.continuous_batching lessons/figures/04_slots.svg`
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from minivllm.config import CacheConfig, SchedulerConfig
from minivllm.errors import MinivllmError
from minivllm.lab.palette import BLUE, GREEN, PURPLE, SKY, VERMILLION
from minivllm.simulate.cost_model import RooflineCost, StepShape
from minivllm.simulate.hardware import get_hardware
from minivllm.simulate.known_models import known_model
from minivllm.simulate.slots import seat
from minivllm.simulate.virtual_clock import SimulatedRequest, Simulation, percentile, simulate
from minivllm.simulate.workloads import gamma_arrivals
from widgets.base import Challenge, LessonWidget, Progress, Verdict, choice, require_numbers, slider, steps
from widgets.svg import QUIET, Axes, Box, Drawing, Scale, Segment, legend

REQUESTS, MEAN_OUTPUT, PROMPT, LONGEST = 60, 24, 32, 240
POLICIES = ("static", "continuous")
MOST = {"load": 100.0, "spread": 10.0, "slots": 256, "burstiness": 100.0}
START = {"load": 0.7, "spread": 1.0, "slots": 4, "policy": "static", "burstiness": 1.0}


@dataclass(frozen=True)
class State:
    """One run. Utilization is the share of slot-steps in which a slot held a request that got a token."""

    policy: str
    slots: int
    load: float
    spread: float
    rows: list[list[str]]
    """What sat in each slot in each step, "" for nothing: [slots][steps]."""
    times: list[float]
    """When each step ended, in seconds."""
    queue: list[int]
    """Requests that wait, in each step."""
    arrivals: list[float]
    utilization: float
    """Over the steps up to the last arrival."""
    waiting_utilization: float
    """The same over those steps in which somebody waited; 1 where nobody ever did."""
    waiting_share: float
    """Of the steps up to the last arrival, those in which somebody waited."""
    formula: float
    """What a static batch of these lengths uses of its slots: mean / mean longest of the batches."""
    median_wait: float
    """Seconds to the first token."""
    queue_at_end: int
    """Requests that wait when the last one has come."""
    seconds: float


def sweep(
    load: float = START["load"],
    spread: float = START["spread"],
    slots: int = START["slots"],
    policy: str = START["policy"],
    burstiness: float = START["burstiness"],
) -> State:
    """Serve 60 requests that arrive one after another.

    Args:
        load: arrivals, as a share of what the slots could serve if all were always in use.
        spread: standard deviation of output lengths over their mean; 0 is all alike, 1 exponential.
        slots: requests that may run at once.
        policy: "static" or "continuous".
        burstiness: of the arrivals; 1 is a Poisson process, less comes in bursts.

    Raises:
        MinivllmError: a value makes no sense.
    """
    if policy not in POLICIES:
        raise MinivllmError(f"unknown policy {policy!r}: use one of {', '.join(POLICIES)}")
    require_numbers(MOST, load=load, spread=spread, slots=slots, burstiness=burstiness)
    if load <= 0 or spread < 0 or slots < 1:
        raise MinivllmError(f"load ({load}) and slots ({slots}) are above 0, spread ({spread}) is at least 0")
    lengths = _lengths(spread)
    rate = load * slots / (statistics.mean(lengths) * _cost().seconds(StepShape.of([(1, PROMPT)] * slots)))
    arrivals = gamma_arrivals(rate, REQUESTS, burstiness, seed=4)
    config = SchedulerConfig(max_model_len=512, max_num_seqs=slots, static_batching=policy == "static")
    work = [SimulatedRequest(PROMPT, n, arrival=at) for n, at in zip(lengths, arrivals, strict=True)]
    run = simulate(work, config, CacheConfig(num_gpu_blocks=4096, enable_prefix_caching=False), _cost())
    return _state(run, policy, slots, load, spread, lengths, arrivals)


def _state(
    run: Simulation, policy: str, slots: int, load: float, spread: float, lengths: Sequence[int], arrivals: list[float]
) -> State:
    coming = [step for step in run.steps if step.start <= arrivals[-1]]
    waited = [step for step in coming if step.num_waiting]
    batches = [lengths[i : i + slots] for i in range(0, len(lengths), slots)]
    return State(
        policy=policy,
        slots=slots,
        load=load,
        spread=spread,
        rows=seat((step.scheduled for step in run.steps), slots),
        times=[step.start + step.seconds for step in run.steps],
        queue=[step.num_waiting for step in run.steps],
        arrivals=arrivals,
        utilization=_used(coming, slots),
        waiting_utilization=_used(waited, slots),
        waiting_share=len(waited) / len(coming),
        formula=sum(lengths) / sum(slots * max(batch) for batch in batches),
        median_wait=percentile(run.ttfts, 0.5),
        queue_at_end=coming[-1].num_waiting,
        seconds=run.seconds,
    )


def _used(steps: Sequence, slots: int) -> float:
    return sum(step.shape.num_reqs for step in steps) / (slots * len(steps)) if steps else 1.0


@cache
def _cost() -> RooflineCost:
    return RooflineCost.of(known_model("Llama-3.1-8B"), get_hardware("H100"))


@cache
def _lengths(spread: float) -> tuple[int, ...]:
    """Output lengths with this spread around the same mean, gamma distributed, cut at the longest a request may be."""
    if spread == 0:
        return (MEAN_OUTPUT,) * REQUESTS
    draw, shape = random.Random(7), 1 / spread**2
    return tuple(min(LONGEST, max(1, round(draw.gammavariate(shape, MEAN_OUTPUT / shape)))) for _ in range(REQUESTS))


WIDTH, HEIGHT, MARGIN = 720, 470, 20
GANTT = Box(MARGIN + 44, 92, WIDTH - 2 * MARGIN - 56, 180)
PLOT = Box(MARGIN + 44, 332, WIDTH - 2 * MARGIN - 56, 88)
COLOURS = (BLUE, SKY, GREEN, PURPLE)
IDLE, MISSED = "#EFEFEF", "#F3C29B"


def figure(state: State) -> str:
    """Who sits in which slot, over time; below, how many wait."""
    drawing = Drawing(WIDTH, HEIGHT, f"{state.slots} slots under {state.policy} batching", verdict(state).words)
    note = f"{state.utilization:.0%} in use while requests arrive"
    drawing.heading((MARGIN, 26), f"{state.slots} slots, {state.policy} batching", note)
    keys = [
        Segment("a request, from its first step to its last", 0, BLUE),
        Segment("an empty slot", 0, IDLE),
        Segment("empty while somebody waits", 0, MISSED),
    ]
    legend(drawing, (MARGIN, 56), keys, WIDTH - 2 * MARGIN)
    _draw_slots(drawing, state)
    _draw_queue(drawing, state)
    return drawing.render()


def _draw_slots(drawing: Drawing, state: State) -> None:
    scale = GANTT.width / state.seconds
    high = GANTT.height / state.slots
    starts = [0.0, *state.times[:-1]]
    for slot, row in enumerate(state.rows):
        y = GANTT.y + slot * high
        drawing.rect(Box(GANTT.x, y, GANTT.width, high - 2), IDLE)
        for who, first, last in _stretches(row, state.queue):
            left, right = GANTT.x + starts[first] * scale, GANTT.x + state.times[last] * scale
            if who == "!":
                drawing.rect(Box(left, y, right - left, high - 2), MISSED)
            else:
                tip = f"request {int(who) + 1}: {last - first + 1} steps"
                drawing.rect(Box(left, y, right - left - 0.5, high - 2), COLOURS[int(who) % len(COLOURS)], tip=tip)
        if state.slots <= 16:
            drawing.text((GANTT.x - 8, y + high / 2 + 4), str(slot + 1), size=11, colour=QUIET, anchor="end")


def _stretches(row: Sequence[str], queue: Sequence[int]) -> list[tuple[str, int, int]]:
    """(who, first step, last step) of every stay; "!" for an empty slot while somebody waits."""
    found: list[tuple[str, int, int]] = []
    for step, who in enumerate(row):
        kind = who or ("!" if queue[step] else "")
        if found and found[-1][0] == kind and found[-1][2] == step - 1:
            found[-1] = (kind, found[-1][1], step)
        elif kind:
            found.append((kind, step, step))
    return found


def _draw_queue(drawing: Drawing, state: State) -> None:
    drawing.heading((MARGIN, PLOT.y - 22), "Requests that wait", f"{state.queue_at_end} when the last one has arrived")
    axes = Axes(drawing, PLOT, Scale(0, state.seconds), Scale(0, max(5, *state.queue) * 1.4))
    axes.frame("seconds (modelled)", "", x_format=lambda value: f"{value:.3g}")
    axes.step([0.0, *state.times], [0, *state.queue], VERMILLION)
    axes.mark_x(state.arrivals[-1], "the last one arrives", QUIET, before=True)


def verdict(state: State) -> Verdict:
    """What this configuration means, in one line."""
    wait = f"half of the requests wait more than {state.median_wait * 1e3:,.0f} ms for their first token"
    if state.queue_at_end >= REQUESTS // 6:
        ceiling = f" Full static batches of these lengths use {state.formula:.0%} of their slots." * (
            state.policy == "static"
        )
        return Verdict(
            f"The queue does not drain: {state.queue_at_end} of {REQUESTS} wait when the last one arrives, and {wait}."
            f"{ceiling}",
            "broken",
        )
    words = f"{state.utilization:.0%} of the slots in use; {wait}."
    if state.waiting_share > 0.1 and state.waiting_utilization < 0.8:
        missed = f" While somebody waited, {1 - state.waiting_utilization:.0%} of the slots stood empty."
        return Verdict(words + missed, "tight")
    return Verdict(words + " No slot stays empty while somebody waits.", "fine")


def _empty_though_wanted(state: State) -> Progress:
    words = (
        f"Somebody waits in {state.waiting_share:.0%} of the steps; in those, {state.waiting_utilization:.0%} of the "
        "slots are in use."
    )
    return Progress(state.waiting_share >= 0.75 and state.waiting_utilization < 0.25, words)


CHALLENGE = Challenge(
    goal="Find a configuration in which somebody waits in at least 75% of the steps, and yet fewer than 25% of the "
    "slots are in use in those steps.",
    check=_empty_though_wanted,
    hint="Which policy keeps a door shut? It opens again when the longest request of a batch has ended: what makes the "
    "longest of a batch so much longer than the mean?",
    lesson="The hardware was there, and so was the work: only the rule who may enter kept them apart. Change nothing "
    "but the policy.",
)


def show() -> LessonWidget:
    """The widget: knobs for requests and batch, the picture, and the challenge."""
    spreads = [("all alike", 0.0), ("0.25", 0.25), ("0.5", 0.5), ("1 (exponential)", 1.0), ("1.5", 1.5)]
    bursts = [("in bursts", 0.25), ("Poisson", 1.0), ("evenly", 16.0)]
    knobs = {
        "The requests": {
            "load": slider("Load", 0.1, 2.0, 0.05, START["load"], "arrivals against what full slots could serve"),
            "spread": steps("Length spread", spreads, START["spread"], "standard deviation of lengths over their mean"),
            "burstiness": choice("They arrive", bursts, START["burstiness"], "shape of the gaps between arrivals"),
        },
        "The batch": {
            "slots": steps("Slots", [1, 2, 4, 8, 16], START["slots"], "max_num_seqs"),
            "policy": choice("Policy", list(POLICIES), START["policy"], "who may enter when"),
        },
    }
    return LessonWidget(
        title="Who sits in the batch",
        lead="Requests of different lengths come and go. Change the policy and nothing else, then raise the load until "
        "the queue no longer drains.",
        knobs=knobs,
        presets={
            "Start again": START,
            "More than it can serve": {**START, "policy": "continuous", "load": 1.5},
        },
        sweep=sweep,
        figure=figure,
        verdict=verdict,
        challenge=CHALLENGE,
    )


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(figure(sweep()))
