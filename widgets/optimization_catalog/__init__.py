"""Turn on an engine's optimizations ("levers") one after another, in two orders, and show that each
lever's gain depends on the others.

The engine's own scheduler and block pool serve a workload with every set of levers.
`minivllm_simulate.levers` models the time of a step, for Llama-3.1-8B on a GPU of your choice. The
swept axis is the number of requests that run at once.

Draw the lesson's figure with `uv run python -P -m widgets optimization_catalog
lessons/figures/05_levers.svg`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from minivllm_simulate.hardware import get_hardware
from minivllm_simulate.levers import LeverResult
from widgets.optimization_catalog.figure import ACTS, apart, factor_words, figure, most_dependent, rate_words
from widgets.optimization_catalog.runs import (
    FIELDS,
    GPUS,
    LEVELS,
    MAX_MODEL_LEN,
    REQUESTS,
    SLOTS,
    START,
    TITLES,
    State,
    sweep,
    weight_bytes,
)
from widgets.shell.knobs import choice, steps, switch
from widgets.shell.live import Live
from widgets.shell.notebook import notebook_widget
from widgets.shell.plot import counted
from widgets.shell.spec import Challenge, Guess, Progress, Spec, Verdict

LABELS = {field: f"{title[0].upper()}{title[1:]}" for field, title in TITLES.items()}


def verdict(state: State) -> Verdict:
    """Say in one or two sentences what this set of levers achieves."""
    end = state.everything
    if isinstance(end, str):
        return Verdict(f"The server does not start: {end.split(': ')[0]}.", "broken")
    if end is None:
        return Verdict("Still serving the requests.", "tight")
    wait = apart(end.inter_token_latency * 1e3, state.level * 1e3)
    rate = rate_words(end)
    trouble = state.trouble(end)
    if trouble == "late":
        words = f"{_last(state)}Too slow: a client waits {wait} ms for a token, and the limit is {state.level * 1e3:g}."
        return Verdict(words, "broken")
    if trouble == "preempts":
        lost = counted(end.preemptions, "preemption")
        words = f"The KV cache is full: {lost}, and each preempted request starts over. It makes {rate}."
        return Verdict(words, "broken")
    return Verdict(f"{_last(state)}{rate}, and a client waits {wait} ms for a token.", "fine")


def _last(state: State) -> str:
    """Say what the most dependent lever buys in the reverse order, or return "" if that is about the same."""
    row = most_dependent(state)
    if row is None:
        return ""
    forth, back = (factor_words(step.factor or 0) for step in row.steps)
    place = "Switched on last" if row is state.on[0] else "Switched on after the levers below it"
    return f"{place}, {'the ' * (row.field == 'kv_cache')}{row.title} buys ×{back}, not ×{forth}. "


def command(state: State) -> str:
    """Write the `vllm serve` line, with comments for levers that have no flag."""
    on = {row.field for row in state.on}
    flags = ["vllm serve meta-llama/Llama-3.1-8B", f"--max-model-len {MAX_MODEL_LEN[state.requests]}"]
    flags += [f"--max-num-seqs {state.slots}"]
    flags += [with_it if field in on else without for field, (with_it, without) in FLAGS.items()]
    notes = [f"# one {state.gpu}" if "tensor_parallel" not in on else f"# two {state.gpu}"]
    notes += [f"# {words}" for field, words in NO_FLAG.items() if field not in on]
    notes += ["# --quantization awq takes a checkpoint with AWQ's 4-bit weights"] * ("weight_bits" in on)
    return "\n".join([*notes, " ".join(flag for flag in flags if flag)])


FLAGS = {
    "chunked_prefill": ("--enable-chunked-prefill", "--no-enable-chunked-prefill"),
    "prefix_caching": ("--enable-prefix-caching", "--no-enable-prefix-caching"),
    "kv_dtype": ("--kv-cache-dtype fp8", ""),
    "weight_bits": ("--quantization awq", ""),
    "speculative_tokens": ("""--speculative-config '{"method": "ngram", "num_speculative_tokens": 3}'""", ""),
    "tensor_parallel": ("--tensor-parallel-size 2", ""),
    "cuda_graphs": ("", "--enforce-eager"),
}
"""The flag with each lever, and without it."""
NO_FLAG = {
    "kv_cache": "no KV cache: vLLM always has one",
    "paging": "no paging: vLLM always pages",
    "continuous_batching": "static batches: vLLM has continuous batching only",
    "flash_attention": "scores in memory: all attention backends of vLLM are fused",
    "gqa": "no grouped heads: that is another model",
}


FIRST, ELEVENTH = ("paging", "continuous_batching"), "cuda_graphs"
WAIT = 30
"""Milliseconds between tokens that the challenges allow, whatever the limit is."""


def _fast_enough(state: State, rate: float, levers: int) -> Progress:
    """Check that L4s reach this rate with at most WAIT between tokens and at most this many levers."""
    end = state.everything
    count = len(state.on)
    if state.gpu != "L4":
        return Progress(False, f"This runs on the {state.gpu}.", "Use an L4.")
    if not isinstance(end, LeverResult):
        return _not_running(state)
    wait = end.inter_token_latency * 1e3
    words = f"{count} levers, {rate_words(end)}, {apart(wait, WAIT)} of {WAIT} ms between tokens."
    met = end.tokens_per_second >= rate and wait <= WAIT and count <= levers
    return Progress(met, words, _too_many(state) if count > levers else _too_slow(state, wait > WAIT))


def _too_many(state: State) -> str:
    """Return advice on which lever to switch off."""
    gains = {row.field: max(step.factor or 1 for step in row.steps) for row in state.on}
    least = min(gains, key=lambda field: gains[field])
    return f"Switch off a lever: {TITLES[least]} buys at most ×{factor_words(gains[least])} here, in either order."


def _too_slow(state: State, late: bool) -> str:
    if not state.levers.kv_cache:
        return "Switch on the KV cache: without it, every step computes all earlier tokens again."
    read = weight_bytes(state.levers) / get_hardware(state.gpu).bandwidth * 1e3
    if late and state.levers.tensor_parallel == 1:
        return f"Switch on two GPUs: a token waits for a step, and one {state.gpu} reads the weights in {read:.0f} ms."
    if late and state.levers.weight_bits == 16:
        return f"Switch on 4-bit weights: a token waits for a step, and reading the weights takes {read:.0f} ms of it."
    if late:
        return "Lower the requests at once, or what a step reads for each: the step is too long."
    if isinstance(state.everything, LeverResult) and state.everything.mean_batch < state.slots / 4:
        return "Switch on levers that let requests in sooner or make room for more: most seats stay empty."
    return "Raise the requests at once: they share one read of the weights, and there is time left between tokens."


def _not_running(state: State) -> Progress:
    if state.everything is None:
        return Progress(False, "Still serving the requests.")
    return Progress(False, "The server does not start.", "Make room with fewer bits, grouped heads or a second GPU.")


def _ranking_turned_over(state: State) -> Progress:
    missing = [TITLES[field] for field in (*FIRST, ELEVENTH) if field not in {row.field for row in state.on}]
    if missing:
        return Progress(False, f"Off: {', '.join(missing)}.", "Switch it on: a lever that is off has no rank.")
    paging, batching, graphs = (state.factor(field) for field in (*FIRST, ELEVENTH))
    if paging is None or batching is None or graphs is None:
        advice = "Change the requests or the GPU: without all levers there is too little memory for them."
        return Progress(False, "The server does not start at some rank.", advice)
    first = paging * batching
    words = f"Paging and continuous batching buy ×{first:.3f} together, CUDA graphs ×{graphs:.3f}."
    return Progress(abs(first - 1) < 0.05 and graphs >= 2, words, _advice_for_ranking(state, first, graphs))


def _advice_for_ranking(state: State, first: float, graphs: float) -> str:
    if abs(first - 1) >= 0.05:
        return "Lower the requests at once: a single request shares no memory and waits for no other."
    if graphs < 2 and state.gpu != GPUS[-1]:
        return f"Use a faster GPU: on the {state.gpu} a step takes long compared with its kernel launches."
    return "Switch on levers that shorten the step: it still takes long compared with its kernel launches."


CHALLENGES = (
    Challenge(
        goal=f"Easy: on L4s, serve at least 1,500 tokens/s with at most {WAIT} ms between tokens.",
        check=partial(_fast_enough, rate=1500, levers=len(FIELDS)),
        lesson="More at once buys throughput while a step stays short, and it stays short if a GPU reads little.",
    ),
    Challenge(
        goal="The list puts paging and continuous batching first and second, and CUDA graphs eleventh. Find a "
        "server on which the first two together change throughput by less than 5 %, in the list's order, while "
        "CUDA graphs at least double it.",
        check=_ranking_turned_over,
        lesson="A ranking of levers is a ranking for one load on one machine, in one order.",
    ),
    Challenge(
        goal=f"Hard: on L4s, serve at least 450 tokens/s with at most {WAIT} ms between tokens and at most five "
        "levers.",
        check=partial(_fast_enough, rate=450, levers=5),
        lesson="A step takes at least bytes ÷ bandwidth. Two levers cut the weights' bytes, speculation gets several "
        "tokens from one read, and the others fill the batch.",
    ),
)
GUESS = Guess(
    question="Switched on first, the KV cache buys × 2.26. How much does it buy when switched on last?",
    options=("less than × 1", "the same × 2.26", "about × 5", "more than × 15"),
    right=3,
    because="Without it, each step recomputes every context, which leaves the others little to speed up. That "
    "arithmetic even turns 4-bit weights into a loss.",
)
PRESETS = {
    "All off": dict.fromkeys(FIELDS, False),
    "Does not start": {"requests": "code", "gqa": False, "kv_dtype": False, "weight_bits": False},
    "Cache full": {"slots": 32, "level": 200, "gqa": False, "kv_dtype": False, "weight_bits": False},
}


SPEC = Spec(
    name="optimization_catalog",
    title="Which lever bought what",
    lead="Switch levers, or drag “at once”: what a lever buys depends on the load, and on what is already on.",
    knobs={
        "The server": {
            "gpu": choice("GPU", GPUS, START["gpu"], "rates from the data sheet, modelled"),
            "requests": choice("Requests", [(words, key) for key, words in REQUESTS.items()], START["requests"]),
            "slots": steps("At once", SLOTS, START["slots"], "max_num_seqs: requests that may run at once"),
            "level": steps(
                "Gap limit",
                [(f"{level} ms", level) for level in LEVELS],
                START["level"],
                "mean time between a request's tokens, the first counted from admission",
            ),
        },
        "The levers": {field: switch(LABELS[field], START[field], ACTS[field]) for field in FIELDS},
    },
    presets=PRESETS,
    sweep=sweep,
    figure=figure,
    verdict=verdict,
    command=command,
    challenges=CHALLENGES,
    starts=lambda state: not isinstance(state.everything, str),
    mends=("weight_bits", "kv_dtype", "gqa", "tensor_parallel", "gpu"),
    guess=GUESS,
)


def show(**knobs: Any) -> Live:
    """Show the widget, with any knobs set: `show(gpu="H100", slots=1)`."""
    return notebook_widget(SPEC, **knobs)
