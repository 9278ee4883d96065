"""Show where a GPU's memory goes, how many requests fit, and what it costs to reserve the maximum
length for each.

`minivllm` computes everything: the memory ledger equals vLLM's start-up log, and request lengths
come from published workloads or from the reader's file.

Draw the lesson's figure with `uv run python -P -m widgets kv_cache lessons/figures/01_ledger.svg`.
"""

from __future__ import annotations

import math
import shlex
from typing import Any

from minivllm.config.units import GIB
from minivllm_simulate.hardware import HARDWARE
from minivllm_simulate.known_models import CONFIGS
from minivllm_simulate.workloads import WORKLOADS
from widgets.kv_cache.figure import draw
from widgets.kv_cache.state import CONTEXTS, START, State, sweep
from widgets.shell.advice import at_least, at_most, choose, progress, use
from widgets.shell.knobs import choice, entry, slider, steps
from widgets.shell.live import Live
from widgets.shell.notebook import notebook_widget
from widgets.shell.plot import counted, percent, tokens
from widgets.shell.spec import Challenge, Guess, Progress, Spec, Verdict

FULL_LENGTH = 131_072
"""The longest context that Llama-3.1-8B supports."""
MOSTLY_EMPTY = 0.25
"""The share of the cache that ever holds a token, below which reserving has failed."""
LONG, MANY, LEAST_PARAMETERS, LARGEST_CARD = 8192, 100, 7e9, 80 * GIB


def verdict(state: State) -> Verdict:
    """Say in one or two sentences how well this configuration uses its KV cache."""
    if not state.right_bytes:
        ratio = state.bytes_per_token / state.counted_bytes
        return Verdict(
            f"Your kv_bytes_per_token counts {state.bytes_per_token:,.0f} bytes per token on each GPU, but the engine "
            f"counts {state.counted_bytes:,}: yours is {ratio:.3g} times as much. The picture uses yours.",
            "broken",
        )
    if state.beyond_model:
        return Verdict(
            f"vLLM refuses to start: {state.model} supports {state.model_limit:,} tokens, but max_model_len is "
            f"{state.max_model_len:,}.",
            "broken",
        )
    if state.ledger is None:
        needed = state.needed / GIB
        card = state.hardware.memory_bytes / GIB
        return Verdict(
            f"No room is left for a KV cache, so vLLM refuses to start: weights and working memory take {needed:,.1f} "
            f"GiB, but the engine may use only {card * state.utilization:.1f} of {card:.1f} GiB.",
            "broken",
        )
    if not state.fits:
        return Verdict(
            f"Not one request of {state.max_model_len:,} tokens fits, so vLLM refuses to start. "
            f"The longest request that fits has {state.longest:,} tokens.",
            "broken",
        )
    if state.mean_length == 0:
        return Verdict(f"Every {state.workload_title} request is longer than {state.max_model_len:,} tokens.", "broken")
    refused = (
        f" {percent(state.too_long, 1)} of the requests are longer and are refused." if state.too_long >= 0.01 else ""
    )
    own = round(state.at_own_length)
    more = f", though {own:,} would fit by their own lengths" if own > state.slots else ""
    words = f"Full with {counted(state.slots, 'request')}{more}: "
    words += (
        f"{'only ' * (state.held < MOSTLY_EMPTY)}{percent(state.held, 1)} of the KV cache ever holds a token.{refused}"
    )
    if state.held < MOSTLY_EMPTY:
        return Verdict(words, "broken")
    return Verdict(words, "tight" if state.held < 0.5 or state.too_long >= 0.01 else "fine")


def command(state: State) -> str:
    """Write the server's command for this configuration."""
    line = (
        f"vllm serve {shlex.quote(state.name)} --max-model-len {state.max_model_len} "
        f"--gpu-memory-utilization {state.utilization:g} --tensor-parallel-size {state.tp} "
        f"--kv-cache-dtype {state.kv_dtype}"
    )
    note = "vLLM allocates blocks as requests grow and reserves nothing (lesson 02)"
    return f"{line}\n# on {state.tp} x {state.hardware.name}; {note if state.starts else 'it refuses to start'}"


def _stopped(state: State) -> str:
    """Return what to change so that vLLM starts, or "" if it does."""
    if not state.right_bytes:
        return "Your kv_bytes_per_token differs from the engine's count. Fix that first."
    if state.beyond_model:
        return (
            f"Lower max_model_len to {tokens(state.model_limit)} (now {tokens(state.max_model_len)}), the limit of "
            f"{state.model}, or use a model with a longer context."
        )
    if state.ledger is None:
        return "Use a larger GPU, more GPUs or a smaller model: the weights leave no room for a cache."
    if not state.fits:
        return f"{_longer(state)} Or lower max_model_len."
    return ""


def _longer(state: State) -> str:
    return f"Use a larger GPU or a smaller KV dtype: the longest request that fits has {state.longest:,} tokens."


def _whole_context(state: State) -> Progress:
    stopped = _stopped(state)
    return progress(
        f"{state.model} on {state.tp} {state.hardware.name}: {counted(state.slots, 'request')} of "
        f"{state.max_model_len:,} tokens.",
        use("Llama-3.1-8B", state.name == START["model"]),
        at_most("the GPUs (TP)", state.tp, 1),
        (state.right_bytes and state.longest < FULL_LENGTH, _longer(state)),
        at_least("max_model_len", state.max_model_len, FULL_LENGTH, tokens),
        at_most("max_model_len", state.max_model_len, FULL_LENGTH, tokens),
        (bool(stopped), stopped),
    )


