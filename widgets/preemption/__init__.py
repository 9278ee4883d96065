"""Lesson 11's widget: a pool that is too small, who loses its blocks, and what becomes of those.

The engine's own scheduler decides every step, on a virtual clock; a step's time is that of `minivllm_simulate.layouts`,
and a copy's that of `minivllm_lab.preemption.costs`. What is left out: tokenizer, event loop, sockets, and the prefix
cache.

The picture in the lesson's text: `uv run python -P -m widgets preemption lessons/figures/11_cliff.svg`
"""

from __future__ import annotations

import shlex
from typing import Any

from minivllm_simulate.known_models import CONFIGS
from widgets.preemption.figure import cause_words, figure, micro
from widgets.preemption.runs import BLOCK_SIZE, BUDGET, PLACES, SPREAD, Point
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
from widgets.shell.knobs import choice, steps
from widgets.shell.lesson_widget import LessonWidget
from widgets.shell.plot import counted, seconds, tokens
from widgets.shell.spec import Challenge, Guess, Progress, Spec, Verdict

ONLY_JUST = 0.9
"""Beyond this share of what is allowed, a little more load is too much."""
LITTLE_WASTE = 0.15
"""Of the second challenge."""
STEP = 2.0
"""Two pools that are no further apart than this have the edge between them: places of the axis are less."""


def verdict(state: State) -> Verdict:
    """What this pool means for who waits, in one line."""
    where = f"with a pool of {state.pool:,} tokens"
    if found := state.not_served(where, "Your function takes other victims", _figures):
        return found
    cause, point = state.cause(state.pool), state.points[state.pool]
    took = f"{SHARE:.0%} are answered within {seconds(state.latency(state.pool))}"
    said = f"{took}; {_lost(state)} {crossover_words(state)}"
    if cause:
        why = cause_words(state, cause, state.pool)
        return Verdict(f"{why[0].upper()}{why[1:]}. {said}", "broken")
    used = max(state.latency(state.pool) / state.limit, state.serving.load / state.capacity[state.pool])
    if used > ONLY_JUST or point.preemptions:
        return Verdict(f"In time, but {'only just' if used > ONLY_JUST else 'at a price'}: {said}", "tight")
    return Verdict(f"In time: {said}", "fine")


def _lost(state: State) -> str:
    """What was lost to preemptions."""
    point = state.points[state.pool]
    if not point.preemptions:
        return "nobody is preempted."
    times = counted(point.preemptions, "preemption")
    if state.serving.policy == "recompute":
        return f"{times} cost {point.recomputed:,} tokens, {point.wasted:.0%} of the work."
    return f"{times} copy {point.copied:,} blocks, {point.copying / point.seconds:.1%} of the time."


def crossover_words(state: State) -> str:
    """Which way with a victim costs less, by the formula without attention, in which its length cancels."""
    found, link = state.serving.crossover, state.serving.link.name
    both = f"{micro(found.recompute)} a token to compute it again, {micro(found.swap)} to swap it over {link}"
    if found.copying_wins:
        return f"Swapping costs less: {both}."
    return f"Computing again costs less: {both}."


def _figures(point: Point) -> str:
    """What other victims than the engine's change."""
    lost = f"{counted(point.preemptions, 'preemption')}, {point.recomputed:,} tokens computed again"
    return f"{lost}, {SHARE:.0%} within {seconds(point.latency(SHARE))}"


def command(state: State) -> str:
    """The server, and the load on it."""
    serving = state.serving
    name = shlex.quote(next(name for name in CONFIGS if name.endswith(f"/{serving.name}")))
    notes = []
    if serving.policy != "recompute":
        notes.append("# Swap was V0's (--swap-space). Today a tier of host memory: --kv-offloading-size GiB.")
    if serving.rule not in ("last in", "worst priority"):
        notes.append("# vLLM has no flag for this victim: the last one in goes, or the worst priority.")
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
            f"--max-model-len {serving.longest} --max-num-seqs {PLACES} --max-num-batched-tokens {BUDGET} "
            f"--no-enable-prefix-caching{policy}{whole}",
        ]
    )


