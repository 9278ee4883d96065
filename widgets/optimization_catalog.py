"""Lesson 05: switch an engine's levers on one after another; what each buys, as a waterfall of tokens per second.

The engine's own scheduler and block pool serve a workload under every set of levers; the time of a step is modelled
(`minivllm.simulate.levers`), for Llama-3.1-8B on a GPU of your choice. Prefix caching has a picture of its own:
`widgets.prefix_caching`.

The picture in the lesson's text: `uv run python -P -m widgets.optimization_catalog lessons/figures/05_levers.svg`
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import ipywidgets

from minivllm.config import ModelConfig
from minivllm.config.checks import require, require_flags
from minivllm.errors import MinivllmError
from minivllm.lab.palette import BLUE, GREEN, INK, VERMILLION
from minivllm.simulate.hardware import get_hardware
from minivllm.simulate.known_models import known_model
from minivllm.simulate.lever_checks import median_error
from minivllm.simulate.levers import (
    LADDER,
    Lever,
    LeverResult,
    Levers,
    LeverWorkload,
    long_and_short,
    shared_chat,
    throughput,
)
from widgets.base import Challenge, LessonWidget, Progress, Verdict, choice, require_numbers, slider, steps
from widgets.svg import MID, QUIET, RULE, SMALL, Box, Drawing, Scale, Segment, ink_on, legend, short, text_width

MODEL = "Llama-3.1-8B"
GPUS = ("H100", "A100", "L4")
WORKLOADS = {"chats": "chats behind one prompt", "mixed": "long and short"}
SLOTS = (1, 2, 4, 8, 16)
RESERVATIONS = (2048, 4096, 8192, 16384)
SHORTER = 4
"""Factor by which answers are shorter than ShareGPT's, to keep redraws fast; their relative spread is unchanged."""
ORDERS = {"ranking": "as the ranking has them", "reversed": "the other way round"}
ON: dict[str, Any] = {rung.field: rung.on for rung in LADDER}
OFF: dict[str, Any] = {rung.field: getattr(Levers(), rung.field) for rung in LADDER}
MOST = {
    "slots": 64,
    "max_model_len": 2**20,
    "acceptance": 1.0,
    "weight_bits": 16,
    "speculative_tokens": 16,
    "tensor_parallel": 64,
}
KV_DTYPES = {"16 bits": "auto", "int8, a scale a head": "int8", "fp8": "fp8"}
SERVER: dict[str, Any] = {
    "gpu": "L4",
    "requests": "chats",
    "slots": 8,
    "max_model_len": 4096,
    "acceptance": 0.6,
    "order": "ranking",
}
START: dict[str, Any] = {**SERVER, **ON, "speculative_tokens": 0, "tensor_parallel": 1}
IN_THE_LESSON: dict[str, Any] = {**ON, "slots": 16}
NOTHING_SEEN = 0.01
"""A lever that changes the throughput by less is drawn as one that buys nothing."""


@dataclass(frozen=True)
class Rung:
    """One lever in its place: what it is set to, and what came of switching it on after those before it."""

    field: str
    title: str
    is_on: bool
    result: LeverResult | None
    """With this lever and all before it; None where the server cannot start, or the lever is off."""
    factor: float
    """Tokens per second against the rung before; 1 where it is off or cannot be told."""
    refusal: str = ""
    """Why the server does not start."""


@dataclass(frozen=True)
class State:
    """The levers as they stand, from nothing to all that are on."""

    gpu: str
    workload: LeverWorkload
    order: str
    start: LeverResult | None
    rungs: tuple[Rung, ...]

    @property
    def end(self) -> LeverResult | None:
        """With all levers that are on; None where the server cannot start."""
        last = next((rung for rung in reversed(self.rungs) if rung.is_on), None)
        return last.result if last else self.start

    @property
    def refusal(self) -> str:
        """Why the server does not start with all levers that are on; empty where it does."""
        last = next((rung for rung in reversed(self.rungs) if rung.is_on), None)
        return last.refusal if last else ""

    def factor(self, *fields: str) -> float:
        """What these levers buy together, each in its place."""
        product = 1.0
        for rung in self.rungs:
            product *= rung.factor if rung.field in fields else 1.0
        return product

    def is_on(self, *fields: str) -> bool:
        """Are all of these levers on?"""
        return all(rung.is_on for rung in self.rungs if rung.field in fields)


