"""Lesson 10's widget: a step's token budget, too small for long prompts or too large for everybody else.

The engine's own scheduler decides every step, on a virtual clock; a step's time is that of `minivllm_simulate.layouts`.
What is left out: tokenizer, event loop, sockets.

The picture in the lesson's text: `uv run python -P -m widgets chunked_prefill lessons/figures/10_budget.svg`
"""

from __future__ import annotations

import shlex
from typing import Any

from minivllm_simulate.known_models import CONFIGS
from minivllm_simulate.load_sweep import within
from widgets.chunked_prefill.figure import cause_words, figure
from widgets.chunked_prefill.runs import ANSWER, CHAT, PLACES, Point
from widgets.chunked_prefill.state import (
    ALL_GAPS,
    BUDGETS,
    CLIENTS,
    GAPS,
    GPUS,
    LOADS,
    LONG_SHARES,
    MODELS,
    PROMPTS,
    START,
    THRESHOLDS,
    TTFTS,
    State,
    sweep,
)
from widgets.shell.knobs import choice, steps
from widgets.shell.lesson_widget import LessonWidget
from widgets.shell.plot import seconds, tokens
from widgets.shell.spec import Challenge, Guess, Progress, Spec, Verdict

ONLY_JUST = 0.9
"""Beyond this share of what is allowed, a little more load is too much."""
STALL, STALLED = 0.1, 0.3
"""Seconds and share of the clients of the third challenge."""


def share(value: float) -> str:
    """A share in per cent, never rounded to nothing or to all."""
    if 0 < value < 0.01 or 0.99 < value < 1:
        return f"{min(max(value, 1e-4), 1 - 1e-4):.2%}"
    return f"{value:.0%}"


def verdict(state: State) -> Verdict:
    """What this budget means for who waits, in one line."""
    where = f"with steps of {state.budget:,} tokens at most"
    if found := state.not_served(where, "Your functions make other steps", _figures):
        return found
    causes, first = state.causes(state.budget), seconds(state.first(state.budget))
    if causes:
        return Verdict(" ".join(_wrong(state, cause) for cause in causes), "broken")
    point = state.points[state.budget]
    said = f"{CLIENTS:.0%} of the long prompts have their first token within {first}, and {_gaps(state)}."
    if point.longest_gap(CLIENTS) > state.gap:
        hidden = f"{share(point.stalled(state.gap))} of the clients wait longer, up to {seconds(point.longest[-1])}"
        return Verdict(f"Both are met, if all gaps are counted together: {said} Yet {hidden}.", "tight")
    used = max(state.first(state.budget) / state.ttft, state.waited(state.budget) / state.gap)
    return Verdict(
        f"Both are met{', but only just' * (used > ONLY_JUST)}: {said}", "tight" if used > ONLY_JUST else "fine"
    )


def _gaps(state: State) -> str:
    point = state.points[state.budget]
    if state.judged == "gaps":
        return f"{ALL_GAPS:.0%} of all gaps are within {seconds(point.gap(ALL_GAPS))}"
    return f"{CLIENTS:.0%} of the clients never wait over {seconds(point.longest_gap(CLIENTS))} for a token"


def _wrong(state: State, cause: str) -> str:
    """What a cause does to clients."""
    point, first = state.points[state.budget], seconds(state.first(state.budget))
    if cause == "stall":
        whose = f"{share(point.gaps_over(state.gap))} of all gaps are"
        if state.judged == "clients":
            whose = f"{share(point.stalled(state.gap))} of the clients have a gap of"
        longest = f"the longest is {seconds(point.longest[-1])}"
        return f"Stalls: {whose} over {seconds(state.gap)}, {longest}."
    why = cause_words(state, cause, state.budget)
    said = f"{why[0].upper()}{why[1:]}."
    if cause == "queue":
        return f"{said} {state.serving.load:g} a second come."
    return f"{said} {CLIENTS:.0%} have their first token within {first}, and {seconds(state.ttft)} is asked."


def _figures(point: Point) -> str:
    """What other functions than the engine's change."""
    begins = seconds(within(point.long_ttft, CLIENTS))
    return f"{seconds(point.longest[-1])} is the longest gap, and long prompts begin within {begins}"


