"""Lesson 01: how a GPU's memory is used, how many requests fit, and the cost of reserving the longest request.

Everything here is asked of `minivllm.simulate`: the ledger that equals vLLM's start-up log, and request lengths as
they are seen in the world.

The picture in the lesson's text: `uv run python -P -m widgets.kv_cache lessons/figures/01_ledger.svg`
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, islice, takewhile
from pathlib import Path

from minivllm.config import ModelConfig
from minivllm.config.checks import require
from minivllm.config.units import GIB
from minivllm.lab.calculator import find_model
from minivllm.lab.palette import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILLION
from minivllm.memory import MemoryLedger, max_concurrency, memory_ledger
from minivllm.simulate.hardware import HARDWARE, Hardware, get_hardware
from minivllm.simulate.known_models import CONFIGS
from minivllm.simulate.workloads import WORKLOADS, workload
from widgets.base import Challenge, LessonWidget, Progress, Verdict, choice, entry, require_numbers, slider, steps
from widgets.svg import MID, QUIET, SMALL, Axes, Box, Drawing, Scale, Segment, legend, stacked_bar, tokens

CONTEXTS = tuple(2**power for power in range(8, 21))  # 256 to 1M tokens
SAMPLED_REQUESTS = 4000
MOST_SLOTS_DRAWN = 240
BEFORE_CACHE = (("weights", BLUE), ("activations", PURPLE), ("outside torch", GREY), ("CUDA graphs", ORANGE))
"""How the picture names and colours what the ledger lists before the KV cache."""
MOST = {"tp": 1024, "utilization": 100.0, "max_model_len": 2**28}
START = {
    "model": "meta-llama/Llama-3.1-8B",
    "other_model": "",
    "gpu": "L4",
    "tp": 1,
    "kv_dtype": "auto",
    "utilization": 0.92,
    "max_model_len": 2048,
    "requests": "sharegpt",
}


@dataclass(frozen=True)
class State:
    """One configuration and its results. Bytes are of one GPU; tokens and requests of the whole group."""

    model: str
    hardware: Hardware
    tp: int
    utilization: float
    max_model_len: int
    model_limit: int
    """The longest context that the model was made for; 0 where its config does not say."""
    workload_title: str
    needs: tuple[tuple[str, int], ...]
    """(name, bytes) of all that must be there before there is a KV cache."""
    ledger: MemoryLedger | None
    """None where `needs` alone are more than the engine may use."""
    slots: int
    """Requests that fit when each reserves `max_model_len` tokens."""
    lengths: tuple[int, ...]
    """Tokens that the first requests in those slots hold at their end; at most MOST_SLOTS_DRAWN of them."""
    mean_length: float
    """Mean tokens of a request that is not longer than `max_model_len`; 0 where there is none."""
    too_long: float
    """Share of the requests that are longer than `max_model_len`: they are refused."""
    contexts: tuple[int, ...]
    concurrency: tuple[float, ...]
    """Requests that would fit at each of `contexts`."""

    @property
    def needed(self) -> int:
        """Bytes that must be there before there is a KV cache."""
        return sum(size for _, size in self.needs)

    @property
    def tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return self.ledger.tokens if self.ledger else 0

    @property
    def longest(self) -> int:
        """The longest request that fits at all."""
        return self.ledger.longest_request if self.ledger else 0

    @property
    def fits(self) -> bool:
        """Does one request of `max_model_len` tokens fit?"""
        return self.max_model_len <= self.longest

    @property
    def at_own_length(self) -> float:
        """Requests that would fit if each held only the tokens that it has."""
        return self.tokens / self.mean_length if self.mean_length else 0.0

    @property
    def reserved(self) -> float:
        """Share of the KV cache that is reserved when no further request fits."""
        return self.slots * self.max_model_len / self.tokens if self.fits else 0.0

    @property
    def held(self) -> float:
        """Share of the KV cache that ever holds a token by then."""
        return self.slots * self.mean_length / self.tokens if self.fits else 0.0


def sweep(
    model: str = START["model"],
    other_model: str = "",
    gpu: str = START["gpu"],
    tp: int = 1,
    kv_dtype: str = "auto",
    utilization: float = START["utilization"],
    max_model_len: int = START["max_model_len"],
    requests: str = START["requests"],
) -> State:
    """Share out the memory of one GPU, and fill the KV cache with requests that reserve `max_model_len` each.

    Args:
        model: a well-known model.
        other_model: where not empty, taken instead: a local directory, or a model of the Hugging Face hub.
        gpu: a name in the hardware table.
        tp: GPUs that share one copy of the model.
        kv_dtype: of the cache; "auto" is the model's own.
        utilization: vLLM's `gpu_memory_utilization`.
        max_model_len: the longest request, in tokens.
        requests: a workload of `minivllm.simulate.workloads`.

    Raises:
        MinivllmError: a value makes no sense, or the model's memory cannot be counted.
    """
    require_numbers(MOST, tp=tp, utilization=utilization, max_model_len=max_model_len)
    require(utilization > 0, f"utilization must be above 0, not {utilization!r}")
    require(isinstance(model, str) and isinstance(other_model, str), f"model is a name, not {model!r}")
    name = other_model.strip() or model
    config, hardware, kind = _model(name), get_hardware(gpu), workload(requests)
    settings = {"max_model_len": max_model_len, "tp": tp, "kv_dtype": kv_dtype, "check": False}
    needs = _needs(config, hardware, settings)
    ledger = None
    if sum(size for _, size in needs) < int(hardware.memory_bytes * utilization):
        ledger = memory_ledger(config, hardware, gpu_memory_utilization=utilization, **settings)
    slots = int(ledger.concurrency) if ledger and max_model_len <= ledger.longest_request else 0
    lengths, mean, too_long = _requests_up_to(max_model_len, kind.name)
    return State(
        model=name.split("/")[-1],
        hardware=hardware,
        tp=tp,
        utilization=utilization,
        max_model_len=max_model_len,
        model_limit=config.max_position_embeddings,
        workload_title=kind.title,
        needs=needs,
        ledger=ledger,
        slots=slots,
        lengths=lengths[:slots],
        mean_length=mean,
        too_long=too_long,
        contexts=CONTEXTS,
        concurrency=tuple(max_concurrency(ledger.tokens if ledger else 0, context) for context in CONTEXTS),
    )


@cache
def _model(name: str) -> ModelConfig:
    return find_model(name)


def _needs(config: ModelConfig, hardware: Hardware, settings: dict) -> tuple[tuple[str, int], ...]:
    """What the ledger lists before the KV cache, asked of a GPU so large that everything fits."""
    roomy = memory_ledger(config, replace(hardware, memory_bytes=2**60), **settings)
    before_cache = takewhile(lambda row: row.name != "KV cache", roomy.rows)
    return tuple((row.name, row.bytes) for row in before_cache)


@cache
def _sample(name: str) -> tuple[list[int], list[int], list[int]]:
    """Lengths of requests as they arrive, the same in order, and the running sum of those in order."""
    arriving = [request.total for request in workload(name).sample(SAMPLED_REQUESTS)]
    ordered = sorted(arriving)
    return arriving, ordered, [0, *accumulate(ordered)]


def _requests_up_to(longest: int, name: str) -> tuple[tuple[int, ...], float, float]:
    """Of requests up to this length: the first ones that arrive, and their mean; then the share that is longer."""
    arriving, ordered, sums = _sample(name)
    count = bisect_right(ordered, longest)
    first = tuple(islice((length for length in arriving if length <= longest), MOST_SLOTS_DRAWN))
    return first, sums[count] / count if count else 0.0, 1 - count / len(ordered)


WIDTH, HEIGHT, MARGIN = 720, 560, 20
BAR = Box(MARGIN, 62, WIDTH - 2 * MARGIN, 34)
PANEL = Box(MARGIN, 116, WIDTH - 2 * MARGIN, 210)
POOL = Box(PANEL.x + 14, PANEL.y + 62, PANEL.width - 28, PANEL.height - 74)
PLOT = Box(MARGIN + 44, 376, WIDTH - 2 * MARGIN - 56, 134)
HELD, RESERVED, TINT, NOT_OURS = BLUE, "#C5DBEB", "#F1F7FB", "#F4F4F4"
STRIP = 12
"""A slot is drawn about this many times as wide as high."""


def figure(state: State) -> str:
    """The GPU's memory as a bar, its KV cache slot by slot, and the requests that fit against `max_model_len`."""
    drawing = Drawing(WIDTH, HEIGHT, f"The KV cache of {state.model} on {state.hardware.name}", verdict(state).words)
    _draw_memory(drawing, state)
    if state.ledger is None:
        _draw_nothing_left(drawing, state)
    elif state.fits:
        _draw_slots(drawing, state)
    else:
        _draw_shortage(drawing, state)
    _draw_concurrency(drawing, state)
    return drawing.render()


