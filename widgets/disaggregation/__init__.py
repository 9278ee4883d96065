"""Show whether separate prefill and decode pools handle a higher rate than the same GPUs doing
both, with the best chunk size.

The engine's own scheduler decides every step of every engine, on one virtual clock.
`minivllm_simulate.layouts` models the time of a step, and `minivllm_simulate.kv_links` that of a
transfer. The proxy, the tokenizer, sockets and handshakes are left out.

Draw the lesson's figure with `uv run python -P -m widgets disaggregation
lessons/figures/08_goodput.svg`.
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
from widgets.shell.advice import Rule, at_least, at_most, progress, use
from widgets.shell.knobs import choice, labelled, steps, switch
from widgets.shell.live import Live
from widgets.shell.notebook import notebook_widget
from widgets.shell.plot import counted_rate, figures, percent, seconds, tokens
from widgets.shell.spec import Challenge, Guess, Progress, Spec, Verdict

ALIKE = 1.05
"""The ratio of two goodputs below which another seed may reverse their order."""
DEFAULT_BUDGET = 8192
"""The default of `vllm serve` v0.33.0 on an H100."""


def verdict(state: State) -> Verdict:
    """Say in one or two sentences whether two pools handle this rate, and how they compare with
    GPUs that do both.
    """
    mine = state.mine
    if state.rate not in mine.points:
        return Verdict(f"Still serving the requests at {state.rate:g} a second.", "tight")
    share = f"{percent(mine.share(state.rate))} are in time"
    if mine.breaks(state.rate):
        why = cause_words(mine.cause_at(state.rate), state)
        too_many = f"At {counted_rate(state.rate)}, {mine.name} GPUs (prefill + decode) break"
        if mine.share(state.rate) >= SHARE:
            first = f"Of the first {state.work.counted} requests, {share}, then fewer and fewer"
            return Verdict(f"{too_many} in the long run: {why}. {first}.", "broken")
        cope = state.known and state.both.goodput >= state.rate
        others = f"; {state.both.name} still handle this" if cope else ""
        return Verdict(f"{too_many}: {why}. {share}{others}.", "broken")
    if not state.known:
        return Verdict(f"{mine.name} handle this: {share}.", "tight")
    return _compared(state, share)


def _compared(state: State, share: str) -> Verdict:
    mine, both = state.mine, state.both
    pools = f"{mine.name} handle {figures(mine.goodput)} a second"
    combined = f"{both.gpus} that do both, in chunks of {tokens(both.budget)}, handle {figures(both.goodput)}"
    if state.gain >= ALIKE:
        times = f" That is {state.gain:.2f} times as much." if state.gain < math.inf else ""
        return Verdict(f"Two pools pay: {pools}, and {combined}.{times} Here {share}.", "fine")
    if state.gain <= 1 / ALIKE:
        why = cause_words(mine.cause, state)
        return Verdict(f"Two pools lose: {pools} before {why}, and {combined}. Here {share}.", "tight")
    return Verdict(f"It makes no difference: {pools}, and {combined}. Here {share}.", "tight")


def command(state: State) -> str:
    """Write the commands of the prefill and decode servers and of their proxy, with that of the
    load as a comment.
    """
    name = shlex.quote(next(name for name in CONFIGS if name.endswith(f"/{state.model}")))
    mine, work = state.mine, state.work
    many = {"prefill": mine.prefill, "decode": mine.decode}
    urls = {kind: " ".join(f"http://{kind}{n + 1}:8000" for n in range(count)) for kind, count in many.items()}
    goal = f"ttft:{state.objective.ttft * 1e3:g} tpot:{state.objective.tpot * 1e3:g}"
    return "\n".join(
        [
            f"# On {many['prefill']} of {mine.gpus} x {state.gpu}, linked by {state.link}; "
            f"VLLM_NIXL_SIDE_CHANNEL_HOST is each server's own address:",
            f"vllm serve {name} --max-num-batched-tokens {PREFILL_BUDGET} {_transfer('kv_producer')}",
            f"# On the other {many['decode']}:",
            f"vllm serve {name} {_transfer('kv_consumer')}",
            "# In front of them, the proxy that clients connect to:",
            f"minivllm proxy --prefill {urls['prefill']} --decode {urls['decode']}",
            f"# vllm bench serve --model {name} --dataset-name random --random-input-len {work.prompt} \\",
            f"#   --random-output-len {work.output} --ignore-eos --request-rate {state.rate:g} --goodput {goal}",
        ]
    )


def _transfer(role: str) -> str:
    settings = {"kv_connector": "NixlConnector", "kv_role": role}
    return f"--kv-transfer-config {shlex.quote(json.dumps(settings))}"


# ---- the challenges


def _progress(
    state: State, rules: list[Rule], met: bool, words: str, advice: str, model: str = "Llama-3.1-8B"
) -> Progress:
    return progress(
        words,
        use(model, state.model == model),
        use("an H100", state.gpu == "H100"),
        use("4 GPUs in all, prefill and decode together", state.mine.gpus == 4),
        *rules,
        (not state.known, "Wait: the requests are still being served."),
        (not met, advice),
    )


def _words(state: State) -> str:
    gain = f"; {state.gain:.2f} times what these GPUs handle if all do both" if state.known else ""
    return f"{state.mine.name} {state.gpu} over {state.link}{gain}."


def _untuned(state: State) -> Progress:
    rules = [
        at_least("the prompt", state.work.prompt, 1024, tokens),
        use(f"chunks of {tokens(DEFAULT_BUDGET)}, vLLM's default", state.budget == DEFAULT_BUDGET),
        (state.mine.goodput == 0, "Raise the TTFT limit: no request is in time at any rate."),
    ]
    advice = "Lower the TPOT limit and raise decode: steps with a whole prompt in them become too long."
    return _progress(state, rules, state.gain >= 1.5, _words(state), advice)


def _close(state: State) -> Progress:
    rules = [
        at_least("the prompt", state.work.prompt, 2048, tokens),
        use("the best chunks", state.budget == TUNED),
        (state.mine.goodput == 0, "Raise the TTFT limit or the TPOT limit: no request is in time at any rate."),
    ]
    advice = "Lower the output, raise prefill and lower decode, and raise the TTFT limit so that prompts can wait."
    return _progress(state, rules, state.gain >= 0.8, _words(state), advice)


def _slow_link(state: State) -> Progress:
    mine = state.mine
    words = f"{mine.name} over {state.link}, {'layer by layer' if state.layer_wise else 'whole prompts'}."
    rules = [
        at_least("the prompt", state.work.prompt, 2048, tokens),
        at_least("the output", state.work.output, 64),
        use("a link of at most 25 Gb/s", LINKS[state.link].bandwidth <= 25e9 / 8),
        at_most("the TTFT limit", state.objective.ttft, 0.2, seconds),
        at_least("the rate", state.rate, 5),
    ]
    point = mine.points.get(state.rate)
    advice = {
        "tpot": "Raise the TPOT limit or decode: tokens come too late.",
        "queue": "Raise prefill: prompts wait for a GPU.",
    }.get(
        point.cause(state.objective) if point else "",
        "Send layer by layer, and balance prefill and decode: each GPU has its own link.",
    )
    return _progress(state, rules, bool(point) and not mine.breaks(state.rate), words, advice, "Qwen3-14B")


CHALLENGES = (
    Challenge(
        "Four H100s, Llama-3.1-8B, prompts of 1,024 tokens or more, vLLM's chunk of 8,192: find where two pools handle "
        "1.5 times what four GPUs that do both handle.",
        _untuned,
        "Where the TPOT limit is tight, a whole prompt in a decode step costs goodput. Two pools need no budget.",
    ),
    Challenge(
        "The same four GPUs, prompts of 2,048 tokens or more, the best chunk: find where two pools handle at least 0.8 "
        "times what four GPUs that do both handle.",
        _close,
        "A chunk that fits into the time a step waits for memory is free. Two pools give that up, and lose least where "
        "prompts may wait and there is little to decode.",
    ),
    Challenge(
        "Take four H100s, Qwen3-14B, prompts of 2,048 tokens, 64 out, and links of 25 Gb/s. Handle 5 requests a second "
        "with first tokens within 200 ms.",
        _slow_link,
        "A transfer that is longer than the prefill cannot be hidden. Layer by layer, clients only see the excess.",
    ),
)
GUESS = Guess(
    "Each output token may take only 7.5 ms. Two GPUs that prefill and two that decode, or four that do both in chunks "
    "of the best size: which handle more?",
    (
        "the four that do both, about twice as much",
        "about the same",
        "two and two, by a third",
        "two and two, twice as much",
    ),
    0,
    "A decode step waits for memory, and meanwhile computes a chunk of some 200 tokens for free. So all four "
    "GPUs prefill on the side, and with two pools only two of them prefill at all. Try vLLM's default chunk of 8,192.",
)

# ---- the knobs

TTFTS = [(seconds(limit), limit) for limit in (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)]
TPOTS = [(seconds(limit), limit) for limit in (0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1)]
COUNTS = list(range(1, MOST_OF_A_KIND + 1))
KNOBS = {
    "The load": {
        "rate": steps("Rate", [(f"{rate:g}/s", rate) for rate in RATES], START["rate"], "requests a second, in all"),
        "ttft": steps("TTFT limit", TTFTS, START["ttft"], f"of {percent(SHARE)} of the first tokens"),
        "tpot": steps("TPOT limit", TPOTS, START["tpot"], "time per output token"),
    },
    "The GPUs": {
        "prefill": steps("Prefill", COUNTS, START["prefill"], "GPUs that compute prompts"),
        "decode": steps("Decode", COUNTS, START["decode"], "GPUs that generate tokens"),
        "link": steps("Link", list(LINKS), START["link"], "of each GPU, for keys and values"),
        "layer_wise": switch("Layer by layer", START["layer_wise"], "send a layer as soon as it is computed"),
        "budget": steps(
            "Chunks", [("best", TUNED), *labelled(BUDGETS, tokens)], START["budget"],
            "tokens per step of the GPUs that do both: max_num_batched_tokens",
        ),
        "gpu": choice("GPU", list(GPUS), START["gpu"], "memory and rates"),
    },
    "The requests": {
        "model": choice("Model", list(MODELS), START["model"], "one engine on each GPU, in 16 bits"),
        "prompt": steps("Prompt", labelled(PROMPTS, tokens), START["prompt"], "tokens of each prompt"),
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
        "An untuned chunk": {"budget": DEFAULT_BUDGET, "rate": 28.0},
    },
    sweep=sweep,
    figure=figure,
    verdict=verdict,
    command=command,
    challenges=CHALLENGES,
    guess=GUESS,
    own={"connector": "decides which requests wait and whose blocks are kept"},
)


def show(**knobs: Any) -> Live:
    """Show the widget; `connector=` takes your `ConnectorScheduler` from exercise 08."""
    return notebook_widget(SPEC, **knobs)