def command(state: State) -> str:
    """The server, and the two loads on it."""
    serving = state.serving
    name = shlex.quote(next(name for name in CONFIGS if name.endswith(f"/{serving.name}")))
    cap = f" --long-prefill-token-threshold {serving.threshold}" * bool(serving.threshold)
    whole = " --no-enable-chunked-prefill" * (serving.policy != "mixed")
    loads = (("chats", CHAT, 1 - serving.share), ("long prompts", serving.prompt, serving.share))
    bench = [
        f"# {what}: vllm bench serve --model {name} --dataset-name random --random-input-len {length} "
        f"--random-output-len {ANSWER} --ignore-eos --request-rate {part * serving.load:.3g} "
        f"--goodput ttft:{state.ttft * 1e3:g}"
        for what, length, part in loads
    ]
    first = ["# Prefill first was V0's. Today's vLLM has no flag for it."] if serving.policy == "first" else []
    return "\n".join(
        [
            f"# On one {serving.gpu.name}{'; it refuses to start' * state.refused}. Two loads at once:",
            *bench,
            *first,
            f"vllm serve {name} --max-num-batched-tokens {state.budget} --max-num-seqs {PLACES} "
            f"--max-model-len {serving.longest}{cap}{whole}",
        ]
    )


# ---- the challenges


def _wanted(state: State, asked: list[tuple[bool, str]], met: bool, words: str, mend: str) -> Progress:
    """`asked` is what the goal fixes, the first wrong one is said; `mend` is the advice where all that is right."""
    serving = state.serving
    fixed = [
        (serving.name != START["model"] or serving.gpu.name != START["gpu"], "Model, GPU: Llama-3.1-8B on an H100."),
        (serving.longest < START["prompt"], f"Long prompt: {tokens(serving.longest)}, and 8K or more is asked for."),
        (serving.share < START["long"], f"Long ones: {serving.share:.0%}, and 10% or more are asked for."),
        (serving.load < START["load"], f"Load: {serving.load:g} a second, and 10 or more are asked for."),
        *asked,
        (
            state.refused,
            "Prompts are, Budget: the engine does not start. Let prompts be cut, or make steps larger.",
        ),
    ]
    wrong = next((said for is_wrong, said in fixed if is_wrong), "")
    if wrong:
        return Progress(False, words, wrong)
    if not state.known:
        return Progress(False, words, "The requests are being served.")
    return Progress(met, words, "" if met else mend)


def _words(state: State) -> str:
    if not state.known or state.refused:
        return f"Budget {state.budget:,}."
    point = state.points[state.budget]
    return (
        f"Budget {state.budget:,}: {CLIENTS:.0%} of the clients within {seconds(point.longest_gap(CLIENTS))}, "
        f"{ALL_GAPS:.0%} of all gaps within {seconds(point.gap(ALL_GAPS))}; long prompts begin within "
        f"{seconds(state.first(state.budget))}."
    )


def _valley(state: State) -> Progress:
    asked = [
        (state.judged != "clients", "Judged by: each client's longest gap is asked for."),
        (state.gap > 0.015, f"Next token in: {seconds(state.gap)}, and 15 ms is asked for."),
        (state.ttft > 0.5, f"Long ones' first: {seconds(state.ttft)}, and 500 ms is asked for."),
        (state.serving.threshold > 0, "Threshold: find a budget without one."),
    ]
    met = state.known and not state.refused and not state.causes(state.budget)
    stalls = state.known and not state.refused and state.waited(state.budget) > state.gap
    mend = (
        f"Budget: {state.budget:,} tokens in a step take too long for everybody else in it. Fewer."
        if stalls
        else f"Budget: {state.budget:,} tokens a step are too few for a long prompt. More."
    )
    return _wanted(state, asked, met, _words(state), mend)


def _roomy(state: State) -> Progress:
    asked = [
        (state.budget < 4096, f"Budget: {state.budget:,}, and 4,096 or more is asked for."),
        (state.judged != "clients", "Judged by: each client's longest gap is asked for."),
        (state.gap > 0.025, f"Next token in: {seconds(state.gap)}, and 25 ms is asked for."),
        (state.ttft > 0.5, f"Long ones' first: {seconds(state.ttft)}, and 500 ms is asked for."),
    ]
    known = state.known and not state.refused
    chats = within(state.points[state.budget].chat_ttft, CLIENTS) if known else 0.0
    met = known and not state.causes(state.budget) and chats <= 0.025
    words = f"{_words(state)} Chats' first token: {seconds(chats)}." if known else _words(state)
    mend = (
        "Threshold: one long prompt takes whole steps, and whoever comes waits until it is done. Cap what one request "
        "gets of a step, which leaves the rest to others; but not so low that its own first token is late."
    )
    return _wanted(state, asked, met, words, mend)


def _blind(state: State) -> Progress:
    known = state.known and not state.refused
    point = state.points[state.budget] if known else None
    stalled = point.stalled(STALL) if point else 0.0
    causes = state.causes(state.budget) if known else []
    words = f"{_words(state)} {share(stalled)} of the clients have a gap of over {seconds(STALL)}."
    asked = [(state.gap > 0.025, f"Next token in: {seconds(state.gap)}, and 25 ms is asked for.")]
    mend = "Judged by: this figure counts every client that has a long gap. Which one does not?"
    if stalled < STALLED:
        mend = "Budget: too few clients have a long gap. Let a step take a whole prompt."
    elif state.judged == "gaps":
        mend = "Budget: more than one gap in a hundred is long. Make the long gaps fewer, though each is longer."
    return _wanted(state, asked, known and stalled >= STALLED and not causes, words, mend)


