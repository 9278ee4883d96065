"""Lesson 07's widget: when guessing tokens pays, over the batch; and one step of a request, draft by draft.

A step's time is that of `minivllm_lab.speculative_decoding.speculation`, modelled. What is left out: prompts, the
search for n-grams on the host, drafts that no n-gram could be found for.

The picture in the lesson's text: `uv run python -P -m widgets speculative_decoding lessons/figures/07_speedup.svg`
"""

from __future__ import annotations

import json
import shlex
from typing import Any

from minivllm_lab.speculative_decoding.speculation import Drafter
from minivllm_simulate.cost_model import RooflineCost
from minivllm_simulate.known_models import CONFIGS
from minivllm_simulate.levers import LARGEST_GRAPH
from widgets.shell.knobs import choice, slider, steps
from widgets.shell.lesson_widget import LessonWidget
from widgets.shell.plot import tokens
from widgets.shell.spec import Challenge, Guess, Progress, Spec, Verdict
from widgets.speculative_decoding.figure import drafter_words, figure, milliseconds, own_words
from widgets.speculative_decoding.state import (
    BATCHES,
    CONTEXTS,
    GPUS,
    MOST_K,
    SIBLINGS,
    START,
    STEPS,
    State,
    sibling,
    sweep,
)

HARDLY = 1.1
"""Below this speed-up, another kind of text may turn a gain into a loss."""


def verdict(state: State) -> Verdict:
    """What drafts do to this batch, in one line."""
    said = _said(state)
    return Verdict(said.words.strip(), said.tone)


def _said(state: State) -> Verdict:
    if state.own and state.own.wrong is not None:
        return Verdict(f"{own_words(state)} The text is no longer the model's own.", "broken")
    if not state.fits:
        return Verdict(_too_many(state), "broken")
    speed = f"{state.speedup:.2f} times as fast as without"
    if speed.startswith("1.00"):
        return Verdict(f"Drafts change nothing here: {_why(state)}. {_better(state)}", "tight")
    if state.speedup < 1:
        return Verdict(f"Drafts lose: {speed}. {_cause(state)} {_better(state)}", "broken")
    if state.speedup < HARDLY:
        return Verdict(f"Drafts hardly pay: {speed}, {_why(state)}. {_better(state)}", "tight")
    return Verdict(f"Drafts pay: {speed}, {_why(state)}. {_better(state)}", "fine")


def _too_many(state: State) -> str:
    asked = f"{state.batch} requests of {tokens(state.context)} tokens do not fit on one {state.gpu}"
    plain = state.one.most_plain_batch
    if plain == state.most_batch:
        return f"{asked}: memory ends at {plain}."
    held = "its weights and its own cache take the room" if state.most_batch else "its weights leave no room"
    return f"{asked} beside {drafter_words(state)}: memory ends at {state.most_batch}, and at {plain} without; {held}."


def _why(state: State) -> str:
    return f"{state.tokens:.2f} tokens from a step that takes {state.longer:.2f} times as long"


def _cause(state: State) -> str:
    step, plain = state.one.step(state.batch, state.k), state.one.plain(state.batch)
    cause = state.one.cause(state.batch, state.k)
    if cause == "draft":
        return f"The drafter takes {milliseconds(step.draft)} of a step's {milliseconds(step.seconds)}: {_why(state)}."
    if cause == "compute":
        return (
            f"Arithmetic for {state.batch * (state.k + 1):,} positions takes "
            f"{milliseconds(step.compute - plain.compute)} more than a plain step's: {_why(state)}."
        )
    return f"Drafts are wrong too often: {_why(state)}."


def _better(state: State) -> str:
    """Which number of drafts would be better here, if it matters."""
    best = state.best_k
    if not best:
        return "No number of drafts pays here." if state.speedup < 1 else ""
    there = state.one.speedup(state.batch, best)
    return f"With k = {best} it would be {there:.2f}." if there > 1.03 * state.speedup else ""


