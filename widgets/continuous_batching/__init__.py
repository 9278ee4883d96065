"""Show how much load static and continuous batching can handle with the same arrivals.

The engine's own scheduler decides every step, on a virtual clock. The time of a step is modelled,
for Llama-3.1-8B on an H100. The load is a share of what the seats could serve if none were ever
empty.

Draw the lesson's figure with `uv run python -P -m widgets continuous_batching
lessons/figures/04_slots.svg`.
"""

from __future__ import annotations

from typing import Any

from widgets.continuous_batching.curves import SERVICE, START, Curve, State, share, sweep, title
from widgets.continuous_batching.figure import figure
from widgets.continuous_batching.runs import REQUESTS
from widgets.shell.advice import at_least, progress
from widgets.shell.knobs import choice, entry, slider, steps
from widgets.shell.live import Live
from widgets.shell.notebook import notebook_widget
from widgets.shell.plot import seconds
from widgets.shell.spec import Challenge, Guess, Progress, Spec, Verdict


def verdict(state: State) -> Verdict:
    """Say in one or two sentences whether each policy handles this load."""
    for curve in state.curves:
        most = max([curve.stretch.rows, *(point.most_running for point in curve.points.values())])
        if most > state.seats:
            words = f"Your schedule lets {most} requests run at once, but max_num_seqs is {state.seats}."
            return Verdict(words, "broken")
    if not state.known:
        return Verdict(f"Still serving {REQUESTS} requests at this load, under each policy.", "tight")
    broken = [curve for curve in state.curves if curve.broken(state.load)]
    fine = [curve for curve in state.curves if curve not in broken]
    if not broken:
        words = " and ".join(f"{_in_time(curve, state)} under {title(curve)}" for curve in fine)
        return Verdict(f"Both handle this load: {words} have their first token in time.", "fine")
    if not fine:
        words = " ".join(_breaks(curve, state) for curve in broken)
        if state.load > 1:
            queues = " and ".join(f"{curve.points[state.load].queue}" for curve in broken)
            words = f"More requests arrive than full seats can serve, so no policy helps: {queues} of {REQUESTS} wait."
        return Verdict(words, "broken")
    kept = f"{title(fine[0]).capitalize()} serves the same arrivals, {_in_time(fine[0], state)} of them in time."
    return Verdict(f"{_breaks(broken[0], state)} {kept}", "broken")


def _in_time(curve: Curve, state: State) -> str:
    return share(curve.points[state.load].goodput(state.limit))


def _breaks(curve: Curve, state: State) -> str:
    point = curve.points[state.load]
    name = title(curve).capitalize()
    if curve.queue_grows(state.load):
        queue = f"its queue grows, to {point.queue} of {REQUESTS} requests in this short run"
        return f"{name} cannot keep up: {queue}."
    in_time = f"{_in_time(curve, state)} have their first token within {seconds(state.limit)}"
    return f"{name} keeps up, but responds too late: {in_time}, and the goal is {share(SERVICE)}."


def command(state: State) -> str:
    """Write the server's command, with that of the load as a comment."""
    goal = f"--goodput ttft:{state.limit * 1e3:g}"
    return "\n".join(
        [
            "# vLLM always batches continuously; static batching has no flag.",
            f"# Load {state.load:g} is {state.rate:.3g} requests a second of these lengths (modelled). To send it:",
            f"# vllm bench serve --request-rate {state.rate:.3g} --burstiness {state.burstiness:g} {goal}",
            f"vllm serve meta-llama/Llama-3.1-8B --max-num-seqs {state.seats}",
        ]
    )


def _static_handles(state: State, load: float, seats: int, spread: float) -> Progress:
    """Check that static batching handles this load with at least this many seats and this length
    spread.
    """
    if not state.known:
        return Progress(False, "Wait: the requests are still being served.")
    static = state.curves[0]
    return progress(
        f"Load {state.load:g}, {state.seats} seats: {_in_time(static, state)} in time under static batching.",
        at_least("the seats", state.seats, seats),
        at_least("the length spread", state.spread, spread, "{:.3g}".format),
        at_least("the load", state.load, load),
        (static.queue_grows(state.load), _too_much(state)),
        (static.late(state.load), _too_late(state)),
    )


