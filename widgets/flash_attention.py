"""Lesson 03: bytes that attention moves with and without its score matrix, and one row of it, step by step.

The bytes come from the loop counters of `minivllm.simulate.attention_traffic`, which the lesson's script holds against
loops that count their own trips. The row of scores is one that the embedded model computed:
`vllm/03_flash_attention.py --row` wrote it.

The picture in the lesson's text: `uv run python -P -m widgets.flash_attention lessons/figures/03_tiles.svg`
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path

from minivllm.errors import MinivllmError
from minivllm.lab.palette import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILLION
from minivllm.simulate.attention_traffic import (
    Traffic,
    exponent,
    flash_traffic,
    least_traffic,
    longest_naive,
    naive_traffic,
    on_chip_bytes,
)
from minivllm.simulate.hardware import HARDWARE, Hardware, get_hardware
from minivllm.simulate.online_softmax import RunningSoftmax, online_softmax
from widgets.base import Challenge, LessonWidget, Progress, Verdict, choice, require_numbers, steps
from widgets.svg import QUIET, SMALL, Axes, Box, Drawing, Scale, Segment, legend, stacked_bar, tokens

ROW = Path(__file__).with_name("attention_row.json")
LENGTHS = tuple(2**power for power in range(8, 18))  # 256 to 128K tokens
KIB = 1024
LIMITS = {"float16": math.log(65504), "float32": math.log(3.4028e38)}
"""Scores whose exponential is the largest number of each dtype."""
PART_COLOURS = {"Q": BLUE, "K, V": SKY, "scores": ORANGE, "O": GREEN, "m, l": PURPLE}
MOST = {
    "length": 2**20,
    "head_dim": 1024,
    "heads": 1024,
    "block_q": 2**20,
    "block_k": 2**20,
    "on_chip_kib": 2**20,
    "keys_a_tile": 1024,
    "tiles_seen": 1024,
    "times": 1e6,
}
START = {
    "length": 8192,
    "head_dim": 128,
    "heads": 32,
    "gpu": "H100",
    "block_q": 64,
    "block_k": 64,
    "on_chip_kib": 100,
    "keys_a_tile": 4,
    "tiles_seen": 3,
    "times": 1,
}


@dataclass(frozen=True)
class Row:
    """One query's scores and the values behind them, as the embedded model computed them."""

    tokens: tuple[str, ...]
    scores: tuple[float, ...]
    values: tuple[tuple[float, ...], ...]
    """Three numbers of each value."""
    layer: int
    head: int


