"""Show what happens when the KV pool is too small: which request is preempted, and what that costs.

The engine's own scheduler decides every step, on a virtual clock. `minivllm_simulate.layouts`
models the time of a step, and `minivllm_lab.preemption.costs` that of a copy. The tokenizer, the
event loop, sockets and the prefix cache are left out.

Draw the lesson's figure with `uv run python -P -m widgets preemption lessons/figures/11_cliff.svg`.
"""

from __future__ import annotations

import shlex
from typing import Any

from minivllm_simulate.known_models import CONFIGS
from widgets.preemption.figure import cause_words, figure
from widgets.preemption.pool import micro
from widgets.preemption.runs import BLOCK_SIZE, BUDGET, SEATS, SPREAD, Point, Serving
from widgets.preemption.state import (
    ANSWERS,
    GPUS,
    HOST_LINKS,
    LIMITS,
    LOADS,
    MODELS,
    POOLS,
    PROMPTS,
    SHARE,
    START,
    State,
    sweep,
)
from widgets.shell.advice import Rule, at_least, at_most, choose, progress, use
from widgets.shell.knobs import choice, labelled, steps
from widgets.shell.live import Live
from widgets.shell.notebook import notebook_widget
from widgets.shell.plot import counted, percent, seconds, tokens
from widgets.shell.spec import Challenge, Guess, Progress, Spec, Verdict

ONLY_JUST = 0.9
"""The share of a limit from which a little more load is too much."""
LITTLE_WASTE = 0.15
"""The share of tokens computed twice that the second challenge allows."""
STEP = 2.0
"""The largest ratio of two pools that the first challenge accepts as neighbours."""


def verdict(state: State) -> Verdict:
    """Say in one or two sentences whether this pool serves the load, and what preemption costs."""
    where = f"with a pool of {state.pool:,} tokens"
    if unserved := state.not_served(where, "Your function picks different victims than the engine.", _figures):
        return unserved
    cause = state.cause(state.pool)
    point = state.points[state.pool]
    took = f"{percent(SHARE)} of the requests finish within {seconds(state.latency(state.pool))}"
    if cause:
        why = cause_words(state, cause, state.pool)
        words = f"{why[0].upper()}{why[1:]}; {_lost(state) if cause == 'queue' else took}. {_cheaper(state)}"
        return Verdict(words, "broken")
    words = f"{took}; {_lost(state)}. {_cheaper(state)}"
    used = state.strain(state.pool)
    if used > ONLY_JUST or point.preemptions:
        return Verdict(f"In time, but {'only just' if used > ONLY_JUST else 'at a price'}: {words}", "tight")
    return Verdict(f"In time: {words}", "fine")


def _lost(state: State) -> str:
    point = state.points[state.pool]
    if not point.preemptions:
        return "no request is preempted"
    what = "the time goes into copies" if point.copied else "all tokens are computed twice"
    return f"{percent(point.lost)} of {what}"


def _cheaper(state: State) -> str:
    """Say whether recomputing or swapping is cheaper, by the formula without attention, in which
    the length cancels out.
    """
    wins, link = state.serving.crossover.copying_wins, state.serving.link.name
    return f"Swapping is cheaper over {link}." if wins else f"Recomputing is cheaper than swapping over {link}."


def _figures(point: Point) -> str:
    lost = f"{counted(point.preemptions, 'preemption')}, {point.recomputed:,} tokens recomputed"
    return f"{lost}, {percent(SHARE)} within {seconds(point.latency(SHARE))}"


