"""Show when drafting tokens pays as the batch grows, and animate one step of a request, draft by
draft.

`minivllm_lab.speculative_decoding.speculation` models the time of a step. Prompts, the search for
n-grams on the host, and steps without a matching n-gram are left out.

Draw the lesson's figure with `uv run python -P -m widgets speculative_decoding
lessons/figures/07_speedup.svg`.
"""

from __future__ import annotations

import json
import shlex
from typing import Any

from minivllm_lab.speculative_decoding.speculation import Drafter
from minivllm_simulate.cost_model import RooflineCost
from minivllm_simulate.known_models import CONFIGS
from minivllm_simulate.levers import LARGEST_GRAPH
from widgets.shell.advice import Rule, at_least, at_most, choose, progress, use
from widgets.shell.knobs import choice, labelled, slider, steps
from widgets.shell.live import Live
from widgets.shell.notebook import notebook_widget
from widgets.shell.plot import counted, tokens
from widgets.shell.spec import Challenge, Guess, Progress, Spec, Verdict
from widgets.speculative_decoding.figure import CAUSES, drafter_words, figure
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
from widgets.speculative_decoding.walk import detail, own_words

HARDLY = 1.1
"""The speed-up below which another kind of text may turn the gain into a loss."""


def verdict(state: State) -> Verdict:
    """Say in one or two sentences whether drafts make this batch faster."""
    if state.own and state.own.wrong is not None:
        return Verdict(f"{own_words(state)} So the output no longer follows the model.", "broken")
    if not state.fits:
        return Verdict(_too_many(state), "broken")
    speed = f"{state.speedup:.2f} times as fast as without"
    if speed.startswith("1.00"):
        return Verdict(f"Drafts change nothing here: {_why(state)}.{_better(state)}", "tight")
    if state.speedup < 1:
        cause = state.one.cause(state.batch, state.k)
        because = f", because {CAUSES[cause]}" if cause else ""
        return Verdict(f"Drafts lose{because}: {_why(state)}.{_better(state)}", "broken")
    if state.speedup < HARDLY:
        return Verdict(f"Drafts hardly pay: {speed}, {_why(state)}.{_better(state)}", "tight")
    return Verdict(f"Drafts pay: {speed}, {_why(state)}.{_better(state)}", "fine")


def _too_many(state: State) -> str:
    requests = f"{counted(state.batch, 'request')} of {tokens(state.one.context)} tokens"
    most = f"at most {state.most_batch:,} fit" if state.most_batch else "none fits"
    plain = state.one.most_plain_batch
    beside = "" if plain == state.most_batch else f" beside {drafter_words(state)}, and {plain:,} without it"
    return f"There is no room for {requests} on one {state.gpu}: {most}{beside}."


def _why(state: State) -> str:
    return f"{state.tokens:.2f} tokens from a step that takes {state.longer:.2f} times as long"


def _better(state: State) -> str:
    """Return a sentence with a better number of drafts, or "" if there is none."""
    if not state.best_k:
        return " No number of drafts pays here." * (state.speedup < 1)
    best = state.best_speedup(state.batch)
    return f" With k = {state.best_k} it would be {best:.2f} times as fast." * (best > 1.03 * state.speedup)


def command(state: State) -> str:
    """Write the server's command."""
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
        f"# On one {state.gpu}. Acceptance depends on the text: see vllm:spec_decode_num_accepted_tokens_total.\n"
        '# To force this acceptance, at the price of wrong text: "rejection_sample_method": "synthetic",\n'
        f'# "synthetic_acceptance_length": {state.tokens:.2f}.\n{head}'
        f"vllm serve {shlex.quote(name)} --max-num-seqs {state.batch}{graphs} "
        f"--speculative-config {shlex.quote(json.dumps(settings))}"
    )


def _full(model: str) -> str:
    return next(name for name in CONFIGS if name.endswith(f"/{model}"))


# ---- the challenges


def _progress(state: State, least: float, batch: int, rules: list[Rule], advice: str) -> Progress:
    """Check that drafts reach a speed-up at a batch size."""
    return progress(
        f"{state.model} on {state.gpu}, batch {state.batch}, k {state.k}, {drafter_words(state)}: "
        f"{state.speedup:.2f} times as fast.",
        use("an H100", state.gpu == "H100"),
        *rules,
        at_least("the batch", state.batch, batch),
        (not state.fits, f"Shorten the context: memory is full at {state.most_batch} requests."),
        (state.speedup < least, advice),
    )


def _acceptance(state: State, most: float) -> list[Rule]:
    return [
        choose("no, use the slider", "Recorded", state.recorded == "none"),
        at_most("the acceptance", state.one.rates[0], most),
    ]


def _crowded(state: State) -> Progress:
    rules = [
        use("Llama-3.1-8B", state.model == "Llama-3.1-8B"),
        at_most("the context", state.one.context, 256, tokens),
        *_acceptance(state, 0.6),
        *([] if state.best_k else [at_most("the batch", state.batch, 128)]),
    ]
    advice = (
        f"Lower the drafts a step: {state.k + 1} positions for each of {state.batch} requests are more than the GPU "
        "can compute while it reads the weights."
    )
    return _progress(state, 1.2, 128, rules, advice)


