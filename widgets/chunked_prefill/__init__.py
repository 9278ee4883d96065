"""Show the trade-off in a step's token budget: too small delays long prompts, too large delays
everyone else.

The engine's own scheduler decides every step, on a virtual clock. `minivllm_simulate.layouts`
models the time of a step. The tokenizer, the event loop and sockets are left out.

Draw the lesson's figure with `uv run python -P -m widgets chunked_prefill
lessons/figures/10_budget.svg`.
"""

from __future__ import annotations

import shlex
from typing import Any

from minivllm_simulate.known_models import CONFIGS
from minivllm_simulate.load_sweep import within
from widgets.chunked_prefill.figure import budget_words, cause_words, figure
from widgets.chunked_prefill.runs import ANSWER, CHAT, SEATS, Point
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
from widgets.chunked_prefill.strip import two_digits
from widgets.shell.advice import Rule, at_least, at_most, choose, progress, use
from widgets.shell.knobs import choice, labelled, steps
from widgets.shell.live import Live
from widgets.shell.notebook import notebook_widget
from widgets.shell.plot import percent, seconds, tokens
from widgets.shell.spec import Challenge, Guess, Progress, Spec, Verdict

ONLY_JUST = 0.9
"""The share of a limit from which a little more load is too much."""
STALL, STALLED = 0.1, 0.3
"""Seconds of a long gap, and the share of clients that must have one, in the third challenge."""


def verdict(state: State) -> Verdict:
    """Say in one or two sentences whether clients get their tokens in time with this budget."""
    where = f"with steps of at most {state.budget:,} tokens"
    if unserved := state.not_served(where, "Your functions build different steps than the engine.", _figures):
        return unserved
    causes = state.causes(state.budget)
    if causes:
        return Verdict(" ".join(_cause_sentence(state, cause) for cause in causes), "broken")
    point = state.points[state.budget]
    first = seconds(state.first(state.budget))
    words = (
        f"{percent(CLIENTS)} of the long prompts have their first token within {first}, and {_waits(state, 'at most')}."
    )
    if point.longest_gap(CLIENTS) > state.gap:
        hidden = f"{percent(point.stalled(state.gap))} of the clients wait longer, up to {seconds(point.longest[-1])}"
        return Verdict(f"Both limits are met, if all gaps are counted together: {words} Yet {hidden}.", "tight")
    used = max(state.first(state.budget) / state.ttft, state.waited(state.budget) / state.gap)
    just = used > ONLY_JUST
    return Verdict(f"Both limits are met{', but only just' * just}: {words}", "tight" if just else "fine")


def _waits(state: State, bound: str) -> str:
    wait = f"{bound} {two_digits(state.waited(state.budget))}"
    if state.judged == "gaps":
        return f"{percent(ALL_GAPS)} of all gaps are {wait}"
    return f"{percent(CLIENTS)} of the clients wait {wait} for a token"


def _cause_sentence(state: State, cause: str) -> str:
    if cause == "stall":
        met = max((low for low, _ in state.stalled if low and low <= state.budget and state.complete), default=0.0)
        limit = f"{seconds(state.gap)} is met up to budget {met:,.0f}" if met else f"is {seconds(state.gap)}"
        return f"Stalls: {_waits(state, 'up to')}; the limit {'of ' * bool(met)}{limit}."
    why = cause_words(state, cause, state.budget)
    words = f"{why[0].upper()}{why[1:]}."
    if cause == "queue":
        return words
    first = seconds(state.first(state.budget))
    return f"{words} {percent(CLIENTS)} have their first token within {first}; the limit is {seconds(state.ttft)}."


def _figures(point: Point) -> str:
    first = seconds(within(point.long_ttft, CLIENTS))
    return f"the longest gap is {seconds(point.longest[-1])}, long prompts start within {first}"


