"""Show what sharing KV heads saves, and over how many GPUs a model's KV heads can be split.

`minivllm.memory` counts memory as vLLM does at start-up, also for variants with another number of
KV heads, and `minivllm_lab.attention_heads.siblings` models the rates. Such a variant need not
exist, so the widget says nothing about the quality of its answers.

Draw the lesson's figure with `uv run python -P -m widgets attention_heads
lessons/figures/09_ranks.svg`.
"""

from __future__ import annotations

import json
import shlex
from typing import Any

from minivllm_simulate.known_models import CONFIGS, known_model
from minivllm_simulate.layouts import UTILIZATION
from widgets.attention_heads.figure import cause_words, detail, figure, kib, rank_words
from widgets.attention_heads.state import (
    CONTEXTS,
    GPUS,
    KV_HEADS,
    LATENTS,
    MODELS,
    START,
    TPS,
    WANTED,
    State,
    sweep,
)
from widgets.shell.advice import Rule, at_least, choose, progress, use
from widgets.shell.knobs import choice, labelled, steps
from widgets.shell.live import Live
from widgets.shell.notebook import notebook_widget
from widgets.shell.plot import tokens
from widgets.shell.spec import Challenge, Guess, Progress, Spec, Verdict

MANY = 3
"""How many times as many requests the third challenge requires."""


