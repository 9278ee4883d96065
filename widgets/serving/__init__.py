"""Show the latencies that clients see as the rate grows, for a model on several GPUs, and which
layout handles the highest rate.

The engine's own scheduler decides every step, on a virtual clock. `minivllm_simulate.levers` models
the time of a step, including the all-reduces of tensor parallelism. The tokenizer, the event loop
and sockets are left out.

Draw the lesson's figure with `uv run python -P -m widgets serving lessons/figures/06_layouts.svg`.
"""

from __future__ import annotations

import math
import shlex
from typing import Any

from minivllm_simulate.known_models import CONFIGS
from minivllm_simulate.layouts import MAX_MODEL_LEN, PLACES, TOKEN_BUDGET, Layout
from widgets.serving.figure import cause_words, figure, per_second
from widgets.serving.reader import read_answer
from widgets.serving.runs import RATES
from widgets.serving.state import DPS, GPUS, MODELS, OUTPUTS, PPS, PROMPTS, START, TPS, State, sweep
from widgets.shell.advice import at_least, at_most, progress, use
from widgets.shell.knobs import choice, entry, steps
from widgets.shell.live import Live
from widgets.shell.notebook import notebook_widget
from widgets.shell.plot import counted_rate, figures, seconds
from widgets.shell.spec import Challenge, Guess, Progress, Spec, Verdict

NEAR = 0.8
"""The share of the knee's rate from which the next burst may be too much."""


def verdict(state: State) -> Verdict:
    """Say in one or two sentences whether this layout handles this rate."""
    served = state.served
    if error := _collector_error(state):
        return Verdict(error, "broken")
    if served.refused:
        return Verdict(f"{state.model} does not fit on {state.gpu} as {state.layout}: {served.refused}.", "broken")
    if state.rate not in served.points:
        return Verdict(f"Still serving the requests as {state.layout} at {state.rate:g} a second.", "tight")
    point = served.points[state.rate]
    most = _most(state)
    causes = served.causes(state.rate)
    first, later = f"their first token within {seconds(point.ttft[1])}", f"a token every {seconds(point.tpot[1])}"
    latencies = f"99 % have {first if 'ttft' in causes else later}"
    if causes:
        why = ", ".join(cause_words(cause, served) for cause in causes)
        words = f"{most}At {counted_rate(state.rate)}, {state.layout} is too slow: {why}."
        return Verdict(words + f" {latencies}." * ("queue" not in causes), "broken")
    if served.knee and state.rate > NEAR * served.knee.rate:
        little = f"It handles this, but little more: it breaks at {figures(served.knee.rate)}"
        return Verdict(f"{most}{little}. {latencies}.", "tight")
    return Verdict(f"{most}It handles this: {latencies}.", "fine")


def _most(state: State) -> str:
    """Name the layout that handles the most, and what this one handles, once both are known."""
    best = max(state.others, key=lambda other: (other.goodput, other is state.served))
    if not state.complete or len(state.others) == 1 or not RATES[0] < best.goodput < RATES[-1]:
        return ""
    own = f"; {state.layout}: {per_second(state.served.goodput)}" if best is not state.served else ""
    return f"{best.layout} handles the most, {per_second(best.goodput)}{own}. "


def _collector_error(state: State) -> str:
    """Explain what the reader's collector does wrong, or return ""."""
    if not state.own:
        return ""
    total = max(2, round(state.work.mean_output))
    for read in state.reads:
        every = seconds(read.pause)
        if read.tokens != total:
            return f"Your collector hands only {read.tokens} of {total} tokens to a client that reads every {every}."
        least = read_answer(total, state.served.points[state.rate].tpot[0] or 1e-3, read.pause).events
        if read.events > 2 * least + 2:
            return (
                f"Your collector makes {read.events} events for a client that reads every {every}, where {least} would "
                "do: merge what the client has not read yet."
            )
    return ""


def command(state: State) -> str:
    """Write the server's command, with that of the load as a comment."""
    layout = state.layout
    work = state.work
    name = next(name for name in CONFIGS if name.endswith(f"/{state.model}"))
    lengths = f"--random-input-len {work.mean_prompt:.0f} --random-output-len {work.mean_output:.0f}"
    goal = f"--goodput ttft:{state.served.ttft * 1e3:g} tpot:{state.served.tpot * 1e3:g}"
    stages = f"--pipeline-parallel-size {layout.pp} " * (layout.pp > 1)
    limits = f"--max-model-len {MAX_MODEL_LEN} --max-num-seqs {PLACES} --max-num-batched-tokens {TOKEN_BUDGET}"
    return "\n".join(
        [
            f"# On {layout.gpus} x {state.gpu}{'; it refuses to start' * bool(state.served.refused)}. The load:",
            f"# vllm bench serve --model {name} --dataset-name random {lengths} --ignore-eos \\",
            f"#   --request-rate {state.rate:g} --num-prompts {max(120, round(60 * state.rate))} {goal}",
            f"vllm serve {shlex.quote(name)} --tensor-parallel-size {layout.tp} {stages}"
            f"--data-parallel-size {layout.dp} {limits}",
        ]
    )


# ---- the challenges