def command(state: State) -> str:
    """Write the server's command, with those of the two loads as comments."""
    serving = state.serving
    name = shlex.quote(next(name for name in CONFIGS if name.endswith(f"/{serving.name}")))
    cap = f" --long-prefill-token-threshold {serving.threshold}" * bool(serving.threshold)
    whole = " --no-enable-chunked-prefill" * (serving.policy != "mixed")
    loads = (("chats", CHAT, 1 - serving.share), ("long prompts", serving.prompt, serving.share))
    bench = [
        f"# {label}: vllm bench serve --model {name} --dataset-name random --random-input-len {length} "
        f"--random-output-len {ANSWER} --ignore-eos --request-rate {part * serving.load:.3g} "
        f"--goodput ttft:{state.ttft * 1e3:g}"
        for label, length, part in loads
    ]
    first = ["# Prefill first was vLLM V0's policy; today there is no flag for it."] * (serving.policy == "first")
    served = (
        f"vllm serve {name} --max-num-batched-tokens {state.budget} --max-num-seqs {SEATS} "
        f"--max-model-len {serving.longest}{cap}{whole}"
    )
    refuses = "; it refuses to start" * state.refused
    return "\n".join([f"# On one {serving.gpu.name}{refuses}. Two loads at once:", *bench, *first, served])


# ---- the challenges


def _progress(state: State, rules: list[Rule], met: bool, words: str, advice: str) -> Progress:
    serving = state.serving
    return progress(
        words,
        use("Llama-3.1-8B on an H100", serving.name == START["model"] and serving.gpu.name == START["gpu"]),
        at_least("the long prompt", serving.longest, START["prompt"], tokens),
        at_least("the long share", serving.share, START["long"], percent),
        at_least("the load", serving.load, START["load"]),
        *rules,
        *state.outcome_rules(
            met, advice, "Cut the prompts into chunks or raise the budget: the engine does not start."
        ),
    )


def _words(state: State) -> str:
    served = state.known and not state.refused
    return budget_words(state, state.budget) if served else f"Budget {state.budget:,}."


def _valley(state: State) -> Progress:
    known = state.known and not state.refused
    small = "Raise the budget: in such small steps, a long prompt takes too long."
    large = "Lower the budget: such long steps hold up every other request in them."
    rules = [
        choose("off", "Threshold", not state.serving.threshold),
        (known and state.first(state.budget) > 0.5, small),
        (known and state.points[state.budget].longest_gap(CLIENTS) > 0.015, large),
        choose("each client's longest", "Judged by", state.judged == "clients"),
        at_most("the gap limit", state.gap, 0.015, seconds),
        at_most("the TTFT limit", state.ttft, 0.5, seconds),
    ]
    return _progress(state, rules, known and not state.causes(state.budget), _words(state), small)


def _roomy(state: State) -> Progress:
    rules = [
        at_least("the budget", state.budget, 4096),
        choose("each client's longest", "Judged by", state.judged == "clients"),
        at_most("the gap limit", state.gap, 0.025, seconds),
        at_most("the TTFT limit", state.ttft, 0.5, seconds),
    ]
    known = state.known and not state.refused
    chats = within(state.points[state.budget].chat_ttft, CLIENTS) if known else 0.0
    met = known and not state.causes(state.budget) and chats <= 0.025
    words = f"{_words(state)} Chats start within {seconds(chats)}." if known else _words(state)
    advice = (
        "Set a threshold: it caps each long prompt, so that other requests fit into the same step. Do not set it so "
        "low that the prompt's own first token is late."
    )
    return _progress(state, rules, met, words, advice)


def _blind(state: State) -> Progress:
    known = state.known and not state.refused
    point = state.points[state.budget] if known else None
    stalled = point.stalled(STALL) if point else 0.0
    causes = state.causes(state.budget) if known else []
    words = f"Budget {state.budget:,}: {percent(stalled)} of clients have a gap over {seconds(STALL)}."
    rules = [at_most("the gap limit", state.gap, 0.025, seconds)]
    advice = 'Change "Judged by": it now counts every client with a long gap. Which metric does not?'
    if stalled < STALLED:
        advice = "Raise the budget until a whole prompt fits into a step."
    elif state.judged == "gaps":
        advice = "Raise the budget: long gaps get longer, but rarer. Now more than one gap in a hundred is long."
    return _progress(state, rules, known and stalled >= STALLED and not causes, words, advice)