def sweep(
    gpu: str = SERVER["gpu"],
    requests: str = SERVER["requests"],
    slots: int = SERVER["slots"],
    max_model_len: int = SERVER["max_model_len"],
    acceptance: float = SERVER["acceptance"],
    order: str = SERVER["order"],
    **levers: bool | int | str,
) -> State:
    """Serve a workload with no lever on, then with one after another.

    Args:
        gpu: a name in the hardware table.
        requests: "chats" (ShareGPT's lengths behind one system prompt) or "mixed" (long and short, nothing shared).
        slots: requests that may run at once; twice as many, and at least four, wait at the start.
        max_model_len: tokens that a request may have, and reserves without paging.
        acceptance: the chance that a draft is accepted.
        order: "ranking" or "reversed".
        levers: fields of `minivllm.simulate.levers.Levers`; those that are not named are as in START.

    Raises:
        MinivllmError: a value makes no sense.
    """
    if requests not in WORKLOADS or order not in ORDERS:
        raise MinivllmError(f"requests is one of {', '.join(WORKLOADS)}, order one of {', '.join(ORDERS)}")
    unknown = sorted(set(levers) - set(OFF))
    if unknown:
        raise MinivllmError(f"no such lever: {', '.join(unknown)}; there are {', '.join(OFF)}")
    wanted: dict[str, Any] = {field: levers.get(field, START[field]) for field in OFF}
    numbers = {field: value for field, value in wanted.items() if field in MOST}
    require_numbers(MOST, slots=slots, max_model_len=max_model_len, acceptance=acceptance, **numbers)
    require(acceptance >= 0, f"acceptance is from 0 to 1, not {acceptance}")
    for name, value in (("slots", slots), ("max_model_len", max_model_len), ("GPUs", wanted["tensor_parallel"])):
        require(value >= 1, f"{name} must be at least 1, not {value}")
    require_flags(Levers(**wanted), *(field for field in OFF if isinstance(OFF[field], bool)))
    require(wanted["kv_dtype"] in KV_DTYPES.values(), f"kv_dtype is one of {', '.join(KV_DTYPES.values())}")
    work = _workload(requests, slots, max_model_len, acceptance)
    so_far = Levers()
    start, refusal = _served(gpu, work, so_far)
    before, rungs = start, []
    for rung in LADDER if order == "ranking" else reversed(LADDER):
        value = wanted[rung.field]
        if value == OFF[rung.field]:
            rungs.append(Rung(rung.field, _title(rung, value), False, None, 1.0))
            continue
        so_far = replace(so_far, **{rung.field: value})
        after, refusal = _served(gpu, work, so_far)
        factor = after.tokens_per_second / before.tokens_per_second if after and before else 1.0
        rungs.append(Rung(rung.field, _title(rung, value), True, after, factor, refusal))
        before = after
    return State(gpu, work, order, start, tuple(rungs))


def _served(gpu: str, work: LeverWorkload, levers: Levers) -> tuple[LeverResult | None, str]:
    """The result with these levers, or the reason why the server does not start."""
    hardware = get_hardware(gpu)
    try:
        return throughput(levers, _model(), hardware, work), ""
    except MinivllmError as error:
        return None, str(error)


@cache
def _model() -> ModelConfig:
    return known_model(MODEL)


@cache
def _workload(requests: str, slots: int, max_model_len: int, acceptance: float) -> LeverWorkload:
    make = shared_chat if requests == "chats" else long_and_short
    work = make(max(4, 2 * slots), shorter=SHORTER)
    fitting = tuple(one for one in work.requests if one.prompt_tokens + one.output_tokens <= max_model_len)
    return replace(work, requests=fitting, max_model_len=max_model_len, max_num_seqs=slots, acceptance=acceptance)


