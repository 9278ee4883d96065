"""Lesson 09's widget: what shared keys save, and how many GPUs a model's KV heads can be divided over.

Memory is counted by `minivllm.memory`, as vLLM would at its start, also for models whose heads are shared otherwise;
rates are those of `minivllm_lab.attention_heads.siblings`. How well such a model would answer is not shown: it need not
exist.

The picture in the lesson's text: `uv run python -P -m widgets attention_heads lessons/figures/09_ranks.svg`
"""

from __future__ import annotations

import json
import shlex
from typing import Any

from minivllm_simulate.known_models import CONFIGS, known_model
from minivllm_simulate.layouts import UTILIZATION
from widgets.attention_heads.figure import cause_words, figure, kib, rank_words
from widgets.attention_heads.state import (
    CONTEXTS,
    GPUS,
    KV_HEADS,
    LATENTS,
    MODELS,
    START,
    TPS,
    WANTED,
    WORTH,
    Kind,
    State,
    sweep,
)
from widgets.shell.knobs import choice, steps
from widgets.shell.lesson_widget import LessonWidget
from widgets.shell.plot import tokens
from widgets.shell.spec import Challenge, Guess, Progress, Spec, Verdict

MANY = 3
"""Times as many requests, in the third challenge."""


def verdict(state: State) -> Verdict:
    """What this attention comes to on so many GPUs, in one line."""
    place, cause = state.here, state.cause(state.tp)
    if state.wrong:
        return Verdict(f"Rank by rank it would answer wrongly: {state.wrong}.", "broken")
    if cause == "few":
        return Verdict(f"Too few: {cause_words(state, state.tp)}. {rank_words(state)}", "broken")
    if cause == "copies":
        gain = f"{state.mine.gain(state.tp):.2f} times the requests of {state.tp // 2}"
        return Verdict(
            f"Copies: {_undivided(state)}, so {place.copies} GPUs keep the same keys and values, and {state.tp} hold "
            f"only {gain}.",
            "broken",
        )
    if cause:
        why = cause_words(state, state.tp)
        return Verdict(f"It does not start: {why}.", "broken")
    fits = f"{int(place.fits):,} requests fit, {place.tokens_per_second:,.0f} tokens a second"
    if place.copies > 1:
        spent = kib(place.kv_bytes * (state.tp - state.tp // place.copies))
        return Verdict(f"{fits}; but {spent} KiB of each token are copies. {rank_words(state)}", "tight")
    times = f"{place.intensity:.3g} operation{'s' * (place.intensity != 1)} for each byte read"
    return Verdict(f"{fits}, with {times} (the GPU could do {state.hardware.ridge():.0f}). {rank_words(state)}", "fine")


def _undivided(state: State) -> str:
    """Why more GPUs must keep copies."""
    if state.latent:
        return "a latent cannot be divided"
    if state.kv_heads == 1:
        return "one KV head cannot be divided"
    return f"{state.kv_heads} KV heads can be divided over {state.kv_heads} GPUs at most"


def command(state: State) -> str:
    """The server; a sibling that nobody has trained runs with random weights."""
    name = shlex.quote(next(name for name in CONFIGS if name.endswith(f"/{state.model}")))
    line = (
        f"vllm serve {name} --tensor-parallel-size {state.tp} --max-model-len {state.context} "
        f"--max-num-seqs {state.wanted} --gpu-memory-utilization {UTILIZATION:g}"
    )
    refused = "; it refuses to start" * bool(state.here.refused)
    said = [f"# On {state.tp} x {state.hardware.name}{refused}."]
    if state.latent:
        said.append("# vLLM has no flag that gives a model a latent: this is the model as it was published.")
    elif state.kv_heads != known_model(state.model).num_key_value_heads:
        said.append("# It was published with other KV heads, so its weights are random here.")
        override = shlex.quote(json.dumps({"num_key_value_heads": state.kv_heads}))
        line += f" --load-format dummy --hf-overrides {override}"
    return "\n".join([*said, line])


# ---- the challenges


def _wanted(state: State, model: str, asked: list[tuple[bool, str]], met: bool, words: str, mend: str) -> Progress:
    """`asked` is what the goal fixes, the first wrong one is said; `mend` is the advice where all that is right."""
    fixed = [
        (state.model != model, f"Model: {model} is asked for."),
        (state.hardware.name != "H100", "GPU: H100 is asked for."),
        (state.context < 32768, f"Context: {tokens(state.context)}, and 32K or more is asked for."),
        *asked,
    ]
    wrong = next((said for is_wrong, said in fixed if is_wrong), "")
    return Progress(met and not wrong, words, wrong or ("" if met else mend))


def _words(state: State) -> str:
    return f"{state.mine.name} on {state.tp} {state.hardware.name}: {int(state.here.fits):,} requests."


def _enough(state: State) -> Progress:
    asked = [
        (bool(state.latent), "Latent width: KV heads are asked for."),
        (state.kv_heads < 8, f"KV heads: {state.kv_heads}, and 8 or more are asked for."),
        (state.wanted < 32, f"Requests: {state.wanted}, and 32 or more are asked for."),
    ]
    fit = int(state.here.fits) >= state.wanted
    met = fit and state.tp <= 8
    mend = (
        "GPUs (TP): too few to hold them. With more GPUs each keeps fewer heads, as long as there are heads to divide."
    )
    if fit:
        mend = "GPUs (TP): they fit, and on fewer too. What do the last GPUs keep that the others do not keep already?"
    return _wanted(state, "Llama-3.1-70B", asked, met, _words(state), mend)


def _worth(state: State) -> Progress:
    gain = state.mine.gain(64)
    words = f"{_words(state)} 64 GPUs hold {gain:.2f} times those of 32."
    asked = [
        (state.tp < 64, f"GPUs (TP): {state.tp}, and 64 are asked for."),
        (bool(state.latent), "Latent width: a latent is kept whole by each GPU. Heads can be divided."),
    ]
    mend = (
        f"KV heads: {state.kv_heads} cannot be divided over 64 GPUs. How many would let each GPU keep one of its own?"
    )
    return _wanted(state, "Llama-3.1-70B", asked, gain >= 2, words, mend)


def _own_heads(state: State) -> Kind | None:
    """The model as it was published, where it stands beside."""
    many = known_model(state.model).num_key_value_heads
    return next((kind for kind in state.others if kind.name.endswith(f", {many} heads")), None)


def _latent(state: State) -> Progress:
    published = _own_heads(state)
    fits = published.at(state.tp).fits if published else 0.0
    times = state.here.fits / fits if fits else 0.0
    words = f"{_words(state)} {f'{times:.2f} times what 8 KV heads hold.' if fits else ''}".strip()
    asked = [(state.latent < 512, f"Latent width: {state.latent}, and 512 or more is asked for.")]
    mend = (
        f"GPUs (TP): the 8 KV heads are divided over {state.tp}, and the latent is not: each GPU keeps it whole. On "
        "how many GPUs are the heads not divided?"
    )
    return _wanted(state, "Llama-3.1-8B", asked, times >= MANY, words, mend)


CHALLENGES = (
    Challenge(
        "Llama-3.1-70B with its 8 KV heads on H100: 32 requests of 32K tokens must fit, on as few GPUs as possible.",
        _enough,
        "Up to a GPU for each KV head, twice the GPUs hold more than twice the requests: weights are cut as well.",
    ),
    Challenge(
        "64 H100 for Llama-3.1-70B, requests of 32K: let them hold twice what 32 GPUs hold, or more.",
        _worth,
        "Now nothing is copied. Yet it holds no more than one shared head would: each GPU keeps one head in any case.",
    ),
    Challenge(
        "Llama-3.1-8B on H100, requests of 32K: let a latent of 512 numbers or more hold 3 times as many as the "
        "model's own 8 KV heads do.",
        _latent,
        "A latent is the smallest cache, but it cannot be divided. So models with a latent are often served with a "
        "whole copy of the attention on each GPU, each for other requests (data parallel), and only their experts are "
        "divided.",
    ),
)
GUESS = Guess(
    "Eight of these GPUs hold 42 requests of 32K tokens, one KV head on each. How many do sixteen hold?",
    ("42", "about 50", "about 65", "84"),
    1,
    "Sixteen GPUs keep each of the 8 heads twice. They hold a few more only because the weights take less room.",
)

# ---- the knobs

KNOBS = {
    "The GPUs": {
        "tensor_parallel_size": steps("GPUs (TP)", list(TPS), START["tensor_parallel_size"], "that share the model"),
        "gpu": choice("GPU", list(GPUS), START["gpu"], "whose memory and rates"),
    },
    "The attention": {
        "kv_heads": steps("KV heads", list(KV_HEADS), START["kv_heads"], "shared by the query heads"),
        "latent": steps(
            "Latent width", [("none" if not one else f"{one:,}", one) for one in LATENTS], START["latent"],
            "numbers of a latent in place of KV heads (MLA); 64 more for positions",
        ),
        "model": choice("Model", list(MODELS), START["model"], "whose layers, query heads and weights; in 16 bits"),
    },
    "The requests": {
        "context": steps("Context", [(tokens(one), one) for one in CONTEXTS], START["context"], "tokens of each"),
        "wanted": steps("Requests", list(WANTED), START["wanted"], "that must fit: the service level"),
    },
}  # fmt: skip

SPEC = Spec(
    name="attention_heads",
    title="Who needs all those heads?",
    lead="Drag the GPUs: too few hold too little, and with more GPUs than KV heads, twice as many hold under "
    f"{WORTH:g} times the requests.",
    knobs=KNOBS,
    presets={
        "One GPU": {"tensor_parallel_size": 1},
        "A head for each": {"kv_heads": 64},
        "A latent": {"latent": 512, "tensor_parallel_size": 8},
        "Long contexts": {"context": 131072, "tensor_parallel_size": 8},
    },
    sweep=sweep,
    figure=figure,
    verdict=verdict,
    command=command,
    challenges=CHALLENGES,
    guess=GUESS,
    own={"kv_heads_of_rank": "says which KV heads a GPU keeps"},
)


def show(**knobs: Any) -> LessonWidget:
    """The widget; `kv_heads_of_rank=` is your own from exercise 09."""
    return LessonWidget(SPEC, **knobs)
