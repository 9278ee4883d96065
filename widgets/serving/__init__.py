"""Lesson 06's widget: what clients see of a model on several GPUs over the rate, and which layout bears most.

The engine's own scheduler decides every step, under a virtual clock; a step's time is that of
`minivllm_simulate.levers`, with the all-reduces of tensor parallelism. What is left out: tokenizer, event loop,
sockets.

The picture in the lesson's text: `uv run python -P -m widgets serving lessons/figures/06_layouts.svg`
"""

from __future__ import annotations

import shlex
from typing import Any

from minivllm_simulate.known_models import CONFIGS
from minivllm_simulate.layouts import MAX_MODEL_LEN, PLACES, TOKEN_BUDGET, Layout
from widgets.serving.figure import cause_words, figure
from widgets.serving.reader import read_answer
from widgets.serving.runs import RATES
from widgets.serving.state import DPS, GPUS, MODELS, OUTPUTS, PPS, PROMPTS, START, TPS, State, sweep
from widgets.shell.knobs import choice, entry, steps
from widgets.shell.lesson_widget import LessonWidget
from widgets.shell.plot import seconds
from widgets.shell.spec import Challenge, Guess, Progress, Spec, Verdict

NEAR = 0.8
"""Beyond this share of the knee's rate, the next burst may be too much."""


def verdict(state: State) -> Verdict:
    """What this rate means for this layout, in one line."""
    served = state.served
    if wrong := _collector_is_wrong(state):
        return Verdict(wrong, "broken")
    if served.refused:
        return Verdict(f"{state.model} does not fit on {state.gpu} as {state.layout}: {served.refused}.", "broken")
    if state.rate not in served.points:
        return Verdict(f"Requests are being served as {state.layout}, {state.rate:g} a second.", "tight")
    point, causes = served.points[state.rate], served.causes(state.rate)
    saw = (
        f"99 % have their first token within {seconds(point.ttft[1])}, then one every {seconds(point.tpot[1])}; "
        f"{point.inside:.3g} requests are inside"
    )
    if causes:
        why = ", and ".join(cause_words(cause, served) for cause in causes)
        return Verdict(f"{state.rate:g} requests a second are too many for {state.layout}: {why}. {saw}.", "broken")
    knee = served.knee
    if knee and state.rate > NEAR * knee.rate:
        return Verdict(f"It bears this, but little more: it breaks at {knee.rate:.3g}. {saw}.", "tight")
    return Verdict(f"It bears this: {saw}.", "fine")


def _collector_is_wrong(state: State) -> str:
    """What the reader's own collector does that it must not; empty where it is right, or not there."""
    if not state.own:
        return ""
    total = max(2, round(state.work.mean_output))
    for one in state.reads:
        if one.tokens != total:
            return (
                f"Your collector hands over {one.tokens} tokens of {total} to a client that reads every "
                f"{seconds(one.pause)}."
            )
        least = read_answer(total, state.served.points[state.rate].tpot[0] or 1e-3, one.pause).events
        if one.events > 2 * least + 2:
            return (
                f"Your collector makes {one.events} events for a client that reads every {seconds(one.pause)}, where "
                f"{least} would do: what is unread must be joined."
            )
    return ""


def command(state: State) -> str:
    """The server, and the load on it."""
    layout, work = state.layout, state.work
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


def _wanted(state: State, model: str, advice: list[tuple[bool, str]]) -> Progress:
    """A load to be borne by this model on at most 8 H100; `advice` is for what else is asked, the first wrong one."""
    layout = state.layout
    words = f"{state.model} on {layout.gpus} {state.gpu} as {layout}, {state.rate:g} requests a second."
    asked = [
        (state.model != model, f"Model: {model} is asked for."),
        (state.gpu != "H100", "GPU: H100 is asked for."),
        (layout.gpus > 8, f"TP, DP, PP: {layout.gpus} GPUs, and 8 at most are asked for."),
        (bool(state.work.source), "Own lengths: the lengths of the knobs are asked for."),
        *advice,
        (bool(state.served.refused), f"TP: {state.model} does not fit as {layout}. More GPUs must share a layer."),
    ]
    found = next((said for wrong, said in asked if wrong), "")
    if found:
        return Progress(False, words, found)
    if state.rate not in state.served.points:
        return Progress(False, words, "The requests are being served.")
    causes = state.served.causes(state.rate)
    return Progress(not causes, words, _mend(causes, layout) if causes else "")