def _title(rung: Lever, value: bool | int | str) -> str:
    if rung.field == "kv_dtype":
        return "8-bit KV cache" if value == "auto" else f"KV cache in {value}"
    if rung.field == "weight_bits":
        return f"{4 if value == 16 else value}-bit weights"
    if rung.field == "speculative_tokens":
        return f"speculation, {value or 3} drafts"
    if rung.field == "tensor_parallel":
        return f"tensor parallel, {2 if value == 1 else value} GPUs"
    return rung.title


WIDTH, MARGIN, ROW = 720, 20, 25
LABELS = 178
PLOT = Box(MARGIN + LABELS, 70, WIDTH - 2 * MARGIN - LABELS - 62, ROW * (len(LADDER) + 2))
HEIGHT = PLOT.bottom + 46
GAIN, LOSS = GREEN, VERMILLION


def figure(state: State) -> str:
    """A row for each lever: from what there was before it to what there is with it, on a logarithmic scale."""
    drawing = Drawing(WIDTH, HEIGHT, f"What each lever buys on {state.gpu}", verdict(state).words)
    note = f"{MODEL} on {state.gpu}, {state.workload.title}, {_at_once(state)}"
    drawing.heading((MARGIN, 26), "Which lever bought what", note)
    keys = [Segment("faster", 0, GAIN), Segment("slower", 0, LOSS), Segment("tokens per second", 0, BLUE)]
    legend(drawing, (MARGIN, 52), keys, WIDTH - 2 * MARGIN)
    scale = _scale(state)
    _draw_axis(drawing, scale)
    _draw_whole(drawing, scale, 0, "nothing on", state.start)
    reached = state.start
    for row, rung in enumerate(state.rungs, start=1):
        _draw_rung(drawing, scale, row, rung, reached)
        reached = rung.result if rung.is_on else reached
    _draw_whole(drawing, scale, len(LADDER) + 1, "all that is on", state.end)
    return drawing.render()


def _at_once(state: State) -> str:
    seats = state.workload.max_num_seqs
    return f"{seats} at once" if seats > 1 else "one at a time"


def _scale(state: State) -> Scale:
    results = [state.start, *(rung.result for rung in state.rungs)]
    rates = [result.tokens_per_second for result in results if result] or [1.0, 10.0]
    return Scale(min(rates) / 1.6, max(max(rates), 4 * min(rates)) * 1.15, log=True)


def _x(scale: Scale, rate: float) -> float:
    return PLOT.x + scale.share(rate) * PLOT.width


def _draw_axis(drawing: Drawing, scale: Scale) -> None:
    for tick in scale.ticks():
        x = _x(scale, tick)
        drawing.line((x, PLOT.y), (x, PLOT.bottom), colour=RULE)
        drawing.text((x, PLOT.bottom + 17), short(tick), size=SMALL, colour=QUIET, anchor="middle")
    words = f"output tokens per second of all GPUs, modelled: off by {median_error():.0%} (median) on published figures"
    drawing.text((PLOT.x + PLOT.width / 2, PLOT.bottom + 36), words, size=SMALL, colour=QUIET, anchor="middle")


def _draw_whole(drawing: Drawing, scale: Scale, row: int, title: str, result: LeverResult | None) -> None:
    """A bar from the axis, with its rate: where the ladder starts and where it ends."""
    y = PLOT.y + row * ROW
    drawing.text((PLOT.x - 10, y + 16), title, anchor="end", bold=True)
    if result is None:
        drawing.text((PLOT.x + 6, y + 16), "does not start", size=SMALL, colour=LOSS)
        return
    right = _x(scale, result.tokens_per_second)
    drawing.rect(Box(PLOT.x, y + 3, right - PLOT.x, ROW - 7), BLUE, tip=_tip(result))
    drawing.text((right + 6, y + 16), f"{short(result.tokens_per_second)}", colour=INK, bold=True, halo=True)