def _cut(share: float) -> str:
    """Format a share as a percentage that is rounded down, so that it never seems to have reached a
    goal.
    """
    return percent(math.floor(share * 10_000) / 10_000, 2)


def _full_and_empty(state: State) -> Progress:
    stopped = _stopped(state)
    mean = state.mean_length
    held = f"Reserved: {_cut(state.reserved)} of the KV cache. Ever holding a token: {_cut(state.held)}."
    return progress(
        held if state.starts else "vLLM refuses to start.",
        (bool(stopped), stopped),
        (mean == 0, "Raise max_model_len: it refuses every request as too long."),
        (state.reserved < 0.95, "Use a larger GPU: in a small cache, what is left over weighs too much."),
        (
            state.held >= 0.01 and mean > 200,
            f"Choose shorter lengths: {mean:,.0f} tokens fill too much of what each reserves.",
        ),
        (state.held >= 0.01, "Raise max_model_len: these short requests then fill less of what each reserves."),
    )


def _many_long_ones(state: State) -> Progress:
    each = state.bytes_per_token
    pool = MANY * LONG
    left = state.hardware.memory_bytes * state.utilization - state.needed
    stopped = _stopped(state)
    enough = state.slots >= MANY
    return progress(
        f"{state.slots:,} requests of {state.max_model_len:,} tokens, {each:,.0f} bytes a token, "
        f"{state.parameters / 1e9:.2f} billion parameters.",
        at_most("the GPUs (TP)", state.tp, 1),
        use("a GPU of at most 80 GB", state.hardware.memory_bytes <= LARGEST_CARD),
        choose("the model's", "KV dtype", state.kv_dtype == "auto"),
        use("a model of at least 7 billion parameters", state.parameters >= LEAST_PARAMETERS),
        at_least("max_model_len", state.max_model_len, LONG, tokens),
        (bool(stopped), stopped),
        (not enough and state.max_model_len > LONG, "Lower max_model_len to 8K, which is enough."),
        (not enough and state.hardware.memory_bytes < 0.9 * LARGEST_CARD, "Use a larger GPU, of up to 80 GB."),
        (
            not enough,
            f"Use another model: {pool:,} tokens of {each:,.0f} bytes take {pool * each / GIB:,.0f} GiB, but only "
            f"{left / GIB:,.0f} GiB are left. Which models have few KV heads, or none?",
        ),
    )


CHALLENGES = (
    Challenge(
        "Serve Llama-3.1-8B at its full length of 131,072 tokens on one GPU.",
        _whole_context,
        "One such request takes 16 GiB of cache in 16 bits, more than the weights.",
    ),
    Challenge(
        "Reserve at least 95 % of a KV cache while less than 1 % of it ever holds a token.",
        _full_and_empty,
        "An engine that reserves turns requests away from an almost empty GPU. Lesson 02 allocates block by block.",
    ),
    Challenge(
        "Serve 100 requests of 8,192 tokens at once on one GPU of at most 80 GB, with the model's KV dtype and at "
        "least 7 billion parameters.",
        _many_long_ones,
        "Bytes per token = 2 × layers × KV heads × head dim × bytes. So the KV heads decide, not the parameters.",
    ),
)
GUESS = Guess(
    "14 chats as in ShareGPT reserve 2,048 tokens each, and the cache is full. How much of it ever holds a token?",
    ("about 5 %", "about 25 %", "about 60 %", "about 95 %"),
    1,
    "These chats have 498 tokens on average, a quarter of what each reserves.",
)
KV_DTYPES = [("the model's", "auto"), ("fp8", "fp8"), ("nvfp4 (with scales)", "nvfp4")]


def figure(state: State, width: float = 640, pinned: State | None = None) -> str:
    """Draw the GPU's memory, its KV cache slot by slot, and how many requests fit by reserved
    length.
    """
    return draw(state, width, pinned, verdict(state).words)


SPEC = Spec(
    name="kv_cache",
    title="Where the memory of a GPU goes",
    lead="Reserve max_model_len tokens for each request, as engines did before paging, until not even one fits.",
    knobs={
        "The card": {
            "model": choice("Model", [(name.split("/")[1], name) for name in CONFIGS], START["model"]),
            "other_model": entry("or another", "", "directory, owner/name", "replaces the model above"),
            "gpu": choice("GPU", list(HARDWARE), START["gpu"], "the GPU whose memory is shown"),
            "tp": steps("GPUs (TP)", [1, 2, 4, 8], START["tp"], "GPUs that share one copy of the model"),
            "kv_dtype": choice("KV dtype", KV_DTYPES, START["kv_dtype"], "the type of keys and values"),
            "utilization": slider("Utilization", 0.5, 1.0, 0.01, START["utilization"], "gpu_memory_utilization"),
        },
        "The requests": {
            "max_model_len": steps(
                "max_model_len",
                [(tokens(context), context) for context in CONTEXTS],
                START["max_model_len"],
                "tokens reserved for each request",
            ),
            "requests": choice(
                "Lengths as in",
                [(kind.title, name) for name, kind in WORKLOADS.items()],
                START["requests"],
                "how long the requests really get",
            ),
            "file": entry("or a file", "", "a CSV of lengths", "columns prompt_tokens and output_tokens"),
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
    starts=lambda state: state.starts,
    mends=("max_model_len", "gpu", "tp", "model"),
    guess=GUESS,
    own={"kv_bytes_per_token": "counts the bytes of a token in the cache"},
)


def show(**knobs: Any) -> Live:
    """Show the widget; `kv_bytes_per_token=` takes your function from exercise 01."""
    return notebook_widget(SPEC, **knobs)
