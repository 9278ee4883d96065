"""Lesson 01: how a GPU's memory is used, how many requests fit, and the cost of reserving the longest request.

Everything here is asked of `minivllm`: the ledger that equals vLLM's start-up log, and request lengths as they are seen
in the world, or in a file of the reader's.

The picture in the lesson's text: `uv run python -P -m widgets kv_cache lessons/figures/01_ledger.svg`
"""

from __future__ import annotations

import math
import shlex
from typing import Any

from minivllm.config.units import GIB
from minivllm_simulate.hardware import HARDWARE
from minivllm_simulate.known_models import CONFIGS
from minivllm_simulate.workloads import WORKLOADS
from widgets.kv_cache.figure import draw, percent
from widgets.kv_cache.state import CONTEXTS, MOST, MOST_SLOTS_DRAWN, START, Pool, State, sweep
from widgets.shell.knobs import choice, entry, slider, steps
from widgets.shell.lesson_widget import LessonWidget
from widgets.shell.plot import tokens
from widgets.shell.spec import Challenge, Guess, Progress, Spec, Verdict

__all__ = [
    "CONTEXTS",
    "MOST",
    "MOST_SLOTS_DRAWN",
    "SPEC",
    "Pool",
    "State",
    "command",
    "figure",
    "show",
    "sweep",
    "verdict",
]

FULL_LENGTH = 131_072
"""Tokens that Llama-3.1-8B reads at most."""
LONG, MANY, LEAST_PARAMETERS, LARGEST_CARD = 8192, 100, 7e9, 80 * GIB


def verdict(state: State) -> Verdict:
    """What this configuration means, in one line."""
    if not state.right_bytes:
        ratio = state.bytes_per_token / state.counted_bytes
        return Verdict(
            f"Your kv_bytes_per_token counts {state.bytes_per_token:,.0f} bytes a token on each GPU, and the engine "
            f"{state.counted_bytes:,}: yours is {ratio:.3g} times that. The picture is drawn with yours.",
            "broken",
        )
    if state.beyond_model:
        return Verdict(
            f"vLLM refuses to start: {state.model} was made for {state.model_limit:,} tokens, and max_model_len asks "
            f"for {state.max_model_len:,}.",
            "broken",
        )
    if state.ledger is None:
        needed, card = state.needed / GIB, state.hardware.memory_bytes / GIB
        return Verdict(
            f"There is no KV cache at all, so vLLM refuses to start: weights and working space take {needed:,.1f} GiB, "
            f"and the engine may use {card * state.utilization:.1f} of {card:.1f} GiB.",
            "broken",
        )
    if not state.fits:
        return Verdict(
            f"Not one request of {state.max_model_len:,} tokens fits, so vLLM refuses to start. "
            f"The longest that fits has {state.longest:,} tokens.",
            "broken",
        )
    if state.mean_length == 0:
        return Verdict(f"Every {state.workload_title} request is longer than {state.max_model_len:,} tokens.", "broken")
    refused = f" {percent(state.too_long)} of the requests are longer and refused." if state.too_long else ""
    words = f"Full with {state.slots:,} request{'s' if state.slots > 1 else ''}, and {percent(state.held)} of the KV "
    words += f"cache ever holds a token (mean request: {state.mean_length:,.0f} tokens).{refused}"
    return Verdict(words, "tight" if state.held < 0.5 or state.too_long >= 0.005 else "fine")


def command(state: State) -> str:
    """The line that starts vLLM so."""
    line = (
        f"vllm serve {shlex.quote(state.name)} --max-model-len {state.max_model_len} "
        f"--gpu-memory-utilization {state.utilization:g} --tensor-parallel-size {state.tp} "
        f"--kv-cache-dtype {state.kv_dtype}"
    )
    what = "vLLM takes blocks as requests grow, and reserves no slots (lesson 02)"
    return f"{line}\n# on {state.tp} x {state.hardware.name}; {what if state.starts else 'it refuses to start'}"


