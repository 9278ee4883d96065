"""Lesson 08's widget: whether two pools of GPUs bear more than one with the best chunk, over the rate.

The engine's own scheduler decides every step of every engine, on one virtual clock; a step's time is that of
`minivllm_simulate.layouts`, a transfer's that of `minivllm_simulate.kv_links`. What is left out: proxy, tokenizer,
sockets, handshakes.

The picture in the lesson's text: `uv run python -P -m widgets disaggregation lessons/figures/08_goodput.svg`
"""

from __future__ import annotations

import json
import math
import shlex
from typing import Any

from minivllm_lab.disaggregation.goodput import PREFILL_BUDGET, SHARE
from minivllm_simulate.known_models import CONFIGS
from minivllm_simulate.kv_links import LINKS
from widgets.disaggregation.figure import cause_words, figure
from widgets.disaggregation.state import (
    BUDGETS,
    GPUS,
    MODELS,
    MOST_OF_A_KIND,
    OUTPUTS,
    PROMPTS,
    RATES,
    START,
    TUNED,
    State,
    sweep,
)
from widgets.shell.knobs import choice, steps, switch
from widgets.shell.lesson_widget import LessonWidget
from widgets.shell.plot import seconds, tokens
from widgets.shell.spec import Challenge, Guess, Progress, Spec, Verdict

ALIKE = 1.05
"""Below this ratio of two goodputs, another seed may turn it round."""
LINK_NAMES = tuple(LINKS)
DEFAULT_BUDGET = 8192
"""Of `vllm serve` v0.33.0 on an H100."""


def verdict(state: State) -> Verdict:
    """What this rate means for the two pools, and what they are against one, in one line."""
    mine = state.mine
    if mine.refused:
        return Verdict(f"{state.model} does not fit on {state.gpu}: {mine.refused}.", "broken")
    if state.rate not in mine.points:
        return Verdict(f"Requests are being served, {state.rate:g} a second.", "tight")
    share = f"{mine.share(state.rate):.0%} are in time"
    if mine.breaks(state.rate):
        why, too_many = cause_words(mine.cause_at(state.rate), state), f"{state.rate:g} requests a second are too many"
        if mine.share(state.rate) >= SHARE:
            share = f"Of the first {state.work.counted} requests {share}, and then fewer and fewer"
            return Verdict(f"{too_many} for {mine.name} in the long run: {why}. {share}.", "broken")
        return Verdict(f"{too_many} for {mine.name}: {why}. {share}.", "broken")
    if not state.known:
        return Verdict(f"{mine.name} bear this: {share}.", "tight")
    return _compared(state, share)


def _compared(state: State, share: str) -> Verdict:
    mine, both = state.mine, state.both
    chunks = f"in chunks of {tokens(both.budget)}"
    bears = f"{mine.name} bear {mine.goodput:.3g} a second, and {both.gpus} that do both, {chunks}, {both.goodput:.3g}"
    if state.gain >= ALIKE:
        times = f"{state.gain:.2f} times as much" if state.gain < math.inf else "more than nothing"
        return Verdict(f"Two pools pay: {bears}, so {times}. Here {share}.", "fine")
    if state.gain <= 1 / ALIKE:
        why = cause_words(mine.cause, state)
        return Verdict(f"Two pools lose: {bears}. Then {why}. Here {share}.", "tight")
    return Verdict(f"It makes no difference: {bears}. Here {share}.", "tight")


def command(state: State) -> str:
    """Both kinds of servers, the proxy before them, and the load."""
    name = shlex.quote(next(name for name in CONFIGS if name.endswith(f"/{state.model}")))
    mine, work = state.mine, state.work
    many = {"prefill": mine.prefill, "decode": mine.gpus - mine.prefill}
    urls = {
        kind: " ".join(f"http://{kind}{index}:8000" for index in range(1, count + 1)) for kind, count in many.items()
    }
    goal = f"ttft:{state.objective.ttft * 1e3:g} tpot:{state.objective.tpot * 1e3:g}"
    return "\n".join(
        [
            f"# On {many['prefill']} of {mine.gpus} x {state.gpu}, linked by {state.link}; "
            f"VLLM_NIXL_SIDE_CHANNEL_HOST is its own address:",
            f"vllm serve {name} --max-num-batched-tokens {PREFILL_BUDGET} {_transfer('kv_producer')}",
            f"# On the other {many['decode']}:",
            f"vllm serve {name} {_transfer('kv_consumer')}",
            "# In front of them, where requests come in:",
            f"minivllm proxy --prefill {urls['prefill']} --decode {urls['decode']}",
            f"# vllm bench serve --model {name} --dataset-name random --random-input-len {work.prompt} \\",
            f"#   --random-output-len {work.output} --ignore-eos --request-rate {state.rate:g} --goodput {goal}",
        ]
    )