def _draw_memory(drawing: Drawing, state: State) -> None:
    card, needed = state.hardware.memory_bytes, state.needed
    which = f"one {state.hardware.name}" if state.tp == 1 else f"each of {state.tp} GPUs ({state.hardware.name})"
    drawing.heading((MARGIN, 24), f"Memory of {which}", f"{card / GIB:.1f} GiB")
    segments = [
        Segment(name, size, colour, tip=f"{whole_name}: {size / GIB:.2f} GiB")
        for (whole_name, size), (name, colour) in zip(state.needs, BEFORE_CACHE, strict=True)
    ]
    if state.ledger:
        segments.append(_magnified_cache(drawing, state))
    keys = [replace(part, label=f"{part.label} {part.value / GIB:.1f}") for part in segments]
    legend(drawing, (MARGIN, 48), keys, BAR.width)
    if state.ledger:
        rest = card - int(card * state.utilization)
        segments.append(Segment("", rest, NOT_OURS, tip=f"not ours to use: {rest / GIB:.2f} GiB", hatched=True))
        words = f"not ours to use {rest / GIB:.1f}"
        drawing.text((BAR.right, 24), words, size=SMALL, colour=QUIET, anchor="end")
    stacked_bar(drawing, BAR, segments, max(card, needed))
    if needed > card:
        edge = BAR.x + card / needed * BAR.width
        drawing.line((edge, BAR.y - 5), (edge, BAR.bottom + 5), colour=VERMILLION, width=2.5)