def command(state: State) -> str:
    """The server that drafts so."""
    name = _full(state.model)
    settings: dict[str, Any] = {"method": state.one.drafter.method}
    if state.drafter in ("small", "large"):
        settings["model"] = _full(sibling(state.model, state.drafter))
    elif state.drafter != "ngram":
        settings["model"] = "HEAD"
    settings["num_speculative_tokens"] = state.k
    if state.drafter == "ngram":
        settings |= {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
    if state.drafter == "parallel":
        settings["parallel_drafting"] = True
    head = "# HEAD: an EAGLE-3 checkpoint that was trained for this very model.\n" * (settings.get("model") == "HEAD")
    positions = state.batch * (state.k + 1)
    graphs = f" --max-cudagraph-capture-size {positions}" * (positions > LARGEST_GRAPH)
    return (
        f"# On one {state.gpu}. What is accepted depends on the text: see vllm:spec_decode_num_accepted_tokens_total.\n"
        '# To have this much accepted whatever the text, which then is wrong: "rejection_sample_method": "synthetic",\n'
        f'# "synthetic_acceptance_length": {state.tokens:.2f}.\n{head}'
        f"vllm serve {shlex.quote(name)} --max-num-seqs {state.batch}{graphs} "
        f"--speculative-config {shlex.quote(json.dumps(settings))}"
    )


def _full(model: str) -> str:
    return next(name for name in CONFIGS if name.endswith(f"/{model}"))


# ---- the challenges


def _wanted(state: State, least: float, batch: int, asked: list[tuple[bool, str]], mend: str) -> Progress:
    """A speed-up at a batch; `asked` is what else the goal fixes, `mend` the advice where all that is right."""
    words = (
        f"{state.model} on {state.gpu}, batch {state.batch}, k {state.k}, {drafter_words(state)}: "
        f"{state.speedup:.2f} times as fast."
    )
    wrong = [
        (state.gpu != "H100", "GPU: H100 is asked for."),
        *asked,
        (state.batch < batch, f"Batch: {state.batch}, and {batch} or more are asked for."),
        (not state.fits, f"Context: {state.batch} such requests do not fit; memory ends at {state.most_batch}."),
        (state.speedup < least, mend),
    ]
    advice = next((said for is_wrong, said in wrong if is_wrong), "")
    return Progress(not advice, words, advice)


def _rate(state: State, most: float) -> list[tuple[bool, str]]:
    return [
        (state.recorded != "none", "Recorded: a constant acceptance is asked for."),
        (state.alpha > most, f"Acceptance: {state.alpha:g}, and at most {most:g} is asked for."),
    ]


def _crowded(state: State) -> Progress:
    return _wanted(
        state,
        1.2,
        128,
        [
            (state.model != "Llama-3.1-8B", "Model: Llama-3.1-8B is asked for."),
            (state.context > 256, f"Context: {tokens(state.context)}, and 256 tokens at most are asked for."),
            *_rate(state, 0.6),
        ],
        f"Drafts a step: {state.k + 1} positions for each of {state.batch} requests are more than the GPU computes "
        "while it reads the weights. Fewer drafts.",
    )


def _long(state: State) -> Progress:
    return _wanted(
        state,
        2.0,
        64,
        [
            (state.model != "Llama-3.1-8B", "Model: Llama-3.1-8B is asked for."),
            (state.drafter != "head", "Drafter: the EAGLE-3 head is asked for."),
            (state.k < 4, f"Drafts a step: {state.k}, and 4 or more are asked for."),
            *_rate(state, 0.7),
        ],
        "Context: this step is mostly arithmetic. What else must be read, once a step, whatever k is? Acceptance too "
        "may be up to 0.7.",
    )


def _cached(state: State) -> Progress:
    return _wanted(
        state,
        2.0,
        32,
        [
            (state.model != "Qwen3-14B", "Model: Qwen3-14B is asked for."),
            (state.context < 4096, f"Context: {tokens(state.context)}, and 4K or more are asked for."),
            (state.drafter == "ngram", "Drafter: one that has learned is asked for, not n-grams."),
            (state.k < 3, f"Drafts a step: {state.k}, and 3 or more are asked for."),
            *_rate(state, 0.7),
        ],
        f"Drafter, Acceptance: in each pass, {drafter_words(state)} reads {_kib(state.one.drafter)} KiB of its own "
        f"cache for a token of context; the model reads {_kib(state.one.target.roofline)}. Acceptance: up to 0.7.",
    )


def _kib(cached: Drafter | RooflineCost) -> str:
    return f"{cached.kv_bytes_per_token / 1024:.0f}"


CHALLENGES = (
    Challenge(
        "128 requests at once or more, Llama-3.1-8B on an H100, contexts of at most 256 tokens, acceptance at most "
        "0.6: make it 1.2 times as fast.",
        _crowded,
        "The more requests share a step, the fewer drafts pay: what is idle while weights are read is shared too.",
    ),
    Challenge(
        "At least 4 drafts a step of an EAGLE-3 head for 64 requests, acceptance at most 0.7, Llama-3.1-8B on an H100: "
        "make it twice as fast.",
        _long,
        "Long contexts keep the step memory-bound at large batches: keys are read once for all of a request's drafts.",
    ),
    Challenge(
        "Qwen3-14B on an H100, contexts of 4K or more, 32 requests, at least 3 drafts from a trained drafter, "
        "acceptance at most 0.7: make it twice as fast.",
        _cached,
        "A small model's cache need not be small. A head has one layer of it.",
    ),
)
GUESS = Guess(
    "Each of these requests gets 4 drafts a step. From how many requests at once do drafts lose?",
    ("about 20", "about 50", "about 100", "they never lose"),
    2,
    "From 45 requests on, five positions of each take longer to compute than the weights to read. At 100 the "
    "step takes 2.3 times as long as a plain one, and it yields 2.3 tokens.",
)

# ---- the knobs

DRAFTER_NAMES = [
    ("n-grams: costs nothing", "ngram"),
    ("EAGLE-3 head", "head"),
    ("parallel head", "parallel"),
    ("a small model", "small"),
    ("a larger model", "large"),
]
RECORDED_NAMES = [
    ("no: as above", "none"),
    ("n-grams", "ngram"),
    ("a draft model", "draft_model"),
    ("EAGLE-3", "eagle3"),
]
KNOBS = {
    "The batch": {
        "batch": steps("Batch", list(BATCHES), START["batch"], "requests that decode together"),
        "k": steps("Drafts a step", list(range(1, MOST_K + 1)), START["k"], "k, num_speculative_tokens"),
        "context": steps(
            "Context", [(tokens(one), one) for one in CONTEXTS], START["context"], "tokens of each request"
        ),
    },
    "The drafts": {
        "alpha": slider("Acceptance", 0.2, 0.95, 0.05, START["alpha"], "α: chance of a draft whose forerunners passed"),
        "recorded": choice("Recorded", RECORDED_NAMES, START["recorded"], "counted with lesson 07's model, k = 3"),
        "drafter": choice("Drafter", DRAFTER_NAMES, START["drafter"], "what drafts cost, and what memory they hold"),
        "step": steps("Step played", list(range(1, STEPS + 1)), START["step"], "other drafts and random numbers"),
    },
    "The server": {
        "model": choice("Model", list(SIBLINGS), START["model"], "what is served, in its own 16 bits"),
        "gpu": choice("GPU", list(GPUS), START["gpu"], "whose memory and rates"),
    },
}

SPEC = Spec(
    name="speculative_decoding",
    title="When does a guess pay?",
    lead="Drag the batch to where drafts lose. Then play one step, and see which guesses are kept.",
    knobs=KNOBS,
    presets={
        "Too large a batch": {"batch": 256},
        "A slow drafter": {"drafter": "large", "alpha": 0.4},
        "Long contexts": {"context": 4096, "batch": 64},
        "Its own cache": {"model": "Qwen3-14B", "drafter": "small", "context": 4096, "batch": 48},
    },
    sweep=sweep,
    figure=figure,
    verdict=verdict,
    command=command,
    challenges=CHALLENGES,
    guess=GUESS,
    own={"accept": "says how many drafts of a step are kept"},
)


def show(**knobs: Any) -> LessonWidget:
    """The widget; `accept=` is your own from exercise 07."""
    return LessonWidget(SPEC, **knobs)