def _transfer(role: str) -> str:
    settings = {"kv_connector": "NixlConnector", "kv_role": role}
    return f"--kv-transfer-config {shlex.quote(json.dumps(settings))}"


# ---- the challenges


def _wanted(
    state: State, asked: list[tuple[bool, str]], met: bool, words: str, mend: str, model: str = "Llama-3.1-8B"
) -> Progress:
    """`asked` is what the goal fixes, the first wrong one is said; `mend` is the advice where all that is right."""
    fixed = [
        (state.model != model, f"Model: {model} is asked for."),
        (state.gpu != "H100", "GPU: H100 is asked for."),
        (state.mine.gpus != 4, f"Prefill, Decode: {state.mine.gpus} GPUs, and 4 are asked for."),
        *asked,
    ]
    wrong = next((said for is_wrong, said in fixed if is_wrong), "")
    if wrong:
        return Progress(False, words, wrong)
    if not state.known:
        return Progress(False, words, "The requests are being served.")
    return Progress(met, words, "" if met else mend)


def _words(state: State) -> str:
    known = f"; {state.gain:.2f} times what as many bear that do both" if state.known and not state.mine.refused else ""
    return f"{state.mine.name} {state.gpu} over {state.link}{known}."


def _untuned(state: State) -> Progress:
    asked = [
        (state.work.prompt < 1024, f"Prompt: use 1K or more (now {tokens(state.work.prompt)})."),
        (state.budget != DEFAULT_BUDGET, f"Chunks: use {tokens(DEFAULT_BUDGET)}, vLLM's default."),
        (state.mine.goodput == 0, "First token in: no request is in time at any rate. Give it longer."),
    ]
    mend = "Tokens each, Decode: a step with a whole prompt is long, so ask for each token sooner, and let GPUs decode."
    return _wanted(state, asked, state.gain >= 1.5, _words(state), mend)


def _close(state: State) -> Progress:
    asked = [
        (state.work.prompt < 2048, f"Prompt: use 2K or more (now {tokens(state.work.prompt)})."),
        (state.budget != TUNED, "Chunks: use the best."),
        (state.mine.goodput == 0, "First token in, Tokens each: no request is in time at any rate. Give it longer."),
    ]
    mend = (
        "Prefill, Decode, Output: make answers short, let nearly all GPUs prefill, and leave the prompts time to wait."
    )
    return _wanted(state, asked, state.gain >= 0.8, _words(state), mend)


def _slow_link(state: State) -> Progress:
    mine = state.mine
    words = f"{mine.name} over {state.link}, {'layer by layer' if state.layer_wise else 'whole prompts'}."
    asked = [
        (state.work.prompt < 2048, f"Prompt: {tokens(state.work.prompt)} tokens, and 2,048 are asked for."),
        (state.work.output < 64, f"Output: {state.work.output} tokens, and 64 are asked for."),
        (LINKS[state.link].bandwidth > 25e9 / 8, f"Link: {state.link}, and at most 25 Gb/s are asked for."),
        (state.objective.ttft > 0.2, "First token in: 200 ms are asked for."),
        (state.rate < 5, f"Rate: {state.rate:g} a second, and 5 are asked for."),
    ]
    point = mine.points.get(state.rate)
    mend = {
        "tpot": "Tokens each: they come too late. Give each token longer, or let more GPUs decode.",
        "queue": "Prefill: prompts wait. More of the GPUs must prefill.",
    }.get(
        point.cause(state.objective) if point else "",
        f"Layer by layer, Prefill, Decode: a prompt holds the link for {seconds(state.transfer.seconds)}. Begin while "
        "it is computed, and let as many GPUs receive as send: each brings a link.",
    )
    return _wanted(state, asked, bool(point) and not mine.breaks(state.rate), words, mend, "Qwen3-14B")