def _magnified_cache(drawing: Drawing, state: State) -> Segment:
    """The KV cache's segment of the bar; draws the panel below as that segment, magnified."""
    card, budget = state.hardware.memory_bytes, int(state.hardware.memory_bytes * state.utilization)
    left, right = (BAR.x + part / card * BAR.width for part in (state.needed, budget))
    drawing.polygon([(left, BAR.bottom), (right, BAR.bottom), (PANEL.right, PANEL.y), (PANEL.x, PANEL.y)], TINT)
    drawing.rect(PANEL, TINT)
    cache = budget - state.needed
    return Segment("KV cache", cache, SKY, tip=f"KV cache: {cache / GIB:.2f} GiB")


def _draw_slots(drawing: Drawing, state: State) -> None:
    """A strip for each slot: what its request ever holds, and what it only reserves."""
    drawn = min(state.slots, MOST_SLOTS_DRAWN)
    note = f"{state.tokens:,} tokens, {state.slots:,} slot{'s' * (state.slots > 1)} of {state.max_model_len:,}"
    note += f" (the first {drawn} are drawn)" if drawn < state.slots else ""
    drawing.heading((POOL.x, PANEL.y + 24), "The KV cache when it is full", note)
    columns = max(1, round((drawn * POOL.width / POOL.height / STRIP) ** 0.5))
    wide, high = POOL.width / columns, min(POOL.height / -(-(drawn + 1) // columns), 40.0)
    gap = min(3.0, high / 5)
    for index in range(drawn + 1):
        slot = Box(POOL.x + index % columns * wide, POOL.y + index // columns * high, wide - gap - 1, high - gap)
        if index < drawn:
            length = state.lengths[index] if state.lengths else 0
            tip = f"slot {index + 1}: {length:,} of {state.max_model_len:,} tokens"
            drawing.rect(slot, RESERVED, tip=tip)
            drawing.rect(replace(slot, width=length / state.max_model_len * slot.width), HELD, tip=tip)
        elif drawn == state.slots:
            rest = state.tokens - state.slots * state.max_model_len
            part = replace(slot, width=rest / state.max_model_len * slot.width)
            drawing.rect(part, "#FFFFFF", stroke=MID, tip=f"{rest:,} tokens: less than a slot")
    keys = [
        Segment(f"ever holds a token {state.held:.1%}", 0, HELD),
        Segment(f"reserved, never used {state.reserved - state.held:.1%}", 0, RESERVED),
        Segment(f"less than a slot {1 - state.reserved:.1%}", 0, "#FFFFFF", outlined=True),
    ]
    legend(drawing, (POOL.x, PANEL.y + 46), keys, POOL.width)


def _draw_shortage(drawing: Drawing, state: State) -> None:
    """One request of the greatest length, and the part of it that there is room for."""
    drawing.heading((POOL.x, PANEL.y + 24), "The KV cache is too small", f"it holds {state.tokens:,} tokens")
    request = replace(POOL, y=POOL.y + 4, height=44)
    room = replace(request, width=request.width * min(1.0, state.tokens / state.max_model_len))
    drawing.rect(request, "#FFFFFF", stroke=VERMILLION, dash="5 3")
    drawing.hatch(request, "#F0C3A6")
    drawing.rect(room, SKY)
    drawing.text((request.x, request.y - 10), f"One request of {state.max_model_len:,} tokens", colour=VERMILLION)
    if room.width > 120:
        drawing.text((request.x + 12, request.y + 27), "room for this much")


def _draw_nothing_left(drawing: Drawing, state: State) -> None:
    drawing.rect(PANEL, TINT)
    short = state.needed - int(state.hardware.memory_bytes * state.utilization)
    drawing.heading(
        (POOL.x, PANEL.y + 24), "No KV cache at all", f"{short / GIB:,.1f} GiB too little for the rest alone"
    )
    if state.needed > state.hardware.memory_bytes:
        drawing.text((POOL.x, PANEL.y + 52), "The upright line marks where the memory ends.", colour=VERMILLION)


def _draw_concurrency(drawing: Drawing, state: State) -> None:
    drawing.heading((MARGIN, PLOT.y - 22), "Requests at once", "by the length that is reserved for each")
    most = max(10.0, *state.concurrency, state.at_own_length)
    y = Scale(0.6, 0.6 * (most / 0.6) ** 1.35, log=True)  # the upper quarter is for the marks' words
    axes = Axes(drawing, PLOT, Scale(CONTEXTS[0], CONTEXTS[-1], log=True), y)
    axes.frame("max_model_len, in tokens", "", x_format=tokens, x_ticks=axes.x.doublings(13))
    if state.longest < CONTEXTS[-1]:
        start = max(state.longest, CONTEXTS[0])
        axes.area([start, CONTEXTS[-1]], [axes.y.low] * 2, [axes.y.high] * 2, VERMILLION, opacity=0.1)
    if state.ledger:
        axes.line(state.contexts, state.concurrency, BLUE)
    if state.at_own_length:
        words = f"{state.at_own_length:,.0f} if each held only its own tokens"
        room = axes.x.share(state.longest) - 0.01  # left of the shaded lengths, unless that is too narrow
        axes.mark_y(state.at_own_length, words, GREEN, along=min(room, 0.6) if room > 0.45 else 1)
    if state.longest < CONTEXTS[-1]:
        words = f"beyond {tokens(state.longest)}" if state.longest else "at no length"
        axes.mark_x(start, f"{words}\nnot one fits", VERMILLION, before=state.model_limit > state.longest)
    if CONTEXTS[0] <= state.model_limit <= CONTEXTS[-1]:
        own_limit_is_first = state.model_limit <= state.longest
        axes.mark_x(state.model_limit, "the model's own limit", QUIET, dash="2 3", before=own_limit_is_first)
    if state.ledger and CONTEXTS[0] <= state.max_model_len <= CONTEXTS[-1]:
        _draw_here(axes, state)


def _draw_here(axes: Axes, state: State) -> None:
    """The dot on the curve where `max_model_len` stands."""
    colour = BLUE if state.fits else VERMILLION
    x, y = axes.at(state.max_model_len, max(max_concurrency(state.tokens, state.max_model_len), axes.y.low))
    axes.drawing.circle((x, y), 6, colour)
    axes.drawing.text((x + 10, y - 5), f"{state.slots:,}", colour=colour, bold=True, halo=True)


def verdict(state: State) -> Verdict:
    """What this configuration means, in one line."""
    if state.ledger is None:
        needed, card = state.needed / GIB, state.hardware.memory_bytes / GIB
        return Verdict(
            f"There is no KV cache at all: weights and working space take {needed:,.1f} GiB, and the engine may use "
            f"{card * state.utilization:.1f} of {card:.1f} GiB.",
            "broken",
        )
    if not state.fits:
        return Verdict(
            f"Not one request of {state.max_model_len:,} tokens fits, so vLLM would refuse to start. "
            f"The longest that fits has {state.longest:,} tokens.",
            "broken",
        )
    if state.mean_length == 0:
        return Verdict(f"Every {state.workload_title} request is longer than {state.max_model_len:,} tokens.", "broken")
    refused = f" {state.too_long:.0%} of the requests are longer and refused." if state.too_long >= 0.005 else ""
    words = f"Full with {state.slots:,} request{'s' if state.slots > 1 else ''}, and {state.held:.1%} of the KV cache "
    words += f"ever holds a token (mean request: {state.mean_length:,.0f} tokens).{refused}"
    return Verdict(words, "tight" if state.held < 0.5 or refused else "fine")


def _card_is_full_and_empty(state: State) -> Progress:
    words = f"Reserved: {state.reserved:.1%} of the KV cache. Ever holding a token: {state.held:.1%}."
    return Progress(state.fits and state.reserved >= 0.95 and 0 < state.held < 0.01, words)


CHALLENGE = Challenge(
    goal="Find a configuration whose KV cache is full, at least 95% of it reserved, while less than 1% of it ever "
    "holds a token.",
    check=_card_is_full_and_empty,
    hint="A slot is reserved for the longest request that may come. How long are those that do come? And a slot that "
    "is too long leaves a rest that nobody can reserve: a larger card or a smaller KV dtype makes that rest small.",
    lesson="An engine that reserves turns requests away with an all but empty card; lesson 02 takes memory block by "
    "block instead.",
)


def show() -> LessonWidget:
    """The widget: knobs for the card and for the requests, the picture, and the challenge."""
    short_names = [(name.split("/")[1], name) for name in CONFIGS]
    dtypes = [("as the model", "auto"), ("fp8", "fp8"), ("nvfp4 (with scales)", "nvfp4")]
    lengths = [(tokens(context), context) for context in CONTEXTS]
    kinds = [(kind.title, name) for name, kind in WORKLOADS.items()]
    knobs = {
        "The card": {
            "model": choice("Model", short_names, START["model"], "a well-known model"),
            "other_model": entry("or another", "", "a directory, or owner/name", "taken instead of the one above"),
            "gpu": choice("GPU", list(HARDWARE), START["gpu"], "whose memory is shared out"),
            "tp": steps("GPUs (TP)", [1, 2, 4, 8], START["tp"], "GPUs that share one copy of the model"),
            "kv_dtype": choice("KV dtype", dtypes, START["kv_dtype"], "what keys and values are stored in"),
            "utilization": slider("Utilization", 0.5, 1.0, 0.01, START["utilization"], "gpu_memory_utilization"),
        },
        "The requests": {
            "max_model_len": steps("max_model_len", lengths, START["max_model_len"], "tokens reserved for each"),
            "requests": choice("Lengths as in", kinds, START["requests"], "how long the requests really are"),
        },
    }
    return LessonWidget(
        title="Where the memory of a GPU goes",
        lead="Reserve max_model_len tokens for every request, as engines did before paging. Watch how many requests "
        "fit, and how much of the memory they reserve ever holds a token.",
        knobs=knobs,
        presets={
            "Start again": START,
            "One request too long": {**START, "max_model_len": 2**17},
        },
        sweep=sweep,
        figure=figure,
        verdict=verdict,
        challenge=CHALLENGE,
    )


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(figure(sweep()))