def _long(state: State) -> Progress:
    rules = [
        use("Llama-3.1-8B", state.model == "Llama-3.1-8B"),
        use("the EAGLE-3 head as the drafter", state.drafter == "head"),
        at_least("the drafts a step", state.k, 4),
        *_acceptance(state, 0.7),
    ]
    advice = (
        "Raise the context: this step is mostly arithmetic, so give it more to read, once for all drafts of a request. "
        "The acceptance may go up to 0.7."
    )
    return _progress(state, 2.0, 64, rules, advice)


def _cached(state: State) -> Progress:
    rules = [
        use("Qwen3-14B", state.model == "Qwen3-14B"),
        at_least("the context", state.one.context, 4096, tokens),
        use("a trained drafter, not n-grams", state.drafter != "ngram"),
        at_least("the drafts a step", state.k, 3),
        *_acceptance(state, 0.7),
    ]
    advice = (
        f"Change the drafter or raise the acceptance, up to 0.7: in each pass, {drafter_words(state)} reads "
        f"{_kib(state.one.drafter)} KiB of its own cache per token, the model {_kib(state.one.target.roofline)}."
    )
    return _progress(state, 2.0, 32, rules, advice)


def _kib(cached: Drafter | RooflineCost) -> str:
    return f"{cached.kv_bytes_per_token / 1024:.0f}"


CHALLENGES = (
    Challenge(
        "Make Llama-3.1-8B on an H100 1.2 times as fast with at least 128 requests at once, contexts of at most 256 "
        "tokens and an acceptance of at most 0.6.",
        _crowded,
        "The more requests share a step, the less idle arithmetic is left for drafts while the weights are read.",
    ),
    Challenge(
        "Make Llama-3.1-8B on an H100 twice as fast for 64 requests, with at least 4 drafts a step from an EAGLE-3 "
        "head and an acceptance of at most 0.7.",
        _long,
        "Long contexts keep the step memory-bound at large batches: keys are read once for all drafts of a request.",
    ),
    Challenge(
        "Make Qwen3-14B on an H100 twice as fast for 32 requests with contexts of at least 4K tokens, with at least 3 "
        "drafts from a trained drafter and an acceptance of at most 0.7.",
        _cached,
        "A small model can have a large cache. A head has only one layer of it.",
    ),
)
GUESS = Guess(
    "Each of these requests gets 4 drafts a step. At how many requests at once do drafts start to lose?",
    ("about 20", "about 50", "about 100", "they never lose"),
    2,
    "Five positions of each request soon take longer to compute than the weights to read. At 100 the step takes 2.3 "
    "times as long as a plain one, and yields 2.3 tokens.",
)

# ---- the knobs

DRAFTER_NAMES = [
    ("n-grams, which cost nothing", "ngram"),
    ("EAGLE-3 head", "head"),
    ("parallel head", "parallel"),
    ("a small model", "small"),
    ("a larger model", "large"),
]
RATES = [("no, use the slider", "none"), ("n-grams", "ngram"), ("a draft model", "draft_model"), ("EAGLE-3", "eagle3")]
KNOBS = {
    "The batch": {
        "batch": steps("Batch", list(BATCHES), START["batch"], "requests that decode together"),
        "k": steps("Drafts a step", list(range(1, MOST_K + 1)), START["k"], "k, num_speculative_tokens"),
        "context": steps("Context", labelled(CONTEXTS, tokens), START["context"], "tokens of each request"),
    },
    "The drafts": {
        "alpha": slider(
            "Acceptance", 0.2, 0.95, 0.05, START["alpha"], "α: chance that a draft passes if all before it passed"
        ),
        "recorded": choice("Recorded", RATES, START["recorded"], "as counted with lesson 07's model, k = 3"),
        "drafter": choice("Drafter", DRAFTER_NAMES, START["drafter"], "sets the drafts' cost and memory"),
        "step": steps("Step played", list(range(1, STEPS + 1)), START["step"], "only for “Draft by draft”"),
    },
    "The server": {
        "model": choice("Model", list(SIBLINGS), START["model"], "served in 16 bits"),
        "gpu": choice("GPU", list(GPUS), START["gpu"], "sets memory, bandwidth and FLOP/s"),
    },
}

SPEC = Spec(
    name="speculative_decoding",
    title="When does a guess pay?",
    lead="Drag the batch to where drafts lose; then play one step, draft by draft.",
    knobs=KNOBS,
    presets={
        "Too large a batch": {"batch": 256},
        "A slow drafter": {"drafter": "large", "alpha": 0.4},
        "Long contexts": {"context": 4096, "batch": 64},
        "A drafter with a cache": {"model": "Qwen3-14B", "drafter": "small", "context": 4096, "batch": 48},
    },
    sweep=sweep,
    figure=figure,
    detail=detail,
    tabs=("When it pays", "Draft by draft"),
    verdict=verdict,
    command=command,
    challenges=CHALLENGES,
    starts=lambda state: state.fits,
    mends=("batch", "context", "gpu", "drafter", "model"),
    guess=GUESS,
    own={"accept": "decides how many drafts of a step are accepted"},
)


def show(**knobs: Any) -> Live:
    """Show the widget; `accept=` takes your function from exercise 07."""
    return notebook_widget(SPEC, **knobs)
