"""Lesson 12's widget: a thousand adapters, and how many of them the GPU has a slot for.

The engine's own scheduler and slot table decide every step, on a virtual clock; a step's time is that of
`minivllm_simulate.layouts` with what `minivllm_lab.multi_lora.costs` adds for adapters. What is left out: reading
adapters from disk, for all of them lie in host memory.

The picture in the lesson's text: `uv run python -P -m widgets multi_lora lessons/figures/12_slots.svg`
"""

from __future__ import annotations

import shlex
from typing import Any

from minivllm_simulate.known_models import CONFIGS
from widgets.multi_lora.figure import cause_words, figure, free, gigabytes
from widgets.multi_lora.runs import ANSWER, MAX_MODEL_LEN, PLACES, PROMPT, Point
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
from widgets.shell.knobs import choice, steps
from widgets.shell.lesson_widget import LessonWidget
from widgets.shell.plot import counted, seconds
from widgets.shell.spec import Challenge, Guess, Progress, Spec, Verdict

ONLY_JUST = 0.5
"""Beyond this share of what is allowed, a little more load is too much."""


def verdict(state: State) -> Verdict:
    """What so many slots mean for who waits, in one line."""
    if found := state.not_served(f"with {counted(state.slots, 'slot')}", "Your parts do something else", _figures):
        return found
    point, cause = state.here, state.cause(state.slots)
    first = f"{CLIENTS:.0%} have their first token within {seconds(state.first(state.slots))}{_later(state)}"
    if cause:
        why = cause_words(state, cause, state.slots)
        wanted = f" About {state.wanted:.0f} adapters are wanted at once." if cause == "slots" else ""
        said = f"{why[0].upper()}{why[1:]}.{wanted}"
        return Verdict(f"{said} {first}, and {asked(state)}.", "broken")
    said = (
        f"{first}: on average {point.distinct:.2g} adapters are in use at once, and {point.hit_rate:.0%} of the "
        "requests find theirs in a slot."
    )
    just = state.in_the_end(state.slots) > ONLY_JUST * state.ttft
    return Verdict(f"{'Only just: ' * just}{said}", "tight" if just else "fine")


def _later(state: State) -> str:
    """What a run is too short to show."""
    later = state.long_wait[state.slots]
    if later <= state.first(state.slots):
        return ""
    return f" of this short run, in the long run within {seconds(later) if later < 3600 else 'hours'}"


def asked(state: State) -> str:
    """The service level."""
    return f"{seconds(state.ttft)} is asked"


def _figures(point: Point) -> str:
    """What other parts than the engine's change."""
    copies = f"{point.loads} copies into slots"
    return f"{point.distinct:.3g} adapters at once, {copies}, {point.waiting:.3g} requests waiting"


def command(state: State) -> str:
    """The server, and the load on it."""
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
            f"# On one {serving.gpu.name}{'; it refuses to start' * state.refused}. The load (it asks for all adapters "
            "equally often):",
            bench,
            f"vllm serve {name} --enable-lora --max-loras {state.slots} --max-lora-rank {serving.max_lora_rank} "
            f"--max-cpu-loras {max(serving.adapters, state.slots)} --max-num-seqs {PLACES} "
            f"--max-model-len {MAX_MODEL_LEN} --lora-modules "
            + " ".join(f"adapter-{index}=adapters/{index}" for index in range(1, min(serving.adapters, 3) + 1)),
        ]
    )


# ---- the challenges


def _wanted(state: State, asked_for: list[tuple[bool, str]], met: bool, mend: str) -> Progress:
    """`asked_for` is what the goal fixes, the first wrong one is said; `mend` is the advice where all that is right."""
    words = _words(state)
    serving = state.serving
    fixed = [
        (serving.adapters < START["adapters"], f"Adapters: {serving.adapters:,}, and 1,000 or more are asked for."),
        (serving.skew > START["skew"], f"Skew: {serving.skew:g}, and 1 or less is asked for."),
        *asked_for,
        (
            serving.rank > serving.max_lora_rank,
            f"Slots made for, Rank: rank {serving.rank} does not fit into a slot for {serving.max_lora_rank}.",
        ),
    ]
    wrong = next((said for is_wrong, said in fixed if is_wrong), "")
    if wrong:
        return Progress(False, words, wrong)
    if state.refused:
        return Progress(False, words, "Slots, Slots made for: the engine does not start. Fewer, or narrower ones.")
    if not state.known:
        return Progress(False, words, "The requests are being served.")
    return Progress(met, words, "" if met else mend)


def _words(state: State) -> str:
    taken = gigabytes(state.slots * state.serving.cost.slot_bytes)
    if not state.known or state.refused:
        return f"{counted(state.slots, 'slot')}, {taken}."
    point = state.here
    return (
        f"{counted(state.slots, 'slot')}, {taken}: {CLIENTS:.0%} within {seconds(state.first(state.slots))}, "
        f"{point.hit_rate:.0%} hits, {free(point)} of the cache free."
    )