# ---- the challenges


def _wanted(state: State, asked: list[tuple[bool, str]], met: bool, words: str, mend: str) -> Progress:
    """`asked` is what the goal fixes, the first wrong one is said; `mend` is the advice where all that is right."""
    wrong = next((said for is_wrong, said in asked if is_wrong), "")
    if wrong:
        return Progress(False, words, wrong)
    if state.refused:
        return Progress(False, words, f"Pool, GPU, Model: the engine does not start: {state.refusals[state.pool]}.")
    if not state.known:
        return Progress(False, words, "The requests are being served.")
    return Progress(met, words, "" if met else mend)


def _lengths_and_model(state: State) -> list[tuple[bool, str]]:
    serving = state.serving
    return [
        (serving.name != START["model"] or serving.gpu.name != START["gpu"], "Model, GPU: Llama-3.1-8B on an H100."),
        (serving.prompt < START["prompt"], f"Prompts: {serving.prompt}, and 512 or more are asked for."),
        (serving.answer < START["answer"], f"Answers: {serving.answer}, and 512 or more are asked for."),
    ]


def _words(state: State) -> str:
    if not state.known or state.refused:
        return f"Pool {tokens(state.pool)}."
    point = state.points[state.pool]
    return (
        f"Pool {tokens(state.pool)}: {SHARE:.0%} within {seconds(state.latency(state.pool))}, {point.wasted:.1%} of "
        "the work done twice."
    )


def _edge(state: State) -> Progress:
    smaller = [one for one in state.run if one < state.pool]
    next_one = max(smaller, default=None)
    near = next_one is not None and state.pool / next_one <= STEP
    good = state.known and not state.refused and not state.cause(state.pool)
    met = bool(good and near and next_one and state.cause(next_one))
    asked = [
        *_lengths_and_model(state),
        (state.serving.load < START["load"], f"Load: {state.serving.load:g}, and 14 or more are asked for."),
        (state.limit > START["limit"], f"Answered in: {seconds(state.limit)}, and 10 s is asked for."),
    ]
    mend = "Pool: this one serves the load, and so does the next smaller one. Less."
    if not good:
        mend = "Pool: too small for this load. More."
    elif not near:
        mend = "Pool: what a smaller one does is not known yet."
    return _wanted(state, asked, met, _words(state), mend)


def _chunk(state: State) -> Progress:
    serving = state.serving
    asked = [
        *_lengths_and_model(state),
        (serving.admission != "chunk", "Admitted if: the first chunk fits is asked for."),
        (serving.policy != "recompute", "A victim is: computed again is asked for."),
        (state.pool > 32768, f"Pool: {tokens(state.pool)}, and 32K or less is asked for."),
        (serving.load < 8, f"Load: {serving.load:g}, and 8 or more are asked for."),
    ]
    known = state.known and not state.refused
    met = known and not state.own and state.points[state.pool].wasted <= LITTLE_WASTE
    mend = "Victim: what it had computed is lost. Who loses least?"
    if known and state.points[state.pool].wasted > 3 * LITTLE_WASTE and serving.rule == "least computed":
        mend = "Pool, Load: whoever is the victim, this load is too much for this pool."
    return _wanted(state, asked, met, _words(state), mend)


def _swap(state: State) -> Progress:
    serving, found = state.serving, state.serving.crossover
    asked = [
        (serving.gpu.name != "B200", "GPU: a B200 is asked for, which computes faster than the others."),
        (serving.name != START["model"], "Model: Llama-3.1-8B is asked for."),
        (serving.link.name != "PCIe 5", "Link: PCIe 5 is asked for."),
    ]
    words = f"Out and back {micro(found.swap)} a token, computed again {micro(found.recompute)}."
    mend = "A victim is: it is not swapped at all." if serving.policy == "recompute" else (
        f"A victim is: {serving.pieces.of_block(serving.model)} copies a block cost more than their bytes. Larger "
        "pieces."
    )  # fmt: skip
    wrong = next((said for is_wrong, said in asked if is_wrong), "")
    met = not wrong and serving.policy != "recompute" and found.copying_wins
    return Progress(met, words, "" if met else wrong or mend)