def command(state: State) -> str:
    """Write the server's command, with that of the load as a comment."""
    serving = state.serving
    name = shlex.quote(next(name for name in CONFIGS if name.endswith(f"/{serving.name}")))
    notes = []
    if serving.policy != "recompute":
        notes.append("# Swap was in V0 (--swap-space). Today: a host-memory tier, --kv-offloading-size GiB.")
    if serving.rule not in ("last in", "worst priority"):
        notes.append("# vLLM has no flag for this victim: it preempts the last one in, or the worst priority.")
    whole = " --no-scheduler-reserve-full-isl" * (serving.admission == "chunk")
    policy = " --scheduling-policy priority" * (serving.rule == "worst priority")
    return "\n".join(
        [
            f"# On one {serving.gpu.name}{'; it refuses to start' * state.refused}. The load:",
            f"# vllm bench serve --model {name} --dataset-name random --random-input-len {serving.prompt} "
            f"--random-output-len {serving.answer} --random-range-ratio {SPREAD:g} --ignore-eos "
            f"--request-rate {serving.load:g} --goodput e2el:{state.limit * 1e3:g}",
            *notes,
            f"vllm serve {name} --num-gpu-blocks-override {state.pool // BLOCK_SIZE + 1} --block-size {BLOCK_SIZE} "
            f"--max-model-len {serving.longest} --max-num-seqs {SEATS} --max-num-batched-tokens {BUDGET} "
            f"--no-enable-prefix-caching{policy}{whole}",
        ]
    )


# ---- the challenges


def _progress(state: State, rules: list[Rule], met: bool, advice: str) -> Progress:
    why = state.refusals.get(state.pool, "")
    return progress(_words(state), *rules, *state.outcome_rules(met, advice, f"Let the engine start: {why}."))


def _lengths_and_model(serving: Serving) -> list[Rule]:
    as_at_first = serving.name == START["model"] and serving.gpu.name == START["gpu"]
    return [
        use("Llama-3.1-8B on an H100", as_at_first),
        at_least("the prompts", serving.prompt, START["prompt"]),
        at_least("the answers", serving.answer, START["answer"]),
    ]


def _words(state: State) -> str:
    if not state.known or state.refused:
        return f"Pool {tokens(state.pool)}."
    point = state.points[state.pool]
    return (
        f"Pool {tokens(state.pool)}: {percent(SHARE)} within {seconds(state.latency(state.pool))}, "
        f"{percent(point.wasted)} of all tokens computed twice."
    )


def _edge(state: State) -> Progress:
    next_one = max((pool for pool in state.run if pool < state.pool), default=None)
    near = next_one is not None and state.pool / next_one <= STEP
    good = state.known and not state.refused and not state.cause(state.pool)
    met = bool(good and near and next_one and state.cause(next_one))
    rules = [
        *_lengths_and_model(state.serving),
        at_least("the load", state.serving.load, START["load"]),
        at_most("the latency limit", state.limit, START["limit"], seconds),
    ]
    advice = "Lower the pool: the next smaller one serves this load too."
    if not good:
        advice = "Raise the pool: it is too small for this load."
    elif not near:
        advice = "Wait until a smaller pool has been run."
    return _progress(state, rules, met, advice)


def _chunk(state: State) -> Progress:
    serving = state.serving
    rules = [
        *_lengths_and_model(serving),
        choose("the first chunk fits", "Admit if", serving.admission == "chunk"),
        choose("is recomputed", "Victim then", serving.policy == "recompute"),
        at_most("the pool", state.pool, 32768, tokens),
        at_least("the load", serving.load, 8),
    ]
    known = state.known and not state.refused
    met = known and not state.own and state.points[state.pool].wasted <= LITTLE_WASTE
    advice = "Change the victim: it loses all it has computed. Which request loses least?"
    if known and state.points[state.pool].wasted > 3 * LITTLE_WASTE and serving.rule == "least computed":
        advice = "Raise the pool or lower the load: no choice of victim saves this pool."
    return _progress(state, rules, met, advice)


def _swap(state: State) -> Progress:
    serving, crossover = state.serving, state.serving.crossover
    copies = serving.pieces.of_block(serving.model)
    larger = choose("is swapped, large pieces", "Victim then", chosen=False)
    return progress(
        f"Swapping a token out and back takes {micro(crossover.swap)}, recomputing it {micro(crossover.recompute)}.",
        use("a B200, the fastest GPU here", serving.gpu.name == "B200"),
        use("Llama-3.1-8B", serving.name == START["model"]),
        use("PCIe 5 as the link", serving.link.name == "PCIe 5"),
        choose("is swapped, small pieces", "Victim then", serving.policy != "recompute"),
        (not crossover.copying_wins, f"{larger[1]} With small ones, {copies} copies per block take too long."),
    )