def _mend(causes: list[str], layout: Layout) -> str:
    """Which knob to turn, where all that was asked for is set and it breaks."""
    if "queue" in causes:
        more = "more replicas (DP) do more work with as many GPUs, since nothing is sent" if layout.tp > 1 else "TP"
        return f"TP, DP: the queue grows. The GPUs must do more: {more}."
    if "tpot" in causes:
        return "TP, DP: tokens take too long. More TP reads the weights faster, more DP makes each batch smaller."
    return "TP, DP: first tokens come too late. A prompt is computed by one engine: cut the layers over more GPUs (TP)."


def _first_tokens(state: State) -> Progress:
    advice = [
        (state.work.prompt < 2048, f"Prompt: {state.work.prompt} tokens, and 2,048 are asked for."),
        (state.served.ttft > 0.05, "First token in: 50 ms are asked for."),
        (state.rate < 5, f"Rate: {state.rate:g} requests a second, and 5 are asked for."),
    ]
    return _wanted(state, "Llama-3.1-8B", advice)


def _bear(state: State, model: str, rate: float) -> Progress:
    """So many requests a second of 512 tokens in and 128 out, within 500 ms and 25 ms."""
    work, served = state.work, state.served
    advice = [
        (work.prompt < 512 or work.output < 128, "Prompt, Output: 512 and 128 tokens are asked for."),
        (served.ttft > 0.5 or served.tpot > 0.025, "First token in, Tokens each: 500 and 25 ms."),
        (state.rate < rate, f"Rate: {state.rate:g} requests a second, and {rate:g} are asked for."),
    ]
    return _wanted(state, model, advice)


CHALLENGES = (
    Challenge(
        "Llama-3.1-8B, prompts of 2,048 tokens, 5 requests a second: 99 % have their first token within 50 ms, on at "
        "most 8 H100.",
        _first_tokens,
        "Alone, a prompt is as fast as the GPUs that share its layers. Replicas would stand idle.",
    ),
    Challenge(
        "Llama-3.1-8B on at most 8 H100: bear 300 requests a second of 512 tokens in and 128 out, within 500 ms to the "
        "first token and 25 ms for each that follows.",
        lambda state: _bear(state, "Llama-3.1-8B", 300),
        "All-reduces take time in every step. Where the service level leaves room, replicas bear more.",
    ),
    Challenge(
        "Meta-Llama-3-70B does not fit on one H100. Bear 20 requests a second on at most 8, 512 tokens in and 128 out, "
        "within 500 and 25 ms.",
        lambda state: _bear(state, "Meta-Llama-3-70B", 20),
        "Below some TP it does not fit; a little above, weights leave too little room, or are read too slowly.",
    ),
)
GUESS = Guess(
    "Four H100 serve Llama-3.1-8B, and a token must come every 7.5 ms. Which layout bears most requests?",
    ("four replicas: TP 1 × DP 4", "TP 2 × DP 2", "all four as one: TP 4 × DP 1"),
    2,
    "Reading all weights takes a GPU 6.4 ms of the 7.5. Four that share them have time left for a larger batch.",
)

# ---- the knobs

TTFTS = [(seconds(limit), limit) for limit in (0.025, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)]
TPOTS = [(seconds(limit), limit) for limit in (0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1)]
KNOBS = {
    "The load": {
        "rate": steps("Rate", [(f"{rate:g}", rate) for rate in RATES], START["rate"], "requests a second, in all"),
        "ttft": steps("First token in", TTFTS, START["ttft"], "the service level: for 99 % of the requests"),
        "tpot": steps("Tokens each", TPOTS, START["tpot"], "the service level: time per output token, for 99 %"),
    },
    "The layout": {
        "tp": steps("TP", list(TPS), START["tp"], "GPUs that share each layer (tensor parallel)"),
        "dp": steps("DP", list(DPS), START["dp"], "engines side by side (data parallel)"),
        "pp": steps("PP", list(PPS), START["pp"], "stages of each engine (pipeline parallel)"),
        "gpu": choice("GPU", list(GPUS), START["gpu"], "whose memory and rates; NVLink where it has it, else PCIe"),
    },
    "The requests": {
        "model": choice("Model", list(MODELS), START["model"], "what is served, in its own 16 bits"),
        "prompt": steps("Prompt", list(PROMPTS), START["prompt"], "tokens of each prompt"),
        "output": steps("Output", list(OUTPUTS), START["output"], "tokens of each answer"),
        "file": entry("Own lengths", "", "a file, or azure-code", "a file, or a workload's name: in place of both"),
    },
}

SPEC = Spec(
    name="serving",
    title="One engine or many: what each layout bears",
    lead="Drag the rate to where clients wait too long. Then give the same GPUs to one engine, or to several.",
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
    guess=GUESS,
    own={"output_collector": "stands between the engine and a client that reads rarely"},
)


def show(**knobs: Any) -> LessonWidget:
    """The widget; `output_collector=` is your own from exercise 06."""
    return LessonWidget(SPEC, **knobs)
