"""Show how many LoRA slots a thousand adapters need.

The engine's own scheduler and slot table decide every step, on a virtual clock.
`minivllm_simulate.layouts` models the time of a step, and `minivllm_lab.multi_lora.costs` what
adapters add. All adapters are in host memory; reading them from disk is left out.

Draw the lesson's figure with `uv run python -P -m widgets multi_lora lessons/figures/12_slots.svg`.
"""

from __future__ import annotations

import shlex
from typing import Any

from minivllm_simulate.known_models import CONFIGS
from widgets.multi_lora.figure import cause_words, detail, figure, gigabytes
from widgets.multi_lora.runs import ANSWER, MAX_MODEL_LEN, PROMPT, SEATS, Point
from widgets.multi_lora.state import (
    ADAPTERS,
    CLIENTS,
    GPUS,
    LOADS,
    MODELS,
    RANKS,
    SKEWS,
    SLOTS,
    START,
    TTFTS,
    State,
    sweep,
)
from widgets.shell.advice import Rule, at_least, at_most, progress, use
from widgets.shell.knobs import choice, labelled, steps
from widgets.shell.live import Live
from widgets.shell.notebook import notebook_widget
from widgets.shell.plot import counted, percent, seconds
from widgets.shell.spec import Challenge, Guess, Progress, Spec, Verdict

ONLY_JUST = 0.5
"""The share of a limit from which a little more load is too much."""


def verdict(state: State) -> Verdict:
    """Say in one or two sentences whether this many slots serve the load."""
    where = f"with {counted(state.slots, 'slot')}"
    if unserved := state.not_served(where, "Your parts decide differently from the engine.", _figures):
        return unserved
    point = state.here
    cause = state.cause(state.slots)
    first = f"{percent(CLIENTS)} have their first token within {_waited(state)}"
    if cause:
        why = cause_words(state, cause, state.slots)
        words = f"{why[0].upper()}{why[1:]}. {first}."
        return Verdict(words, "broken")
    words = f"{first}, and {percent(point.hit_rate)} of the requests find their adapter in a slot."
    just = state.in_the_end(state.slots) > ONLY_JUST * state.ttft
    return Verdict(f"{'Only just: ' * just}{words}", "tight" if just else "fine")


def _waited(state: State) -> str:
    """Return the time within which clients have a first token, and whether it is that of the long run."""
    waited = state.in_the_end(state.slots)
    words = seconds(waited) if waited < 3600 else "hours"
    return f"{words} in the long run" if waited > state.first(state.slots) else words


def _figures(point: Point) -> str:
    return f"{point.distinct:.3g} adapters at once, {point.loads} slot loads, {point.waiting:.3g} requests waiting"


def command(state: State) -> str:
    """Write the server's command, with that of the load as a comment."""
    serving = state.serving
    name = shlex.quote(next(name for name in CONFIGS if name.endswith(f"/{serving.name}")))
    names = " ".join(f"adapter-{index}" for index in range(1, min(serving.adapters, 3) + 1))
    more = " ..." * (serving.adapters > 3)
    bench = (
        f"# vllm bench serve --model {name} --lora-modules {names}{more} --dataset-name random --random-input-len "
        f"{PROMPT} --random-output-len {ANSWER} --ignore-eos --request-rate {serving.load:g} "
        f"--goodput ttft:{state.ttft * 1e3:g}"
    )
    return "\n".join(
        [
            f"# On one {serving.gpu.name}{'; it refuses to start' * state.refused}. The load (it picks all adapters "
            "equally often):",
            bench,
            f"vllm serve {name} --enable-lora --max-loras {state.slots} --max-lora-rank {serving.max_lora_rank} "
            f"--max-cpu-loras {max(serving.adapters, state.slots)} --max-num-seqs {SEATS} "
            f"--max-model-len {MAX_MODEL_LEN} --lora-modules "
            + " ".join(f"adapter-{index}=adapters/{index}" for index in range(1, min(serving.adapters, 3) + 1)),
        ]
    )


# ---- the challenges


def _progress(state: State, rules: list[Rule], met: bool, advice: str) -> Progress:
    serving = state.serving
    return progress(
        _words(state),
        at_least("the adapters", serving.adapters, START["adapters"]),
        at_most("the skew", serving.skew, START["skew"]),
        *rules,
        at_least("the slot rank", serving.max_lora_rank, serving.rank),
        *state.outcome_rules(met, advice, "Lower the slots or the slot rank: the engine does not start."),
    )


def _words(state: State) -> str:
    taken = gigabytes(state.slots * state.serving.cost.slot_bytes)
    if not state.known or state.refused:
        return f"{counted(state.slots, 'slot')}, {taken}."
    point = state.here
    return (
        f"{counted(state.slots, 'slot')}, {taken}: {percent(CLIENTS)} within {_waited(state)}, "
        f"{percent(point.hit_rate)} hits, {percent(1 - point.cache_used)} of the cache free."
    )