def _progress(
    state: State, model: str, rate: float, prompt: int, ttft: float, output: int = 0, tpot: float = math.inf
) -> Progress:
    """Check a challenge for this model on at most 8 H100s: this rate, lengths and limits."""
    layout = state.layout
    served = state.served
    known = state.rate in served.points
    causes = served.causes(state.rate) if known else []
    return progress(
        f"{state.model} on {layout.gpus} {state.gpu} as {layout}, {state.rate:g} requests a second.",
        use(model, state.model == model),
        use("an H100", state.gpu == "H100"),
        at_most("TP × DP × PP", layout.gpus, 8),
        (bool(state.work.source), "Clear your own lengths."),
        at_least("the prompt", state.work.prompt, prompt),
        at_least("the output", state.work.output, output),
        at_most("the TTFT limit", served.ttft, ttft, seconds),
        at_most("the TPOT limit", served.tpot, tpot, seconds),
        at_least("the rate", state.rate, rate),
        (bool(served.refused), f"Raise TP so that more GPUs share a layer: as {layout}, {state.model} does not fit."),
        (not known, "Wait: the requests are still being served."),
        (bool(causes), _advice(causes, layout)),
    )


def _advice(causes: list[str], layout: Layout) -> str:
    """Return advice on which knob to turn when the load is right but the layout breaks."""
    if "queue" in causes:
        more = "raise DP: replicas exchange nothing, so the same GPUs do more work" if layout.tp > 1 else "raise TP"
        return f"The queue grows, so {more}."
    if "tpot" in causes:
        return "Tokens take too long: raise TP to read the weights faster, or DP to make each batch smaller."
    return "First tokens come too late: raise TP, because one engine computes each prompt."


CHALLENGES = (
    Challenge(
        "Serve Llama-3.1-8B on at most 8 H100s, with prompts of 2,048 tokens at 5 requests a second, so that 99 % have "
        "their first token within 50 ms.",
        lambda state: _progress(state, "Llama-3.1-8B", 5, 2048, 0.05),
        "A single prompt is only as fast as the GPUs that share its layers. Replicas would stand idle.",
    ),
    Challenge(
        "Handle 300 requests a second of 512 tokens in and 128 out with Llama-3.1-8B on at most 8 H100s, within 500 ms "
        "to the first token and 25 ms for each later one.",
        lambda state: _progress(state, "Llama-3.1-8B", 300, 512, 0.5, 128, 0.025),
        "All-reduces cost time in every step. So where the limits leave room, replicas handle more.",
    ),
    Challenge(
        "Meta-Llama-3-70B does not fit on one H100. Handle 20 requests a second on at most 8, with 512 tokens in and "
        "128 out, within 500 ms and 25 ms.",
        lambda state: _progress(state, "Meta-Llama-3-70B", 20, 512, 0.5, 128, 0.025),
        "With too little TP it does not fit; with a little more, weights leave too little room or are read too slowly.",
    ),
)
GUESS = Guess(
    "Four H100s serve Llama-3.1-8B, with at most 7.5 ms per output token. Which layout handles the most requests?",
    ("four replicas: TP 1 × DP 4", "TP 2 × DP 2", "all four as one: TP 4 × DP 1"),
    2,
    "Alone, a GPU reads weights for 5.3 of the 7.5 ms. Four read a quarter each, and have time for a larger batch.",
)

# ---- the knobs

TTFTS = [(seconds(limit), limit) for limit in (0.025, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)]
TPOTS = [(seconds(limit), limit) for limit in (0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1)]
KNOBS = {
    "The load": {
        "rate": steps("Rate", [(f"{rate:g}/s", rate) for rate in RATES], START["rate"], "requests a second, in all"),
        "ttft": steps("TTFT limit", TTFTS, START["ttft"], "time to first token of 99 % of the requests"),
        "tpot": steps("TPOT limit", TPOTS, START["tpot"], "time per output token of 99 % of the requests"),
    },
    "The layout": {
        "tp": steps("TP", list(TPS), START["tp"], "GPUs that share each layer (tensor parallel)"),
        "dp": steps("DP", list(DPS), START["dp"], "engines side by side (data parallel)"),
        "pp": steps("PP", list(PPS), START["pp"], "stages of each engine (pipeline parallel)"),
        "gpu": choice("GPU", list(GPUS), START["gpu"], "linked by NVLink where it has it, else by PCIe"),
    },
    "The requests": {
        "model": choice("Model", list(MODELS), START["model"], "served in 16 bits"),
        "prompt": steps("Prompt", list(PROMPTS), START["prompt"], "tokens of each prompt"),
        "output": steps("Output", list(OUTPUTS), START["output"], "tokens of each answer"),
        "file": entry("Own lengths", "", "a file, or azure-code", "a file or a workload's name replaces both"),
    },
}

SPEC = Spec(
    name="serving",
    title="One engine or many: what each layout handles",
    lead="Drag the rate to where clients wait too long. Then split the same GPUs among one engine or several.",
    knobs=KNOBS,
    presets={
        "Too many requests": {"rate": 150.0},
        "Too large a model": {"model": "Meta-Llama-3-70B"},
        "In a hurry": {"tpot": 0.005},
        "Cut in four": {"tp": 4, "dp": 1, "rate": 100.0},
    },
    sweep=sweep,
    figure=figure,
    verdict=verdict,
    command=command,
    challenges=CHALLENGES,
    starts=lambda state: not state.served.refused,
    mends=("tp", "pp", "gpu", "model"),
    guess=GUESS,
    own={"output_collector": "merges output for a client that reads rarely"},
)


def show(**knobs: Any) -> Live:
    """Show the widget; `output_collector=` takes your class from exercise 06."""
    return notebook_widget(SPEC, **knobs)