def _stopped(state: State) -> str:
    """Which knob keeps vLLM from starting, and why; empty where it starts."""
    if not state.right_bytes:
        return "Your kv_bytes_per_token counts other bytes than the engine. Mend it first."
    if state.beyond_model:
        return (
            f"max_model_len: {state.model} reads {state.model_limit:,} tokens at most. Ask for no more than that, or "
            "take a model that reads more."
        )
    if state.ledger is None:
        return "GPU: the weights leave nothing for a cache. Take a larger one, or several, or a smaller model."
    if not state.fits:
        return (
            f"GPU, KV dtype: the cache holds {state.tokens:,} tokens, fewer than one request reserves. Take more "
            "memory, fewer bytes a token, or a shorter max_model_len."
        )
    return ""


def _whole_context(state: State) -> Progress:
    llama, which = state.name == START["model"], f"{state.model} on {state.tp} {state.hardware.name}"
    words = f"{which}: {state.slots:,} requests of {state.max_model_len:,} tokens."
    if not llama:
        advice = "Model: Llama-3.1-8B is asked for."
    elif state.tp > 1:
        advice = "GPUs (TP): one is asked for."
    elif state.max_model_len < FULL_LENGTH:
        advice = "max_model_len: the requests reserve less than the model can read. Go up to 128K."
    elif state.max_model_len > FULL_LENGTH:
        advice = "max_model_len: the requests reserve more than the model can read. Go down to 128K."
    elif state.right_bytes and not state.fits:
        advice = (
            f"GPU, KV dtype: the cache holds {state.tokens:,} tokens, fewer than one request reserves. Take more "
            "memory in one GPU, or fewer bytes a token."
        )
    else:
        advice = _stopped(state)
    return Progress(not advice, words, advice)


def _cut(share: float) -> str:
    """A share in words, its further digits cut off: what is below a goal never reads as if it had reached it."""
    return f"{math.floor(share * 10_000) / 100:.2f} %"


def _full_and_empty(state: State) -> Progress:
    words = f"Reserved: {_cut(state.reserved)} of the KV cache. Ever holding a token: {_cut(state.held)}."
    met = state.right_bytes and state.reserved >= 0.95 and 0 < state.held < 0.01
    if met:
        return Progress(True, words)
    if advice := _stopped(state):
        return Progress(False, words, advice)
    if state.mean_length == 0:
        advice = "max_model_len: every request is longer than that and refused."
    elif state.reserved < 0.95:
        advice = "GPU: the piece that is less than a slot is a large part of so small a cache. Take a larger one."
    elif state.mean_length > 200:
        advice = f"Lengths: requests of {state.mean_length:,.0f} tokens fill too much of a slot. Take shorter ones."
    else:
        advice = "max_model_len: the requests are short. Reserve more for each."
    return Progress(False, words, advice)


def _many_long_ones(state: State) -> Progress:
    each, pool = state.bytes_per_token, MANY * LONG
    words = (
        f"{state.slots:,} requests of {state.max_model_len:,} tokens, {each:,.0f} bytes a token, "
        f"{state.parameters / 1e9:.2f} billion parameters."
    )
    if state.tp > 1 or state.hardware.memory_bytes > LARGEST_CARD or state.kv_dtype != "auto":
        advice = "GPU, GPUs (TP), KV dtype: one GPU of at most 80 GB, and the model's own KV dtype."
    elif state.parameters < LEAST_PARAMETERS:
        advice = "Model: this one has less than 7 billion parameters."
    elif state.max_model_len < LONG:
        advice = "max_model_len: each request is to have 8,192 tokens."
    elif stopped := _stopped(state):
        advice = stopped
    elif state.slots >= MANY:
        advice = ""
    elif state.max_model_len > LONG:
        advice = "max_model_len: 8,192 tokens for each are enough."
    elif state.hardware.memory_bytes < 0.9 * LARGEST_CARD:
        advice = "GPU: larger ones are allowed."
    else:
        left = state.hardware.memory_bytes * state.utilization - state.needed
        advice = (
            f"Model: {pool:,} tokens of {each:,.0f} bytes take {pool * each / GIB:,.0f} GiB, and {left / GIB:,.0f} GiB "
            "are left. Which models have few KV heads, or none?"
        )
    return Progress(not advice, words, advice)