CHALLENGES = (
    Challenge(
        "Four H100, Llama-3.1-8B, prompts of 1,024 tokens or more, vLLM's chunk of 8,192: find where two pools bear "
        "1.5 times what the same four bear that do both.",
        _untuned,
        "Where each token's time binds, a whole prompt in a decoding step costs goodput. Two pools need no budget.",
    ),
    Challenge(
        "The same four GPUs, prompts of 2,048 tokens or more, the best chunk: find where two pools bear at least 0.8 "
        "of what the four bear that do both.",
        _close,
        "A chunk that fits into the time a step waits for memory is free. Two pools give that up; least is lost where "
        "prompts may wait and there is little to decode.",
    ),
    Challenge(
        "Four H100, Qwen3-14B, prompts of 2,048 tokens, 64 out, linked by 25 Gb/s: bear 5 requests a second with first "
        "tokens within 200 ms.",
        _slow_link,
        "A transfer that is longer than the prefill cannot be hidden. Layer by layer only the excess is seen.",
    ),
)
GUESS = Guess(
    "A token must come every 7.5 ms. Two GPUs that prefill and two that decode, or four that do both in chunks of the "
    "best size: which bear more?",
    (
        "those that do both, about twice as much",
        "about the same",
        "two and two, by a third",
        "two and two, twice as much",
    ),
    0,
    "A step that decodes waits for memory, and a chunk of some 200 tokens is computed meanwhile. So those that do both "
    "compute prompts all the time, where half of two and two never do. Try vLLM's default chunk of 8,192.",
)

# ---- the knobs

TTFTS = [(seconds(limit), limit) for limit in (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)]
TPOTS = [(seconds(limit), limit) for limit in (0.0075, 0.01, 0.015, 0.025, 0.05, 0.1)]
COUNTS = list(range(1, MOST_OF_A_KIND + 1))
KNOBS = {
    "The load": {
        "rate": steps("Rate", [(f"{rate:g}", rate) for rate in RATES], START["rate"], "requests a second, in all"),
        "ttft": steps("First token in", TTFTS, START["ttft"], f"the service level, for {SHARE:.0%} of the requests"),
        "tpot": steps("Tokens each", TPOTS, START["tpot"], "the service level: time per output token"),
    },
    "The GPUs": {
        "prefill": steps("Prefill", COUNTS, START["prefill"], "GPUs that compute prompts"),
        "decode": steps("Decode", COUNTS, START["decode"], "GPUs that generate"),
        "link": steps("Link", list(LINK_NAMES), START["link"], "of each GPU: keys and values go over it"),
        "layer_wise": switch("Layer by layer", START["layer_wise"], "send a layer as soon as it is computed"),
        "budget": steps(
            "Chunks", [("best", TUNED), *((tokens(one), one) for one in BUDGETS)], START["budget"],
            "tokens in a step of the GPUs that do both: max_num_batched_tokens",
        ),
        "gpu": choice("GPU", list(GPUS), START["gpu"], "whose memory and rates"),
    },
    "The requests": {
        "model": choice("Model", list(MODELS), START["model"], "what is served, one engine on each GPU, in 16 bits"),
        "prompt": steps("Prompt", [(tokens(one), one) for one in PROMPTS], START["prompt"], "tokens of each prompt"),
        "output": steps("Output", list(OUTPUTS), START["output"], "tokens of each answer"),
    },
}  # fmt: skip

SPEC = Spec(
    name="disaggregation",
    title="Two pools or one?",
    lead="Drag the rate to where clients wait too long. Then divide the same GPUs differently, or slow the link.",
    knobs=KNOBS,
    presets={
        "Too many requests": {"rate": 80.0},
        "Too few decode": {"prefill": 3, "decode": 1},
        "A slow link": {"link": "10 Gb/s", "prompt": 2048, "rate": 10.0},
        "No hurry": {"tpot": 0.05, "ttft": 1.0, "rate": 80.0},
        "A chunk that nobody tuned": {"budget": DEFAULT_BUDGET, "rate": 28.0},
    },
    sweep=sweep,
    figure=figure,
    verdict=verdict,
    command=command,
    challenges=CHALLENGES,
    guess=GUESS,
    own={"connector": "decides whom to wait for and whose blocks to keep"},
)


def show(**knobs: Any) -> LessonWidget:
    """The widget; `connector=` is your own `ConnectorScheduler` from exercise 08."""
    return LessonWidget(SPEC, **knobs)