def _draw_rung(drawing: Drawing, scale: Scale, row: int, rung: Rung, before: LeverResult | None) -> None:
    y = PLOT.y + row * ROW
    drawing.text((PLOT.x - 10, y + 16), rung.title, anchor="end", colour=INK if rung.is_on else QUIET)
    if not rung.is_on:
        drawing.text((WIDTH - MARGIN, y + 16), "off", size=SMALL, colour=QUIET, anchor="end")
        return
    if rung.result is None:
        drawing.text((PLOT.x + 6, y + 16), "does not start: too little memory", size=SMALL, colour=LOSS, halo=True)
        return
    to = _x(scale, rung.result.tokens_per_second)
    since = _x(scale, before.tokens_per_second) if before else PLOT.x
    words, colour = _change(rung, before)
    bar = Box(min(since, to), y + 3, max(abs(to - since), 2.0), ROW - 7)
    drawing.rect(bar, colour, tip=f"{rung.title}: {_tip(rung.result)}")
    drawing.line((to, y + ROW - 4), (to, y + ROW + 3), colour=MID)
    if before and bar.width > text_width(words, SMALL) + 14:
        place, ink = (bar.x + bar.width / 2, y + 16), ink_on(colour)
        drawing.text(place, words, size=SMALL, colour=ink, anchor="middle", bold=True)
    else:
        drawing.text((bar.right + 6, y + 16), words, size=SMALL, colour=INK, halo=True)


def _change(rung: Rung, before: LeverResult | None) -> tuple[str, str]:
    """What a rung did, in a word and a colour."""
    assert rung.result is not None
    if before is None:
        return f"starts: {short(rung.result.tokens_per_second)}", BLUE
    words = f"×{rung.factor:.2f}" if rung.factor < 9.95 else f"×{rung.factor:.0f}"
    if abs(rung.factor - 1) < NOTHING_SEEN:
        return words, MID
    return words, GAIN if rung.factor > 1 else LOSS


def _tip(result: LeverResult) -> str:
    batch = f"{result.steps:,} steps of {result.mean_batch:.1f} requests"
    cache = f"a KV cache of {result.kv_tokens:,} tokens" if result.kv_tokens else "no KV cache"
    more = f", {result.preemptions} preemptions" if result.preemptions else ""
    hits = f", {result.prefix_hit_rate:.0%} of the prompts found" if result.prefix_hit_rate else ""
    gpus = f", {result.gpus} GPUs" if result.gpus > 1 else ""
    return f"{result.tokens_per_second:,.1f} tokens/s in {batch}, {cache}{hits}{more}{gpus}"


def verdict(state: State) -> Verdict:
    """What this set of levers comes to, in one line."""
    if state.end is None:
        return Verdict(f"The server does not start: {state.refusal}.", "broken")
    on = [rung for rung in state.rungs if rung.is_on and rung.result]
    needed = _needed_to_start(state)
    if not on:
        return Verdict(f"Nothing is on: {state.end.tokens_per_second:,.1f} tokens/s, modelled.", "tight")
    best = [rung for rung in sorted(on, key=lambda rung: -rung.factor)[:2] if rung.factor > 1 + NOTHING_SEEN]
    words = f"{short(state.end.tokens_per_second)} tokens/s, modelled"
    if state.start:
        words += f", {state.end.tokens_per_second / state.start.tokens_per_second:,.3g} times nothing"
    words += "; most by " * bool(best) + " and ".join(f"{rung.title} (×{rung.factor:.3g})" for rung in best) + "."
    if needed:
        return Verdict(f"{words} Before {needed} is on, there is too little memory to start.", "tight")
    worse = [rung for rung in on if rung.factor < 1 - NOTHING_SEEN]
    idle = [rung.title for rung in on if abs(rung.factor - 1) < NOTHING_SEEN]
    if worse:
        named = ", ".join(f"{rung.title} (×{rung.factor:.2f})" for rung in worse)
        return Verdict(f"{words} Slower here: {named}.{_why_paging_costs(state, worse)}", "tight")
    return Verdict(words + f" Nothing here: {', '.join(idle)}." * bool(idle), "fine")