@dataclass(frozen=True)
class State:
    """One configuration and its results. Bytes are of one head unless all heads are named."""

    length: int
    head_dim: int
    heads: int
    hardware: Hardware
    block_q: int
    block_k: int
    on_chip: int
    naive: Traffic
    tiled: Traffic
    least: int
    parts: dict[str, int]
    """Bytes on the chip, by what they hold."""
    naive_curve: tuple[int, ...]
    """Bytes moved at each of LENGTHS."""
    tiled_curve: tuple[int, ...]
    longest: int
    """Most tokens whose scores and weights, of all heads, fit into the GPU's memory."""
    row: Row
    keys_a_tile: int
    states: tuple[RunningSoftmax, ...]
    """Before the first and after each tile that was seen, then after the rest."""
    tiles_seen: int

    @property
    def less(self) -> float:
        """How many times fewer bytes the tiles move."""
        return self.naive.moved / self.tiled.moved

    @property
    def power(self) -> float:
        """With which power of T the bytes of the tiles grow, from 8K tokens on."""
        return exponent(LENGTHS[5:], self.tiled_curve[5:])

    @property
    def needed(self) -> int:
        """Bytes on the chip that the tiles take."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """Do the tiles fit on the chip?"""
        return self.needed <= self.on_chip

    @property
    def stored(self) -> int:
        """Bytes of the scores and weights of all heads."""
        return self.heads * self.naive.extra

    @property
    def now(self) -> RunningSoftmax:
        """m, l and O after the tiles that were seen."""
        return self.states[self.tiles_seen]


def sweep(
    length: int = START["length"],
    head_dim: int = START["head_dim"],
    heads: int = START["heads"],
    gpu: str = START["gpu"],
    block_q: int = START["block_q"],
    block_k: int = START["block_k"],
    on_chip_kib: int = START["on_chip_kib"],
    keys_a_tile: int = START["keys_a_tile"],
    tiles_seen: int = START["tiles_seen"],
    times: float = START["times"],
) -> State:
    """Count the bytes of one configuration, and take the row of scores tile by tile.

    Args:
        length: tokens of the sequence.
        head_dim: width of a head, 16 bits an element.
        heads: whose scores are stored together.
        gpu: a name in the hardware table: its memory is the wall.
        block_q, block_k: queries and keys of a tile.
        on_chip_kib: memory beside the arithmetic units that one program may use.
        keys_a_tile: tile of the row that is stepped through.
        tiles_seen: how many of its tiles have been taken in; beyond the last one, all.
        times: what the row's scores are multiplied by.

    Raises:
        MinivllmError: a value makes no sense.
    """
    require_numbers(MOST, length=length, head_dim=head_dim, heads=heads, block_q=block_q, block_k=block_k)
    require_numbers(MOST, on_chip_kib=on_chip_kib, keys_a_tile=keys_a_tile, tiles_seen=tiles_seen, times=times)
    if on_chip_kib < 1 or heads < 1:
        raise MinivllmError(f"heads and on_chip_kib must be at least 1, got {heads} and {on_chip_kib}")
    if tiles_seen < 0 or times <= 0:
        raise MinivllmError(f"tiles_seen must be at least 0 and times above 0, got {tiles_seen} and {times}")
    row, hardware = scaled_row(times), get_hardware(gpu)
    states = tuple(online_softmax(row.scores, row.values, keys_a_tile))
    naive_curve, tiled_curve = _curves(head_dim, block_q, block_k)
    return State(
        length=length,
        head_dim=head_dim,
        heads=heads,
        hardware=hardware,
        block_q=block_q,
        block_k=block_k,
        on_chip=on_chip_kib * KIB,
        naive=naive_traffic(length, head_dim),
        tiled=flash_traffic(length, head_dim, block_q, block_k),
        least=least_traffic(length, head_dim),
        parts=on_chip_bytes(block_q, block_k, head_dim),
        naive_curve=naive_curve,
        tiled_curve=tiled_curve,
        longest=longest_naive(hardware.memory_bytes, heads),
        row=row,
        keys_a_tile=keys_a_tile,
        states=states,
        tiles_seen=min(tiles_seen, len(states) - 1),
    )


@cache
def scaled_row(times: float) -> Row:
    """The stored row, its scores multiplied by `times`."""
    stored = json.loads(ROW.read_text())["figures"]
    scores = tuple(times * score for score in stored["scores"])
    return Row(tuple(stored["tokens"]), scores, tuple(map(tuple, stored["values"])), stored["layer"], stored["head"])


@cache
def _curves(head_dim: int, block_q: int, block_k: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    tiled = tuple(flash_traffic(length, head_dim, block_q, block_k).moved for length in LENGTHS)
    return tuple(naive_traffic(length, head_dim).moved for length in LENGTHS), tiled


WIDTH, HEIGHT, MARGIN = 720, 724, 20
LEFT, RIGHT = Box(MARGIN + 46, 62, 276, 150), Box(WIDTH // 2 + 62, 62, 276, 150)
CHIP = Box(MARGIN, 316, WIDTH - 2 * MARGIN, 26)
BARS = Box(MARGIN + 46, 424, WIDTH - 2 * MARGIN - 58, 126)
NUMBERS = 636
"""y of the line with m, l and O."""


def figure(state: State) -> str:
    """Bytes moved and kept against the length, what fills the chip, and the row of scores with m, l and O."""
    drawing = Drawing(WIDTH, HEIGHT, "Attention with and without its score matrix", verdict(state).words)
    _draw_moved(drawing, state)
    _draw_kept(drawing, state)
    _draw_chip(drawing, state)
    _draw_row(drawing, state)
    return drawing.render()


def size(count: float) -> str:
    """A byte count in human-readable form."""
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count:.0f} B"


def _plot(drawing: Drawing, box: Box, low: float, high: float) -> Axes:
    axes = Axes(drawing, box, Scale(LENGTHS[0], LENGTHS[-1], log=True), Scale(low, high, log=True))
    ticks = [2.0**power for power in range(10, 51, 5) if low <= 2.0**power <= high]
    axes.frame("tokens", "", x_format=tokens, x_ticks=LENGTHS[::3], y_format=size, y_ticks=ticks)
    return axes


def _draw_moved(drawing: Drawing, state: State) -> None:
    drawing.heading((MARGIN, 26), "Bytes moved", f"one head of {state.head_dim}; tiles: T to the {state.power:.2f}")
    axes = _plot(drawing, LEFT, 2**14, 2**40)
    least = [least_traffic(length, state.head_dim) for length in LENGTHS]
    axes.line(LENGTHS, least, GREY, dash="2 3", width=1.5)
    axes.line(LENGTHS, state.naive_curve, VERMILLION)
    axes.line(LENGTHS, state.tiled_curve, BLUE)
    for traffic, colour in ((state.naive.moved, VERMILLION), (state.tiled.moved, BLUE)):
        axes.points([state.length], [traffic], colour, tips=[size(traffic)])
    keys = [
        Segment(f"T × T stored {size(state.naive.moved)}", 0, VERMILLION),
        Segment(f"tiles {size(state.tiled.moved)}", 0, BLUE),
    ]
    legend(drawing, (MARGIN, 48), keys, 330)
    drawing.text((LEFT.right - 4, LEFT.bottom - 8), "dotted: every byte once", size=SMALL, colour=QUIET, anchor="end")


def _draw_kept(drawing: Drawing, state: State) -> None:
    left = WIDTH // 2 + 16
    drawing.heading((left, 26), "Memory kept in passing", f"all {state.heads} heads")
    axes = _plot(drawing, RIGHT, 2**10, 2**44)
    wall = state.hardware.memory_bytes
    axes.area([LENGTHS[0], LENGTHS[-1]], [wall, wall], [2**44, 2**44], VERMILLION, opacity=0.1)
    axes.mark_y(wall, f"memory of one {state.hardware.name}", QUIET, along=0.62)
    naive = [state.heads * naive_traffic(length, state.head_dim).extra for length in LENGTHS]
    tiled = [state.heads * 4 * length for length in LENGTHS]
    axes.line(LENGTHS, naive, VERMILLION)
    axes.line(LENGTHS, tiled, BLUE)
    kept = state.heads * state.tiled.extra
    for count, colour in ((state.stored, VERMILLION), (kept, BLUE)):
        axes.points([state.length], [count], colour, tips=[size(count)])
    keys = [Segment(f"T × T {size(state.stored)}", 0, VERMILLION), Segment(f"tiles {size(kept)}", 0, BLUE)]
    legend(drawing, (left, 48), keys, 330)


def _draw_chip(drawing: Drawing, state: State) -> None:
    note = f"{state.block_q} queries × {state.block_k} keys: {state.needed / KIB:.1f} of {state.on_chip / KIB:.0f} KiB"
    drawing.heading((MARGIN, 278), "One program on the chip", note)
    segments = [
        Segment(name, count, PART_COLOURS[name], tip=f"{name}: {count / KIB:.1f} KiB")
        for name, count in state.parts.items()
    ]
    keys = [Segment(f"{one.label} {one.value / KIB:.1f}", 0, one.colour) for one in segments]
    legend(drawing, (MARGIN, 302), keys, CHIP.width)
    total = max(state.on_chip, state.needed)
    drawing.rect(CHIP, "#F4F4F4")
    stacked_bar(drawing, CHIP, segments, total)
    if not state.fits:
        edge = CHIP.x + state.on_chip / total * CHIP.width
        drawing.line((edge, CHIP.y - 5), (edge, CHIP.bottom + 5), colour=VERMILLION, width=2.5)
        drawing.text((edge - 5, CHIP.bottom + 15), "the chip ends here", size=SMALL, colour=VERMILLION, anchor="end")


def _draw_row(drawing: Drawing, state: State) -> None:
    row, seen = state.row, state.tiles_seen * state.keys_a_tile
    note = f"scores of its last token, layer {row.layer}, head {row.head}, {state.keys_a_tile} keys a tile"
    drawing.heading((MARGIN, 392), "One row of the embedded model", note)
    low, high = min(0.0, *row.scores), max(0.1, *row.scores)
    axes = Axes(drawing, BARS, Scale(0, len(row.scores)), Scale(low * 1.1, high * 1.15))
    axes.frame("", "", x_ticks=[], y_format=lambda value: f"{value:.3g}")
    wide, zero = BARS.width / len(row.scores), axes.at(0, 0)[1]
    for index, (word, score) in enumerate(zip(row.tokens, row.scores, strict=True)):
        colour = ORANGE if seen - state.keys_a_tile <= index < seen else SKY if index < seen else "#E3E3E3"
        x, top = axes.at(index, score)
        bar = Box(x + 2, min(top, zero), wide - 4, max(abs(zero - top), 1))
        drawing.rect(bar, colour, tip=f"{word!r}: {score:.2f}")
        place = (x + wide / 2 + 4, BARS.bottom + 8)
        drawing.text(place, repr(word)[1:-1].strip() or "space", size=10.5, colour=QUIET, anchor="end", turn=-55)
        if index and index % state.keys_a_tile == 0:
            drawing.line((x, BARS.y), (x, BARS.bottom), dash="2 3")
    _draw_maximum(axes, state)
    _draw_numbers(drawing, state)


def _draw_maximum(axes: Axes, state: State) -> None:
    """The running maximum over the tiles that were seen, as stairs."""
    seen = [one.m for one in state.states[1 : state.tiles_seen + 1]]
    ends = [min(index * state.keys_a_tile, len(state.row.scores)) for index in range(len(seen) + 1)]
    if seen:
        axes.step(ends, [*seen, seen[-1]], VERMILLION, width=2)
        x, y = axes.at(ends[-1], seen[-1])
        axes.drawing.text((x + 5, y - 4), "m", colour=VERMILLION, bold=True, halo=True)


def _draw_numbers(drawing: Drawing, state: State) -> None:
    """m, l, O and what became of the old sums, in one table; below it the answer of the whole row."""
    before, now, whole = state.states[max(state.tiles_seen - 1, 0)], state.now, state.states[-1]
    keep = math.exp(before.m - now.m) if now.m > -math.inf else 1.0
    columns = (
        ("m, the largest score", "−∞" if now.m == -math.inf else f"{now.m:.2f}", VERMILLION),
        ("old l and O times", f"{keep:.3f}", QUIET),
        ("l, sum of exp(s − m)", f"{now.l:.3f}", BLUE),
        ("O / l, three numbers of it", "  ".join(f"{x:+.3f}" for x in now.output), BLUE),
    )
    for x, (label, number, colour) in zip(accumulate((160, 150, 170), initial=MARGIN), columns, strict=True):
        drawing.text((x, NUMBERS), label, size=SMALL, colour=QUIET)
        drawing.text((x, NUMBERS + 22), number, size=15, colour=colour, bold=True)
    answer = "  ".join(f"{x:+.3f}" for x in whole.output)
    drawing.text((MARGIN + 480, NUMBERS + 44), f"{answer}  in the end", size=SMALL, colour=QUIET)
    lost = " and for ".join(dtype for dtype, limit in LIMITS.items() if now.m > limit)
    words = f"Without m, exp({now.m:.1f}) = {_power(now.m)} would be summed"
    if lost:
        drawing.text((MARGIN, NUMBERS + 70), f"{words}: too much for {lost}.", colour=VERMILLION)
    elif now.m > -math.inf:
        drawing.text((MARGIN, NUMBERS + 70), f"{words}: still in the range of float16.", size=SMALL, colour=QUIET)


def _power(score: float) -> str:
    """exp(score), short."""
    if score > 700:
        return "over 1e+300"
    return f"{math.exp(score):,.2f}" if score < 12 else f"{math.exp(score):.1e}"


def verdict(state: State) -> Verdict:
    """What this configuration means, in one line."""
    if not state.fits:
        return Verdict(
            f"These tiles need {state.needed / KIB:.1f} KiB on the chip and there are {state.on_chip / KIB:.0f}: "
            "no such kernel can run.",
            "broken",
        )
    stored = f"Stored scores of {state.heads} heads take {size(state.stored)}"
    if state.length > state.longest:
        stored += f", more than the {state.hardware.name} has (it ends at {state.longest:,} tokens)"
    if state.less < 1:
        return Verdict(f"These tiles move {1 / state.less:.1f} times more bytes than storing T × T would.", "broken")
    words = f"{state.less:.1f} times fewer bytes moved, {state.tiled.intensity:.0f} operations a byte. {stored}."
    return Verdict(words, "fine" if state.less >= 2 else "tight")


def _three_times_less(state: State) -> Progress:
    right_chip = state.head_dim == 128 and state.on_chip <= 100 * KIB and state.length >= 8192
    met = right_chip and state.fits and state.less >= 3
    fits = "they fit" if state.fits else "they do not fit"
    return Progress(met, f"{state.less:.2f} times fewer bytes; tiles of {state.needed / KIB:.1f} KiB, {fits}.")


CHALLENGE = Challenge(
    goal="With a head dim of 128, at least 8K tokens and at most 100 KiB on the chip, find tiles that fit and move at "
    "least 3 times fewer bytes than T × T stored.",
    check=_three_times_less,
    hint="One side of the tile decides how often K and V are read again. The other only takes room.",
    lesson="Queries in a tile set the traffic, and keys in a tile cost room: give the room to the queries.",
)


def show() -> LessonWidget:
    """The widget: knobs for the sequence, the tiles and the row, the picture, and the challenge."""
    lengths = [(tokens(length), length) for length in LENGTHS]
    tiles = (16, 32, 48, 64, 80, 96, 112, 128, 192, 256, 384, 512)
    knobs = {
        "The attention": {
            "length": steps("Tokens T", lengths, START["length"], "length of the sequence"),
            "head_dim": steps("Head dim", [32, 64, 128, 256], START["head_dim"], "width of a head"),
            "heads": steps("Heads", [1, 8, 16, 32, 64], START["heads"], "whose scores would be stored together"),
            "gpu": choice("GPU", list(HARDWARE), START["gpu"], "whose memory is the wall"),
        },
        "The tiles": {
            "block_q": steps("Queries", tiles, START["block_q"], "queries of a tile"),
            "block_k": steps("Keys", tiles, START["block_k"], "keys of a tile"),
            "on_chip_kib": steps(
                "On-chip KiB",
                [48, 64, 100, 163, 227, 483],
                START["on_chip_kib"],
                "shared memory of one program: 163 on an A100, 227 on an H100; with the H100's registers 483",
            ),
        },
        "One row, step by step": {
            "tiles_seen": steps("Tiles seen", list(range(25)), START["tiles_seen"], "how many were taken in"),
            "keys_a_tile": steps("Keys a tile", [1, 2, 3, 4, 6, 8, 12], START["keys_a_tile"], "of this row"),
            "times": steps("Scores times", [1 / 16, 1 / 4, 1, 4, 16], START["times"], "larger scores, sharper weights"),
        },
    }
    return LessonWidget(
        title="Attention without its score matrix",
        lead="Turn the tiles and watch the bytes; then step through one real row and watch m, l and O.",
        knobs=knobs,
        presets={
            "Start again": START,
            "Too large": {**START, "block_q": 256, "block_k": 256},
            "Too small": {**START, "block_q": 16},
        },
        sweep=sweep,
        figure=figure,
        verdict=verdict,
        challenge=CHALLENGE,
    )


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(figure(sweep()))