CHALLENGES = (
    Challenge(
        "Start again and keep the load. Find a budget where 90 % of clients wait at most 15 ms for a token, and 90 % "
        "of long prompts at most 500 ms for their first.",
        _valley,
        "Between too small and too large lies a valley: a few hundred tokens per step, near the GPU's knee.",
    ),
    Challenge(
        "Use a budget of at least 4,096 tokens. Keep 90 % of the clients' gaps and of the chats' first tokens within "
        "25 ms, and 90 % of the long prompts' first tokens within 500 ms.",
        _roomy,
        "All requests share the budget, but the threshold caps each one. So every step has room for newcomers.",
    ),
    Challenge(
        "Fool this widget: make it say that every limit is met, with gaps of at most 25 ms, while 30 % of the clients "
        "waited over 100 ms at least once, at the starting load or more.",
        _blind,
        "A stall is one gap among hundreds. So ask how many clients had one, or how long the longest was.",
    ),
)
GUESS = Guess(
    "90 % of these clients should wait at most 25 ms for the next token. Up to which budget do they?",
    ("about 200", "about 850", "about 4,000", "about 16,000"),
    1,
    "Beyond the knee, a step takes as long as its arithmetic. In the middle of a long prompt, 1,024 tokens take 28 ms, "
    "and 2,048 take 55 ms.",
)

# ---- the knobs

LIMITS = [(seconds(limit), limit) for limit in GAPS]
FIRSTS = [(seconds(limit), limit) for limit in TTFTS]
KNOBS = {
    "The server": {
        "budget": steps(
            "Budget", labelled(BUDGETS, "{:,}".format), START["budget"],
            "tokens per step: max_num_batched_tokens",
        ),
        "threshold": steps(
            "Threshold", [("off" if not limit else f"{limit:,}", limit) for limit in THRESHOLDS], START["threshold"],
            "per step, for a request that is not alone: long_prefill_token_threshold",
        ),
        "policy": choice(
            "Prefill", [("in chunks", "mixed"), ("whole prompts", "whole"), ("first, as in V0", "first")],
            START["policy"], "beside decodes; without chunks; or in steps of their own",
        ),
    },
    "The service level": {
        "gap": steps("Gap limit", LIMITS, START["gap"], "between two tokens"),
        "ttft": steps("TTFT limit", FIRSTS, START["ttft"], f"of {percent(CLIENTS)} of the long prompts"),
        "judged": choice(
            "Judged by", [("each client's longest", "clients"), ("99 % of all gaps", "gaps")], START["judged"],
            f"the longest gap of {percent(CLIENTS)} of the clients, or nearly all gaps",
        ),
    },
    "The load": {
        "load": steps("Load", labelled(LOADS, "{:g}".format), START["load"], "requests a second"),
        "long": steps("Long share", labelled(LONG_SHARES, percent), START["long"], "of the requests"),
        "prompt": steps("Long prompt", labelled(PROMPTS, tokens), START["prompt"], "tokens, including the answer"),
        "model": choice("Model", list(MODELS), START["model"], "served in 16 bits"),
        "gpu": choice("GPU", list(GPUS), START["gpu"], "memory and rates"),
    },
}  # fmt: skip

SPEC = Spec(
    name="chunked_prefill",
    title="How large a bite of a long prompt?",
    lead="Drag the budget: too small, and long prompts wait; too large, and every other client does.",
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
    starts=lambda state: not state.refused,
    mends=("budget", "policy", "prompt", "gpu", "model"),
    guess=GUESS,
    own={
        "chunk_limit": "caps one request's tokens in a step",
        "running_tokens": "decides a running request's tokens in a step",
        "admitted_tokens": "decides a waiting request's tokens in a step",
    },
)


def show(**knobs: Any) -> Live:
    """Show the widget; `chunk_limit=`, `running_tokens=` and `admitted_tokens=` take your parts
    of exercise 10.
    """
    return notebook_widget(SPEC, **knobs)