def _enough(state: State) -> Progress:
    serving = state.serving
    taken = state.slots * serving.cost.slot_bytes
    rules = [
        use("Llama-3.1-8B on an H100", serving.name == START["model"] and serving.gpu.name == START["gpu"]),
        at_least("the load", serving.load, 40),
        at_least("the rank", serving.rank, 64),
        at_most("the TTFT limit", state.ttft, 0.2, seconds),
    ]
    met = state.known and not state.refused and not state.cause(state.slots) and taken <= 20e9
    advice = "Raise the slots: the load needs more adapters at once."
    if taken > 20e9:
        advice = f"Lower the slots or the slot rank: they take {gigabytes(taken)}, and only 20 GB is allowed."
    return _progress(state, rules, met, advice)


def _shorter(state: State) -> Progress:
    serving = state.serving
    rules = [
        at_least("the load", serving.load, 20),
        at_most("the slots", state.slots, 8),
        at_most("the TTFT limit", state.ttft, 0.2, seconds),
    ]
    met = state.known and not state.refused and not state.cause(state.slots)
    advice = (
        f"Change the model or the GPU so that requests finish sooner: each now runs for "
        f"{serving.at_once / serving.load:.2g} s, so {serving.at_once:.0f} run at once, with their adapters."
    )
    return _progress(state, rules, met, advice)


def _flattered(state: State) -> Progress:
    known = state.known and not state.refused
    hits = state.here.hit_rate if known else 0.0
    late = known and state.in_the_end(state.slots) > 1
    advice = "Lower the slots: then mostly requests whose adapter is already loaded get in."
    if known and not late:
        advice = "Lower the slots or raise the load until more adapters are needed than there are slots."
    return _progress(state, [], late and hits >= 0.8, advice)


CHALLENGES = (
    Challenge(
        "Serve 1,000 adapters of rank 64 on the H100, at 40 requests a second: 90 % have their first token within 200 "
        "ms, and the slots take at most 20 GB.",
        _enough,
        "What counts is how many adapters are in use at once, some 30 of 1,000. And each slot is as wide as "
        "max_lora_rank.",
    ),
    Challenge(
        "Keep 20 requests a second for 1,000 adapters and at most 8 slots, and still give 90 % their first token "
        "within 200 ms.",
        _shorter,
        "By Little's law, how many requests run at once depends on how long each one runs; the adapters follow.",
    ),
    Challenge(
        "Fool the hit rate: let at least 80 % of the requests find their adapter in a slot, although 90 % have their "
        "first token only after more than a second. Keep 1,000 adapters and a skew of at most 1.",
        _flattered,
        "A hit rate counts requests when they are admitted. Those whose adapter has no slot wait in the queue, "
        "uncounted.",
    ),
)
GUESS = Guess(
    "20 requests a second use 1,000 adapters, some far more often than others. How many slots give 90 % of them a "
    "first token within 200 ms?",
    ("about 4", "about 17", "about 130", "all 1,000"),
    1,
    "A request runs for a second, so some 20 run at once. Some share an adapter, so about 16 adapters are in use on "
    "average. With one slot more, the queue stays short. All 1,000 would not even fit.",
)

# ---- the knobs

KNOBS = {
    "The server": {
        "slots": steps("Slots", SLOTS, START["slots"], "LoRA slots on the GPU: max_loras"),
        "max_rank": steps("Slot rank", RANKS, START["max_rank"], "how wide each slot is: max_lora_rank"),
        "model": choice("Model", list(MODELS), START["model"], "served in 16 bits"),
        "gpu": choice("GPU", list(GPUS), START["gpu"], "sets memory, bandwidth and FLOP/s"),
    },
    "The adapters": {
        "adapters": steps("Adapters", labelled(ADAPTERS, "{:,}".format), START["adapters"],
                          "how many there are, all in host memory"),
        "skew": steps("Skew", labelled(SKEWS, "{:g}".format), START["skew"],
                      "Zipf's exponent: the k-th adapter is used 1 / k^skew times as often as the first"),
        "rank": steps("Rank", RANKS, START["rank"], "the rank of every adapter, on all seven linears of a layer"),
    },
    "The load": {
        "load": steps("Load", labelled(LOADS, "{:g}/s".format), START["load"], "requests a second"),
        "ttft": steps("TTFT limit", labelled(TTFTS, seconds), START["ttft"],
                      f"the service level: {percent(CLIENTS)} have their first token within this time"),
    },
}  # fmt: skip

SPEC = Spec(
    name="multi_lora",
    title="How many adapters at once?",
    lead="Drag the slots to where clients wait too long. Then change how often the most popular adapters are used.",
    knobs=KNOBS,
    presets={
        "Enough": {"slots": 32},
        "One slot": {"slots": 1},
        "A slot for each": {"slots": 1000},
        "Rank 8 in slots for 256": {"rank": 8, "max_rank": 256, "slots": 48},
        "Rush hour": {"load": 60.0, "slots": 16},
    },
    sweep=sweep,
    figure=figure,
    detail=detail,
    tabs=("How long clients wait", "What adapters cost"),
    verdict=verdict,
    command=command,
    challenges=CHALLENGES,
    starts=lambda state: not state.refused,
    mends=("max_rank", "slots", "rank", "gpu", "model"),
    guess=GUESS,
    own={
        "table": "decides which adapter is in which slot",
        "admit": "decides which waiting request may start",
    },
)


def show(**knobs: Any) -> Live:
    """Show the widget; `table=` and `admit=` take your parts from exercise 12."""
    return notebook_widget(SPEC, **knobs)