CHALLENGES = (
    Challenge(
        "Start again, and keep the load. Find a budget with which 90 % of the clients wait 15 ms at most for a next "
        "token, and 90 % of the long prompts 500 ms for their first.",
        _valley,
        "Between too small and too large lies a valley: a few hundred tokens a step, near the GPU's knee.",
    ),
    Challenge(
        "Give steps 4,096 tokens or more, and yet let nobody wait over 25 ms: 90 % of the clients for a next token, 90 "
        "% of the chats for their first one. Long prompts still begin within 500 ms.",
        _roomy,
        "The budget is everybody's, the threshold is one request's. A cap leaves room in each step for who comes.",
    ),
    Challenge(
        "Fool this widget: let it say that all is well, a next token within 25 ms, while 30 % of the clients have "
        "once waited over 100 ms. The load as at the start, or more.",
        _blind,
        "A stall is one gap among hundreds. Ask how many clients had one, or how long the longest was.",
    ),
)
GUESS = Guess(
    "90 % of these clients may wait 25 ms at most for a next token. Up to which budget is that kept?",
    ("about 200", "about 850", "about 4,000", "about 16,000"),
    1,
    "Beyond the knee a step takes as long as its arithmetic: in the middle of a long prompt 28 ms for 1,024 tokens, "
    "and 55 ms for 2,048.",
)

# ---- the knobs

LIMITS = [(seconds(limit), limit) for limit in GAPS]
FIRSTS = [(seconds(limit), limit) for limit in TTFTS]
KNOBS = {
    "The server": {
        "budget": steps(
            "Budget", [(f"{one:,}", one) for one in BUDGETS], START["budget"],
            "tokens of a step: max_num_batched_tokens",
        ),
        "threshold": steps(
            "Threshold", [("off" if not one else f"{one:,}", one) for one in THRESHOLDS], START["threshold"],
            "of a step, for one request that is not alone: long_prefill_token_threshold",
        ),
        "policy": choice(
            "Prompts are", [("cut, beside decodes", "mixed"), ("not cut", "whole"), ("first, as in V0", "first")],
            START["policy"], "chunked prefill; without it; and a step with prompts has no decodes",
        ),
    },
    "What is asked": {
        "gap": steps("Next token in", LIMITS, START["gap"], "the service level: between two tokens"),
        "ttft": steps("Long ones' first", FIRSTS, START["ttft"], f"the service level: for {CLIENTS:.0%} of them"),
        "judged": choice(
            "Judged by", [("each client's longest", "clients"), ("99% of all gaps", "gaps")], START["judged"],
            f"whose gaps must be short: the longest of {CLIENTS:.0%} of the clients, or most of all",
        ),
    },
    "The load": {
        "load": steps("Load", [(f"{one:g}", one) for one in LOADS], START["load"], "requests a second"),
        "long": steps("Long ones", [(f"{one:.0%}", one) for one in LONG_SHARES], START["long"], "of the requests"),
        "prompt": steps("Long prompt", [(tokens(one), one) for one in PROMPTS], START["prompt"], "tokens, answer too"),
        "model": choice("Model", list(MODELS), START["model"], "what is served, in 16 bits"),
        "gpu": choice("GPU", list(GPUS), START["gpu"], "whose memory and rates"),
    },
}  # fmt: skip

SPEC = Spec(
    name="chunked_prefill",
    title="How large a bite of a long prompt?",
    lead="Drag the budget: too small, and long prompts wait; too large, and everybody else does.",
    knobs=KNOBS,
    presets={
        "Too small": {"budget": 64},
        "Whole prompts": {"budget": 16384},
        "Prefill first": {"policy": "first", "budget": 16384, "load": 20.0},
        "Rush hour": {"load": 40.0, "budget": 256},
    },
    sweep=sweep,
    figure=figure,
    verdict=verdict,
    command=command,
    challenges=CHALLENGES,
    guess=GUESS,
    own={
        "chunk_limit": "caps what one request gets of a step",
        "running_tokens": "says what a running request gets of a step",
        "admitted_tokens": "says what a request that waits gets of a step",
    },
)


def show(**knobs: Any) -> LessonWidget:
    """The widget; `chunk_limit=`, `running_tokens=` and `admitted_tokens=` are your own from exercise 10."""
    return LessonWidget(SPEC, **knobs)