CHALLENGES = (
    Challenge(
        "Find the cliff's edge: the smallest pool of the axis that serves the load of the start, or more, with 99 % of "
        "the answers within 10 s.",
        _edge,
        "The edge is where the load fills the pool: the requests that are in the engine at once (Little's law), times "
        "what each holds.",
    ),
    Challenge(
        "Admit a request as soon as its first chunk fits, with a pool of 32K tokens and 8 requests a second or more. "
        "Compute victims again, and yet do no more than 15 % of the work twice.",
        _chunk,
        "What a victim loses is what it had computed: take the one with the least. vLLM admits a request only if all "
        "of it fits.",
    ),
    Challenge(
        "A B200 computes a token again in 14 µs. Swap over PCIe 5 in such a way that it costs less.",
        _swap,
        "It was not the link that made swap slow in 2023, but 64 small copies for each block in place of one.",
    ),
)
GUESS = Guess(
    "This load fills 58K tokens on average. With a pool of 24K, how much of the GPU's work is done twice?",
    ("next to nothing", "about a tenth", "over a quarter", "over a half"),
    2,
    "Requests grow by their answers after they are admitted, and more begin than the pool can finish: 27 % of all "
    "tokens are computed again. And the queue grows, since the pool is full.",
)

# ---- the knobs

KNOBS = {
    "The pool": {
        "pool": steps(
            "Pool", [(tokens(one), one) for one in POOLS], START["pool"], "tokens that the KV cache holds"
        ),
        "rule": choice(
            "Victim",
            [("last in", "last in"), ("worst priority", "worst priority"), ("first in", "first in"),
             ("most blocks", "most blocks"), ("fewest tokens left", "fewest left"),
             ("least computed", "least computed")],
            START["rule"], "who loses its blocks: the first two are vLLM's, by its policy",
        ),
        "policy": choice(
            "A victim is",
            [("computed again", "recompute"), ("swapped, small pieces", "small"), ("swapped, large pieces", "large")],
            START["policy"], "vLLM's way; V0's swap, a copy for each layer's keys and values; one copy for a block",
        ),
        "admission": choice(
            "Admitted if", [("all of it fits", "whole"), ("the first chunk fits", "chunk")],
            START["admission"], "scheduler_reserve_full_isl, on and off",
        ),
        "link": choice("Link", list(HOST_LINKS), START["link"], "to the host that victims are swapped to"),
    },
    "What is asked": {
        "limit": steps(
            "Answered in", [(seconds(one), one) for one in LIMITS], START["limit"],
            f"the service level: {SHARE:.0%} of the requests, to the last token",
        ),
        "load": steps("Load", [(f"{one:g}", one) for one in LOADS], START["load"], "requests a second"),
        "prompt": steps("Prompts", [(tokens(one), one) for one in PROMPTS], START["prompt"], "tokens, on average"),
        "answer": steps("Answers", [(tokens(one), one) for one in ANSWERS], START["answer"], "tokens, on average"),
        "model": choice("Model", list(MODELS), START["model"], "what is served, in 16 bits"),
        "gpu": choice("GPU", list(GPUS), START["gpu"], "whose memory and rates"),
    },
}  # fmt: skip

SPEC = Spec(
    name="preemption",
    title="When the pool is full, who goes?",
    lead="Drag the pool: below the edge, requests are thrown out, come back, and are computed again.",
    knobs=KNOBS,
    presets={
        "A third of the pool": {"pool": 16384},
        "First chunk admits": {"pool": 24576, "admission": "chunk"},
        "Swap, slow link": {"pool": 32768, "policy": "large", "link": "10 Gb/s", "load": 8.0},
        "Rush hour": {"load": 25.0},
    },
    sweep=sweep,
    figure=figure,
    verdict=verdict,
    command=command,
    challenges=CHALLENGES,
    guess=GUESS,
    own={"victim": "chooses who of those that run loses its blocks"},
)


def show(**knobs: Any) -> LessonWidget:
    """The widget; `victim=` is your own from exercise 11."""
    return LessonWidget(SPEC, **knobs)