def _needed_to_start(state: State) -> str:
    """The lever that made a server start which did not start before; empty where there is none."""
    on = [rung for rung in state.rungs if rung.is_on]
    starts = [later.title for earlier, later in pairwise(on) if earlier.result is None and later.result]
    return starts[0] if starts else ""


def _why_paging_costs(state: State, worse: list[Rung]) -> str:
    fields = [rung.field for rung in state.rungs if rung.is_on]
    if all(rung.field != "paging" for rung in worse) or "flash_attention" in fields[: fields.index("paging")]:
        return ""
    return " Blocks are copied together in every step until a kernel walks them."


FIRST, ELEVENTH = ("paging", "continuous_batching"), "cuda_graphs"


def _ranking_turned_over(state: State) -> Progress:
    if not state.is_on(*FIRST, ELEVENTH) or state.end is None:
        return Progress(False, "Switch paging, continuous batching and CUDA graphs on, on a server that starts.")
    first, eleventh = state.factor(*FIRST), state.factor(ELEVENTH)
    words = f"Paging and continuous batching buy ×{first:.2f} together, CUDA graphs ×{eleventh:.2f}."
    return Progress(abs(first - 1) < 0.05 and eleventh >= 2, words)


CHALLENGE = Challenge(
    goal="The ranking has paging and continuous batching as first and second, CUDA graphs as eleventh. With all three "
    "on, find a server where the first two together change less than 5%, and CUDA graphs alone at least double it.",
    check=_ranking_turned_over,
    hint="What do paging and batching do for somebody who is alone? And on which GPU is the work of a step done before "
    "the host has launched its kernels?",
    lesson="A ranking of levers is a ranking for one load on one machine, in one order.",
)


def show() -> LessonWidget:
    """The widget: knobs for the server, a switch for every lever, the waterfall, and the challenge."""
    titles = {rung.field: rung.title for rung in LADDER}
    bits = [("16 bits", 16), ("8 bits", 8), ("4 bits", 4)]
    valued = {
        "kv_dtype": choice(
            "KV cache in", list(KV_DTYPES.items()), START["kv_dtype"], "what keys and values are stored in"
        ),
        "weight_bits": choice("Weights in", bits, START["weight_bits"], "of the linear layers, weight-only"),
        "speculative_tokens": choice("Drafts", [("none", 0), ("3", 3), ("5", 5)], 0, "verified in one step"),
        "tensor_parallel": choice("GPUs", [1, 2, 4], 1, "tensor parallel: they share the model"),
    }
    knobs = {
        "The server": {
            "gpu": choice("GPU", GPUS, START["gpu"], "data-sheet rates, modelled"),
            "requests": choice("Requests", [(title, key) for key, title in WORKLOADS.items()], START["requests"]),
            "slots": steps("At once", SLOTS, START["slots"], "max_num_seqs: requests that may run at once"),
            "max_model_len": steps("max_model_len", RESERVATIONS, START["max_model_len"], "reserved without paging"),
            "order": choice("Order of levers", [(title, key) for key, title in ORDERS.items()], START["order"]),
        },
        "The levers": {
            rung.field: valued.get(rung.field) or _switch(titles[rung.field], bool(START[rung.field]))
            for rung in LADDER
        },
        "Drafts are accepted": {"acceptance": slider("Chance", 0, 1, 0.1, START["acceptance"], "each, after the last")},
    }
    return LessonWidget(
        title="Which lever bought what",
        lead="Switch levers on and off, then change the server or the order: what a lever buys depends on what is on "
        "before it, and on the load.",
        knobs=knobs,
        presets={"Start again": START, "All off": {**START, **OFF}},
        sweep=sweep,
        figure=figure,
        verdict=verdict,
        challenge=CHALLENGE,
    )


def _switch(label: str, value: bool) -> ipywidgets.Checkbox:
    return ipywidgets.Checkbox(description=label, value=value, indent=False, layout={"width": "318px", "margin": "0"})


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(figure(sweep(**IN_THE_LESSON)))