CHALLENGES = (
    Challenge(
        "Let one GPU serve Llama-3.1-8B at its full length of 131,072 tokens.",
        _whole_context,
        "One such request takes 16 GiB of cache in 16 bits: more than the weights.",
    ),
    Challenge(
        "Fill a KV cache, at least 95 % of it reserved, while less than 1 % of it ever holds a token.",
        _full_and_empty,
        "An engine that reserves turns requests away from an almost empty card. Lesson 02 takes memory block by block.",
    ),
    Challenge(
        "Serve 100 requests of 8,192 tokens at once: one GPU of at most 80 GB, KV dtype as the model's, at least 7 "
        "billion parameters.",
        _many_long_ones,
        "Bytes per token = 2 × layers × KV heads × head dim × bytes: the KV heads decide, not the parameters.",
    ),
)
GUESS = Guess(
    "14 slots of 2,048 tokens fill this cache. How long may a request be, if it has the cache to itself?",
    ("2,048 tokens", "about 8,000", "about 29,000", "131,072, as the model allows"),
    2,
    "The slots are cut from one pool: 14 and a bit times 2,048 tokens. Beyond that, not one request fits.",
)
KV_DTYPES = [("as the model", "auto"), ("fp8", "fp8"), ("nvfp4 (with scales)", "nvfp4")]


def figure(state: State, width: float = 640, pinned: State | None = None) -> str:
    """The GPU's memory as a bar, its KV cache slot by slot, and the requests that fit by what each reserves."""
    return draw(state, width, pinned, verdict(state).words)


SPEC = Spec(
    name="kv_cache",
    title="Where the memory of a GPU goes",
    lead="Reserve max_model_len tokens for every request, as engines did before paging, and see where not one fits.",
    knobs={
        "The card": {
            "model": choice("Model", [(name.split("/")[1], name) for name in CONFIGS], START["model"]),
            "other_model": entry("or another", "", "directory, owner/name", "taken instead of the one above"),
            "gpu": choice("GPU", list(HARDWARE), START["gpu"], "whose memory is shared out"),
            "tp": steps("GPUs (TP)", [1, 2, 4, 8], START["tp"], "GPUs that share one copy of the model"),
            "kv_dtype": choice("KV dtype", KV_DTYPES, START["kv_dtype"], "what keys and values are stored in"),
            "utilization": slider("Utilization", 0.5, 1.0, 0.01, START["utilization"], "gpu_memory_utilization"),
        },
        "The requests": {
            "max_model_len": steps(
                "max_model_len",
                [(tokens(context), context) for context in CONTEXTS],
                START["max_model_len"],
                "tokens reserved for each",
            ),
            "requests": choice(
                "Lengths as in",
                [(kind.title, name) for name, kind in WORKLOADS.items()],
                START["requests"],
                "how long the requests really are",
            ),
            "file": entry("or a file", "", "a CSV of lengths", "prompt and output tokens; or vllm bench serve's JSON"),
        },
    },
    presets={
        "Too long a request": {"max_model_len": 2**15},
        "Past the model": {"model": "openai-community/gpt2", "max_model_len": 2**17},
        "8 GPUs": {"model": "deepseek-ai/DeepSeek-V3", "gpu": "H200", "tp": 8},
    },
    sweep=sweep,
    figure=figure,
    verdict=verdict,
    command=command,
    challenges=CHALLENGES,
    guess=GUESS,
    own={"kv_bytes_per_token": "the bytes that a token takes in the cache, as in exercise 01"},
)


def show(**knobs: Any) -> LessonWidget:
    """The widget; any knob can be set, and `kv_bytes_per_token` can be the reader's own function."""
    return LessonWidget(SPEC, **knobs)