def _enough(state: State) -> Progress:
    serving, taken = state.serving, state.slots * state.serving.cost.slot_bytes
    asked_for = [
        (serving.name != START["model"] or serving.gpu.name != START["gpu"], "Model, GPU: Llama-3.1-8B on an H100."),
        (serving.load < 40, f"Load: {serving.load:g} a second, and 40 are asked for."),
        (serving.rank < 64, f"Rank: {serving.rank}, and 64 is asked for."),
        (state.ttft > 0.2, f"First token in: {seconds(state.ttft)}, and 200 ms is asked for."),
    ]
    met = state.known and not state.refused and not state.cause(state.slots) and taken <= 20e9
    mend = (
        f"Slots made for, Slots: they take {gigabytes(taken)}, 20 GB is allowed. A slot is as large as its rank asks."
        if taken > 20e9
        else "Slots: more adapters are wanted at once than there are slots for."
    )
    return _wanted(state, asked_for, met, mend)


def _shorter(state: State) -> Progress:
    serving = state.serving
    asked_for = [
        (serving.load < 20, f"Load: {serving.load:g} a second, and 20 or more are asked for."),
        (state.slots > 8, f"Slots: {state.slots}, and 8 at most are allowed."),
        (state.ttft > 0.2, f"First token in: {seconds(state.ttft)}, and 200 ms is asked for."),
    ]
    met = state.known and not state.refused and not state.cause(state.slots)
    mend = (
        f"Model, GPU: a request stays {serving.at_once / serving.load:.2g} s, so {serving.at_once:.0f} are there at "
        "once, and their adapters with them. Let them be done sooner."
    )
    return _wanted(state, asked_for, met, mend)


def _flattered(state: State) -> Progress:
    known = state.known and not state.refused
    hits = state.here.hit_rate if known else 0.0
    late = known and state.first(state.slots) > 1
    if known and not late:
        mend = "Slots, Load: nobody waits long. More adapters must be wanted at once than there are slots."
    else:
        mend = "Slots: too many adapters come and go. With fewer slots, those get in whose adapter is there already."
    return _wanted(state, [], late and hits >= 0.8, mend)


CHALLENGES = (
    Challenge(
        "40 requests a second on the H100, for 1,000 adapters of rank 64: let 90 % have their first token within 200 "
        "ms, with slots that take 20 GB at most.",
        _enough,
        "What counts is how many are wanted at once, some 30 of 1,000, not how many exist. And a slot is as wide as "
        "max_lora_rank.",
    ),
    Challenge(
        "Keep 20 requests a second for 1,000 adapters, and 8 slots at most. Let 90 % have their first token within 200 "
        "ms all the same.",
        _shorter,
        "Adapters at once follow from requests at once, and these from how long each stays: Little's law.",
    ),
    Challenge(
        "Fool the hit rate: let over 80 % of the requests find their adapter in a slot, and yet let it take more than "
        "a second until 90 % have their first token. 1,000 adapters, skew 1 or less.",
        _flattered,
        "A hit rate counts requests when they get in. Those whose adapter has no slot stand in the queue, uncounted.",
    ),
)
GUESS = Guess(
    "20 requests a second ask for 1,000 adapters, by Zipf. How many slots until 90 % have their first token in 200 ms?",
    ("about 4", "about 17", "about 130", "all 1,000"),
    1,
    "A request stays for a second, so some 20 are there at once, and some share an adapter: about 16 adapters are "
    "wanted at once. With fewer slots than that, the queue grows.",
)

# ---- the knobs

KNOBS = {
    "The server": {
        "slots": steps("Slots", SLOTS, START["slots"], "adapters on the GPU at once: max_loras"),
        "max_rank": steps("Slots made for", [(f"rank {one}", one) for one in RANKS], START["max_rank"],
                          "how wide a slot is: max_lora_rank"),
        "model": choice("Model", list(MODELS), START["model"], "what is served, in 16 bits"),
        "gpu": choice("GPU", list(GPUS), START["gpu"], "whose memory and rates"),
    },
    "The adapters": {
        "adapters": steps("Adapters", [(f"{one:,}", one) for one in ADAPTERS], START["adapters"],
                          "how many there are, all in host memory"),
        "skew": steps("Skew", [(f"{one:g}", one) for one in SKEWS], START["skew"],
                      "Zipf's exponent: the k-th is asked for 1 / k^skew times as often as the first"),
        "rank": steps("Rank", RANKS, START["rank"], "of every adapter, on all seven linears of a layer"),
    },
    "The load": {
        "load": steps("Load", [(f"{one:g}", one) for one in LOADS], START["load"], "requests a second"),
        "ttft": steps("First token in", [(seconds(one), one) for one in TTFTS], START["ttft"],
                      f"the service level, for {CLIENTS:.0%}"),
    },
}  # fmt: skip

SPEC = Spec(
    name="multi_lora",
    title="How many adapters at once?",
    lead="Drag the slots: with fewer than are wanted at once, the queue grows beside an empty cache.",
    knobs=KNOBS,
    presets={
        "Enough": {"slots": 32},
        "One slot": {"slots": 1},
        "Rank 8 in slots for 256": {"rank": 8, "max_rank": 256, "slots": 48},
        "Rush hour": {"load": 60.0, "slots": 16},
    },
    sweep=sweep,
    figure=figure,
    verdict=verdict,
    command=command,
    challenges=CHALLENGES,
    guess=GUESS,
    own={
        "table": "says which adapter lies in which slot",
        "admit": "says who of those that wait may start",
    },
)


def show(**knobs: Any) -> LessonWidget:
    """The widget; `table=` and `admit=` are your own from exercise 12."""
    return LessonWidget(SPEC, **knobs)