CHALLENGES = (
    Challenge(
        "Find the edge: the smallest pool on the axis that handles at least 14 requests a second, with "
        "99 % of them done within 10 s.",
        _edge,
        "The edge is where the load fills the pool: the requests that run at once, by Little's law, times the tokens "
        "that each holds.",
    ),
    Challenge(
        "Admit each request as soon as its first chunk fits, with a pool of at most 32K tokens and at least 8 requests "
        "a second. Recompute the victims, and still compute at most 15 % of all tokens twice.",
        _chunk,
        "A victim loses whatever it has computed, so preempt the one with the least. vLLM avoids the problem: it "
        "admits a request only if all of it fits.",
    ),
    Challenge(
        "A B200 recomputes a token in 14 µs. Make swapping over PCIe 5 cheaper than that.",
        _swap,
        "In 2023 it was not the link that made swapping slow, but 64 small copies for each block instead of one.",
    ),
)
GUESS = Guess(
    "This load needs 57K tokens on average, but the pool holds 32K. What share of all tokens is computed twice?",
    ("next to nothing", "about a tenth", "about a quarter", "over half"),
    2,
    "Requests grow after they are admitted, so more start than the pool can finish: 24 % of all tokens are computed "
    "twice. And because the pool is full, the queue keeps growing.",
)

# ---- the knobs

KNOBS = {
    "The pool": {
        "pool": steps("Pool", labelled(POOLS, tokens), START["pool"], "tokens that the KV cache holds"),
        "rule": choice(
            "Victim",
            [("last in", "last in"), ("worst priority", "worst priority"), ("first in", "first in"),
             ("most blocks", "most blocks"), ("fewest tokens left", "fewest left"),
             ("least computed", "least computed")],
            START["rule"], "which request loses its blocks; the first two are vLLM's policies",
        ),
        "policy": choice(
            "Victim then",
            [("is recomputed", "recompute"), ("is swapped, small pieces", "small"),
             ("is swapped, large pieces", "large")],
            START["policy"], "as in vLLM; V0's swap, with a copy per layer for keys and values; one copy per block",
        ),
        "admission": choice(
            "Admit if", [("all of it fits", "whole"), ("the first chunk fits", "chunk")],
            START["admission"], "scheduler_reserve_full_isl, on or off",
        ),
        "link": choice("Link", list(HOST_LINKS), START["link"], "between the GPU and host memory, for swapping"),
    },
    "The load": {
        "limit": steps(
            "Latency limit", labelled(LIMITS, seconds), START["limit"],
            f"the service level: {percent(SHARE)} of the requests finish within this time",
        ),
        "load": steps("Load", labelled(LOADS, "{:g}/s".format), START["load"], "requests a second"),
        "prompt": steps("Prompts", labelled(PROMPTS, tokens), START["prompt"], "tokens, on average"),
        "answer": steps("Answers", labelled(ANSWERS, tokens), START["answer"], "tokens, on average"),
        "model": choice("Model", list(MODELS), START["model"], "served in 16 bits"),
        "gpu": choice("GPU", list(GPUS), START["gpu"], "sets memory, bandwidth and FLOP/s"),
    },
}  # fmt: skip

SPEC = Spec(
    name="preemption",
    title="When the pool is full, how many tokens are computed twice?",
    lead="Drag the pool to where the load fills it. Then choose another victim, or swap instead of recomputing.",
    knobs=KNOBS,
    presets={
        "Half the pool": {"pool": 16384},
        "First chunk admits": {"pool": 24576, "admission": "chunk"},
        "Swap, slow link": {"pool": 32768, "policy": "large", "link": "10 Gb/s", "load": 8.0},
        "Rush hour": {"load": 25.0},
    },
    sweep=sweep,
    figure=figure,
    verdict=verdict,
    command=command,
    challenges=CHALLENGES,
    starts=lambda state: not state.refused,
    mends=("pool", "gpu", "model"),
    guess=GUESS,
    own={"victim": "chooses which running request loses its blocks"},
)


def show(**knobs: Any) -> Live:
    """Show the widget; `victim=` takes your function from exercise 11."""
    return notebook_widget(SPEC, **knobs)