def _too_much(state: State) -> str:
    if state.load > 1:
        return "Lower the load: above 1, no policy can serve it."
    busy = f"full batches keep {share(round(state.formula, 2))} of the seats busy"
    return f"Change the load, the spread or the seats: {busy}, so the queue grows above a load of {state.formula:.2f}."


def _too_late(state: State) -> str:
    wait = seconds(state.curves[0].points[state.load].ttft(SERVICE))
    return f"Shorten the batches or raise the TTFT limit: no queue grows, but one request in twenty waits {wait}."


CHALLENGES = (
    Challenge(
        "Find a load of at least 0.3 that static batching handles within the limit, in at least 8 seats.",
        lambda state: _static_handles(state, 0.3, 8, 0.0),
        "A static batch has a knee too, but its empty seats put it far below 1.",
    ),
    Challenge(
        "Make static batching handle a load of at least 0.8, in at least 8 seats.",
        lambda state: _static_handles(state, 0.8, 8, 0.0),
        "Static batching wastes nothing if all answers end together. What costs is the spread of their lengths.",
    ),
    Challenge(
        "Keep a length spread of at least 0.5, and make static batching handle a load of at least 0.6 in as many seats "
        "as you can, at least 4.",
        lambda state: _static_handles(state, 0.6, 4, 0.5),
        "The queue starts to grow at mean length / mean longest of a batch. So more seats lower that load.",
    ),
)

GUESS = Guess(
    "The longest of 8 answers is 2.7 times the mean. From which load on does the queue of static batching grow?",
    ("0.2", "0.36", "0.5", "0.65"),
    1,
    "A batch lasts as long as its longest answer, so 8 seats do the work of 3, and the queue grows from 0.36. A little "
    "before, more than 5 % of the first tokens are late. Under continuous batching, it grows from 1.",
)

SPREADS = [("all equal", 0.0), ("0.25", 0.25), ("0.5", 0.5), ("1", 1.0), ("1.5", 1.5)]
LIMITS = [(seconds(limit), limit) for limit in (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)]
BURSTS = [("in bursts", 0.25), ("at random", 1.0), ("evenly", 16.0)]
KNOBS = {
    "The server": {
        "load": slider("Load", 0.1, 1.5, 0.1, START["load"], "arrivals, as a share of what full seats could serve"),
        "seats": steps("Seats", [1, 2, 4, 8, 16], START["seats"], "max_num_seqs: requests that may run at once"),
        "limit": steps("TTFT limit", LIMITS, START["limit"], "time to first token of 95 % of the requests"),
    },
    "The requests": {
        "spread": steps("Length spread", SPREADS, START["spread"], "of outputs: deviation / mean; 1 is exponential"),
        "burstiness": choice("Arrivals", BURSTS, START["burstiness"], "gaps between arrivals; at random: Poisson"),
        "file": entry("Own lengths", "", "a file, or azure-code", "a file or a workload's name replaces the spread"),
    },
}

SPEC = Spec(
    name="continuous_batching",
    title="Who sits in the batch, and how much load it handles",
    lead="The same requests arrive at a static and at a continuous batch. Drag the load: whose queue grows?",
    knobs=KNOBS,
    presets={
        "More than it can serve": {"load": 1.2},
        "More seats": {"seats": 16, "load": 0.3},
        "In a hurry": {"limit": 0.1, "load": 0.3},
    },
    sweep=sweep,
    figure=figure,
    verdict=verdict,
    command=command,
    challenges=CHALLENGES,
    guess=GUESS,
    own={"schedule": "decides how many tokens each request gets in a step"},
)


def show(**knobs: Any) -> Live:
    """Show the widget; `schedule=` takes your function from exercise 04."""
    return notebook_widget(SPEC, **knobs)