def verdict(state: State) -> Verdict:
    """Say in one or two sentences what this attention achieves on this many GPUs."""
    place = state.here
    cause = state.cause(state.tp)
    if state.wrong:
        return Verdict(f"Your rule gives wrong answers: {state.wrong}.", "broken")
    if cause == "few":
        return Verdict(f"Too few GPUs: {cause_words(state, state.tp)}. {rank_words(state)}", "broken")
    if cause == "copies":
        kept = f"every {place.copies} GPUs keep the same keys and values"
        before = f"{state.tp // 2} hold {int(state.mine.at(state.tp // 2).fits):,}"
        held = f"{state.tp} GPUs hold {int(place.fits):,}, {before}"
        return Verdict(f"Copies: {kept}. Of these requests, {held}.", "broken")
    if cause:
        why = cause_words(state, state.tp)
        return Verdict(f"It does not start: {why}.", "broken")
    fits = f"{int(place.fits):,} requests fit, at {place.tokens_per_second:,.0f} tokens a second"
    if place.copies > 1:
        spent = kib(place.kv_bytes * (state.tp - state.tp // place.copies))
        return Verdict(f"{fits}, but {spent} KiB of each token are copies. {rank_words(state)}", "tight")
    work = f"{place.intensity:.3g} operation{'s' * (place.intensity != 1)}"
    ridge = f"the GPU could do {state.hardware.ridge():.0f}"
    return Verdict(f"{fits}, with {work} for each byte read ({ridge}). {rank_words(state)}", "fine")


def command(state: State) -> str:
    """Write the server's command; a variant that was never trained runs with random weights."""
    name = shlex.quote(next(name for name in CONFIGS if name.endswith(f"/{state.model}")))
    line = (
        f"vllm serve {name} --tensor-parallel-size {state.tp} --max-model-len {state.context} "
        f"--max-num-seqs {state.wanted} --gpu-memory-utilization {UTILIZATION:g}"
    )
    refused = "; it refuses to start" * bool(state.here.refused)
    notes = [f"# On {state.tp} x {state.hardware.name}{refused}."]
    if state.latent:
        notes.append("# vLLM has no flag that gives a model a latent: this is the published model.")
    elif state.kv_heads != known_model(state.model).num_key_value_heads:
        notes.append("# It was published with another number of KV heads, so its weights are random here.")
        override = shlex.quote(json.dumps({"num_key_value_heads": state.kv_heads}))
        line += f" --load-format dummy --hf-overrides {override}"
    return "\n".join([*notes, line])


# ---- the challenges


def _progress(state: State, model: str, rules: list[Rule], met: bool, words: str, advice: str) -> Progress:
    return progress(
        words,
        use(model, state.model == model),
        use("an H100", state.hardware.name == "H100"),
        at_least("the context", state.context, 32768, tokens),
        *rules,
        (not met, advice),
    )


def _words(state: State) -> str:
    return f"{state.mine.name} on {state.tp} {state.hardware.name}: {int(state.here.fits):,} requests."


def _enough(state: State) -> Progress:
    rules = [
        choose("none", "Latent width", not state.latent),
        at_least("the KV heads", state.kv_heads, 8),
        at_least("the requests", state.wanted, 32),
    ]
    fit = int(state.here.fits) >= state.wanted
    advice = "Raise the GPUs (TP): each then keeps fewer heads, as long as there are heads to split."
    if fit:
        advice = "Lower the GPUs (TP): the requests fit on fewer, and the rest only keep copies."
    return _progress(state, "Llama-3.1-70B", rules, fit and state.tp <= 8, _words(state), advice)


def _worth(state: State) -> Progress:
    gain = state.mine.gain(64)
    words = f"{_words(state)} 64 GPUs hold {gain:.2f} times as many as 32."
    rules = [
        at_least("the GPUs (TP)", state.tp, 64),
        choose("none", "Latent width", not state.latent),
    ]
    advice = (
        f"Raise the KV heads: {state.kv_heads} cannot be split over 64 GPUs. With how many would each GPU keep its own?"
    )
    return _progress(state, "Llama-3.1-70B", rules, gain >= 2, words, advice)


def _latent(state: State) -> Progress:
    fits = state.published.at(state.tp).fits
    times = state.here.fits / fits if fits else 0.0
    words = f"{_words(state)} {f'That is {times:.2f} times what 8 KV heads hold.' if fits else ''}".strip()
    advice = (
        f"Change the GPUs (TP): the 8 KV heads are split over {state.tp}, but each GPU keeps the whole latent. On how "
        "many GPUs are the heads not split?"
    )
    rules = [at_least("the latent width", state.latent, 512)]
    return _progress(state, "Llama-3.1-8B", rules, times >= MANY, words, advice)


CHALLENGES = (
    Challenge(
        "Fit 32 requests of 32K tokens on as few H100s as possible, for Llama-3.1-70B with its 8 KV heads.",
        _enough,
        "Up to one GPU per KV head, twice the GPUs hold more than twice the requests, because weights are split too.",
    ),
    Challenge(
        "Make 64 H100s hold at least twice the requests that 32 hold, for Llama-3.1-70B and requests of 32K tokens.",
        _worth,
        "Now nothing is copied, yet no more fits than with one shared head: each GPU keeps one head anyway.",
    ),
    Challenge(
        "Make a latent of at least 512 numbers hold 3 times as many requests as the model's own 8 KV heads, for "
        "Llama-3.1-8B on H100 and requests of 32K tokens.",
        _latent,
        "A latent is the smallest cache, but it cannot be split. So models with a latent often run a whole copy of the "
        "attention on each GPU, each for different requests (data parallel), and split only their experts.",
    ),
)
GUESS = Guess(
    "Eight of these GPUs hold 42 requests of 32K tokens, one KV head on each. How many do sixteen hold?",
    ("42", "about 50", "about 65", "84"),
    1,
    "Sixteen GPUs keep each of the 8 heads twice. They hold a few more requests only because weights take less room.",
)

# ---- the knobs

KNOBS = {
    "The GPUs": {
        "tensor_parallel_size": steps("GPUs (TP)", list(TPS), START["tensor_parallel_size"], "that share the model"),
        "gpu": choice("GPU", list(GPUS), START["gpu"], "sets memory, bandwidth and FLOP/s"),
    },
    "The attention": {
        "kv_heads": steps("KV heads", list(KV_HEADS), START["kv_heads"], "shared by the query heads"),
        "latent": steps(
            "Latent width", [("none" if not width else f"{width:,}", width) for width in LATENTS], START["latent"],
            "numbers in a latent that replaces KV heads (MLA)",
        ),
        "model": choice("Model", list(MODELS), START["model"], "sets layers, query heads and weights, in 16 bits"),
    },
    "The requests": {
        "context": steps("Context", labelled(CONTEXTS, tokens), START["context"], "tokens per request"),
        "wanted": steps("Requests", list(WANTED), START["wanted"], "how many must fit"),
    },
}  # fmt: skip

SPEC = Spec(
    name="attention_heads",
    title="Who needs all those heads?",
    lead="Drag the GPUs to see what twice as many add. Then change how many KV heads there are to split.",
    knobs=KNOBS,
    presets={
        "One GPU": {"tensor_parallel_size": 1},
        "A head for each": {"kv_heads": 64},
        "A latent": {"latent": 512, "tensor_parallel_size": 8},
        "Long contexts": {"context": 131072, "tensor_parallel_size": 8},
    },
    sweep=sweep,
    figure=figure,
    detail=detail,
    tabs=("What fits", "Published models"),
    verdict=verdict,
    command=command,
    challenges=CHALLENGES,
    starts=lambda state: state.cause(state.tp) in ("", "copies"),
    mends=("tensor_parallel_size", "context", "model"),
    guess=GUESS,
    own={"kv_heads_of_rank": "decides which KV heads each GPU keeps"},
)


def show(**knobs: Any) -> Live:
    """Show the widget; `kv_heads_of_rank=` takes your function from exercise 09."""
    return notebook_widget(SPEC, **knobs)
