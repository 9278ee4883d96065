"""Lesson 02: the pool block by block, who holds which, what stays empty, and what a block size costs.

Requests are served on the engine's own `BlockPool`: blocks are taken, shared by the samples of a request, counted and
freed as the real ones are. The time of attention comes from the results that lesson 02's script left.

The picture in the lesson's text: `uv run python -P -m widgets.paged_attention lessons/figures/02_pool.svg`
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from minivllm.config.checks import require
from minivllm.core.block_pool import BlockPool, KVCacheBlock
from minivllm.errors import MinivllmError
from minivllm.lab.palette import BLUE, GREEN, INK, ORANGE, PALE, PURPLE, SERIES, SKY, VERMILLION
from minivllm.simulate.workloads import WORKLOADS, RequestLengths, workload
from widgets.base import Challenge, LessonWidget, Progress, Verdict, choice, require_numbers, steps
from widgets.svg import MID, QUIET, RULE, SMALL, Axes, Box, Drawing, Scale, Segment, cells, legend, short

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
POOLS = (2048, 4096, 8192, 16384)
SAMPLES = (1, 2, 4, 8)
LONGEST = 2048  # tokens of the longest request that is let in, and what each would reserve without blocks
TICKS, TICKS_OF_A_LIFE = 60, 15
RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
IN_THE_LESSON = {"requests": "azure-conversation", "samples": 4}
MOST = {"block_size": 2**16, "samples": 64, "slots": 2**16}
START = {"block_size": 16, "requests": "sharegpt", "samples": 1, "share": True, "slots": 8192}


@dataclass(frozen=True)
class Cell:
    """One block of the pool at the moment that is drawn."""

    owner: int | None
    """Number of the request that holds it; None where it is free."""
    filled: int
    """Slots that hold a token."""
    ref_cnt: int


@dataclass(frozen=True)
class State:
    """The pool at one moment of serving, and what follows from it."""

    block_size: int
    slots: int
    samples: int
    share: bool
    workload_title: str
    cells: tuple[Cell, ...]
    """By block id; block 0, the null block, first."""
    requests: int
    tokens: int
    """Slots that hold a token."""
    table_entries: int
    """Over all sequences; a shared block stands in several tables."""
    evicted: int
    empty_by_size: Mapping[int, float]
    """Block size -> share of the held slots that are empty, counted over many requests of this kind."""
    price: Mapping[int, float]
    """Block size -> time of decode attention over that of a contiguous cache; empty where it was not measured."""
    price_of: str
    """Where that was measured."""

    @property
    def held(self) -> int:
        """Blocks that somebody holds."""
        return sum(cell.owner is not None for cell in self.cells)

    @property
    def empty(self) -> float:
        """The share of the held slots that hold no token."""
        return 1 - self.tokens / (self.held * self.block_size) if self.held else 0.0

    @property
    def saved(self) -> float:
        """The share of blocks that sharing saves: every table entry would be a block of its own."""
        return 1 - self.held / self.table_entries if self.held else 0.0

    @property
    def used(self) -> float:
        """The share of all slots that hold a token."""
        return self.tokens / self.slots

    @property
    def reserved_requests(self) -> int:
        """Requests that would run if each of their samples reserved LONGEST slots."""
        return self.slots // (LONGEST * self.samples)


@dataclass(eq=False)
class _Request:
    """One request while it runs: the prompt's full blocks, held by every sample, and each sample's own."""

    number: int
    lengths: RequestLengths
    written: int = 1
    shared: list[KVCacheBlock] = field(default_factory=list)
    own: list[list[KVCacheBlock]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Tokens of each sample, prompt included."""
        return self.lengths.prompt_tokens + self.written


class _Server:
    """Serves requests on a pool, first come, first served, `stride` tokens a tick."""

    def __init__(self, blocks: int, block_size: int, samples: int, share: bool) -> None:
        self.pool, self.block_size, self.samples, self.share = BlockPool(blocks + 1), block_size, samples, share
        self.running: list[_Request] = []
        self.evicted = 0

    def shared_blocks(self, request: _Request) -> int:
        """Full blocks of the prompt, which all samples read and nobody writes again."""
        return request.lengths.prompt_tokens // self.block_size if self.share and self.samples > 1 else 0

    def own_blocks(self, request: _Request) -> int:
        """Blocks that each sample has to itself."""
        return -(-request.tokens // self.block_size) - self.shared_blocks(request)

    def admit(self, request: _Request) -> bool:
        """Take the blocks of its tokens; False where there are too few."""
        shared, own = self.shared_blocks(request), self.own_blocks(request)
        if shared + own * self.samples > self.pool.get_num_free_blocks():
            return False
        request.shared = self.pool.get_new_blocks(shared)
        for _ in range(self.samples - 1):
            self.pool.touch(request.shared)
        request.own = [self.pool.get_new_blocks(own) for _ in range(self.samples)]
        self.running.append(request)
        return True

    def grow(self, request: _Request, waiting: deque[_Request], stride: int) -> None:
        """More tokens for every sample; the request admitted last gives way where the pool is dry."""
        request.written = min(request.written + stride, request.lengths.output_tokens)
        missing = self.own_blocks(request) - len(request.own[0])
        while missing * self.samples > self.pool.get_num_free_blocks():
            last = self.running.pop()
            self.free(last)
            waiting.appendleft(last)
            self.evicted += 1
            if last is request:
                return
        for blocks in request.own:
            blocks += self.pool.get_new_blocks(missing)

    def free(self, request: _Request) -> None:
        """Every sample lets go of its table, the last block first."""
        for own in request.own:
            self.pool.free_blocks(reversed([*request.shared, *own]))
        request.shared, request.own = [], []

    def tick(self, waiting: deque[_Request], stride: int) -> None:
        """Running requests grow, then finished ones leave, then waiting ones come in."""
        for request in list(self.running):
            if request.own:
                self.grow(request, waiting, stride)
        for request in self.running:
            if request.written >= request.lengths.output_tokens:
                self.free(request)
        self.running = [request for request in self.running if request.own]
        while waiting and self.admit(waiting[0]):
            waiting.popleft()


def sweep(
    block_size: int = START["block_size"],
    requests: str = START["requests"],
    samples: int = START["samples"],
    share: bool = START["share"],
    slots: int = START["slots"],
) -> State:
    """Serve requests from a queue that never runs empty until the pool is in its stride, and look at it.

    Args:
        block_size: token slots in a block.
        requests: a workload of `minivllm.simulate.workloads`.
        samples: answers to each request, generated side by side.
        share: do the samples of a request share the full blocks of its prompt?
        slots: token slots of the whole pool.

    Raises:
        MinivllmError: a value makes no sense.
    """
    require_numbers(MOST, block_size=block_size, samples=samples, slots=slots)
    require(isinstance(share, bool), f"share is True or False, not {share!r}")
    for name, value in (("block_size", block_size), ("samples", samples), ("slots", slots)):
        if value < 1:
            raise MinivllmError(f"{name} must be at least 1, not {value}")
    if block_size > slots:
        raise MinivllmError(f"a pool of {slots} slots has no block of {block_size}")
    server = _Server(slots // block_size, block_size, samples, share)
    lengths = _sampled(requests)
    waiting = deque(_Request(number, one) for number, one in enumerate(lengths))
    stride = max(1, round(statistics.mean(one.output_tokens for one in lengths) / TICKS_OF_A_LIFE))
    for _ in range(TICKS):
        server.tick(waiting, stride)
    price_of, price = _prices()
    return State(
        block_size=block_size,
        slots=slots,
        samples=samples,
        share=share,
        workload_title=workload(requests).title,
        cells=_cells(server),
        requests=len(server.running),
        tokens=sum(
            samples * request.tokens - (samples - 1) * len(request.shared) * block_size for request in server.running
        ),
        table_entries=sum(samples * (len(request.shared) + len(request.own[0])) for request in server.running),
        evicted=server.evicted,
        empty_by_size={size: _expected_empty(requests, samples, share, size) for size in BLOCK_SIZES},
        price=price,
        price_of=price_of,
    )


@cache
def _sampled(name: str) -> list[RequestLengths]:
    """Requests as they arrive, those of at most LONGEST tokens."""
    return [one for one in workload(name).sample(2000) if one.total <= LONGEST]


def _cells(server: _Server) -> tuple[Cell, ...]:
    """Every block of the pool: its owner, how full it is, and how many hold it."""
    found = [Cell(None, 0, block.ref_cnt) for block in server.pool.blocks]
    size = server.block_size
    for request in server.running:
        for block in request.shared:
            found[block.block_id] = Cell(request.number, size, block.ref_cnt)
        for own in request.own:
            rest = request.tokens - len(request.shared) * size
            for index, block in enumerate(own):
                found[block.block_id] = Cell(request.number, min(size, rest - index * size), block.ref_cnt)
    return tuple(found)


@cache
def _expected_empty(name: str, samples: int, share: bool, block_size: int) -> float:
    """The empty share of held slots over 400 requests at some point of their lives, weighted by how long they live."""
    held = stored = 0
    for number, one in enumerate(_sampled(name)[:400]):
        tokens = one.prompt_tokens + 1 + int((number * 0.618 % 1) * (one.output_tokens - 1))
        shared = one.prompt_tokens // block_size if share and samples > 1 else 0
        held += one.output_tokens * (shared + samples * (-(-tokens // block_size) - shared))
        stored += one.output_tokens * (samples * tokens - (samples - 1) * shared * block_size)
    return 1 - stored / (held * block_size)


@cache
def _prices() -> tuple[str, dict[int, float]]:
    """Where lesson 02 was measured, and its time of attention by block size; ("", {}) where it was not."""
    for path in sorted(RESULTS.glob("02_paged_attention.*.json")):
        record = json.loads(path.read_text())
        ratio = record["figures"]["blocks"]["price"]["ratio"]
        machine = record["machine"]
        return machine["gpu"] or machine["cpu"], {int(size): value for size, value in ratio.items()}
    return "", {}


WIDTH, HEIGHT, MARGIN = 720, 560, 20
POOL = Box(MARGIN, 70, WIDTH - 2 * MARGIN, 212)
FACTS_AT = 322
PLOT = Box(MARGIN + 40, 420, WIDTH - 2 * MARGIN - 60, 94)
OWNERS = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILLION, SERIES[6])
LEAST = -20.0
"""Percent: where the costs begin. Below zero lies what is cheaper than a contiguous cache."""
MOST_TIPS = 1100
"""Up to this many blocks are drawn individually, with tooltips."""


def figure(state: State) -> str:
    """The pool, coloured by request; what it comes to; and both costs of a block size."""
    drawing = Drawing(WIDTH, HEIGHT, "The block pool", verdict(state).words)
    _draw_pool(drawing, state)
    _draw_facts(drawing, state)
    _draw_costs(drawing, state)
    return drawing.render()


def _draw_pool(drawing: Drawing, state: State) -> None:
    number = len(state.cells) - 1
    drawing.heading((MARGIN, 24), "The pool", f"{number:,} blocks of {state.block_size} slots, in order of their ids")
    keys = [
        Segment("a colour is a request", 0, BLUE),
        Segment("held, empty", 0, _pale(BLUE)),
        Segment("free", 0, "#FFFFFF", outlined=True),
        Segment("null block", 0, MID),
        *([Segment("dot: samples share it", 0, INK)] if any(c.ref_cnt > 1 for c in state.cells[1:]) else []),
    ]
    legend(drawing, (MARGIN, 50), keys, POOL.width)
    columns = max(1, round((len(state.cells) * POOL.width / POOL.height) ** 0.5))
    if len(state.cells) > MOST_TIPS:
        cells(drawing, POOL, [MID, *(_colour(cell) for cell in state.cells[1:])], columns, gap=0.6)
        return
    wide, high = POOL.width / columns, POOL.height / -(-len(state.cells) // columns)
    for block_id, cell in enumerate(state.cells):
        place = Box(POOL.x + block_id % columns * wide, POOL.y + block_id // columns * high, wide - 1.5, high - 1.5)
        _draw_block(drawing, place, block_id, cell, state)


def _draw_block(drawing: Drawing, place: Box, block_id: int, cell: Cell, state: State) -> None:
    if block_id == 0:
        drawing.rect(place, MID, tip="block 0, the null block: nobody gets it")
        return
    if cell.owner is None:
        drawing.rect(place, "#FFFFFF", stroke=RULE, tip=f"block {block_id}: free")
        return
    colour = _colour(cell)
    holders = f", held by {cell.ref_cnt} samples" if cell.ref_cnt > 1 else ""
    tip = f"block {block_id}: request {cell.owner + 1}{holders}, {cell.filled} of {state.block_size} slots"
    if cell.filled < state.block_size:
        drawing.rect(place, _pale(colour), tip=tip)
    filled = Box(place.x, place.y, place.width * cell.filled / state.block_size, place.height)
    drawing.rect(filled, colour, tip=tip)
    if cell.ref_cnt > 1:
        middle = (place.x + place.width / 2, place.y + place.height / 2)
        drawing.circle(middle, max(1.5, min(place.width, place.height) / 6), INK, tip=tip)


def _colour(cell: Cell) -> str:
    return PALE if cell.owner is None else OWNERS[cell.owner % len(OWNERS)]


def _pale(colour: str) -> str:
    """Three quarters of the way to white."""
    channels = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return "#" + "".join(f"{channel + (255 - channel) * 3 // 4:02X}" for channel in channels)


def _draw_facts(drawing: Drawing, state: State) -> None:
    """Four figures in a row."""
    facts = (
        (f"{state.requests:,}", f"run at once; {state.reserved_requests} if", f"each reserved {LONGEST:,}"),
        (f"{state.used:.1%}", "of all slots", "hold a token"),
        (f"{state.saved:.1%}", "of the blocks saved", "by sharing"),
        (f"{short(state.table_entries)}", "entries in the", f"block tables ({short(state.table_entries * 4)}B)"),
    )
    for index, (figure_, first, second) in enumerate(facts):
        x = MARGIN + index * (WIDTH - 2 * MARGIN) / len(facts)
        drawing.text((x, FACTS_AT), figure_, size=22, bold=True)
        drawing.text((x, FACTS_AT + 19), first, size=SMALL, colour=QUIET)
        drawing.text((x, FACTS_AT + 34), second, size=SMALL, colour=QUIET)


def _draw_costs(drawing: Drawing, state: State) -> None:
    source = f"; time as measured on {state.price_of}" if state.price else ""
    drawing.heading((MARGIN, PLOT.y - 36), "What a block size costs", f"in percent{source}")
    axes = Axes(drawing, PLOT, Scale(1, BLOCK_SIZES[-1], log=True), Scale(LEAST, 80))
    ticks = (LEAST, 0, 20, 40, 60, 80)
    axes.frame("block size", "", x_ticks=BLOCK_SIZES, y_ticks=ticks, y_format=lambda value: f"{value:.0f} %")
    sizes = [float(size) for size in BLOCK_SIZES]
    axes.line(sizes, [100 * state.empty_by_size[size] for size in BLOCK_SIZES], ORANGE)
    if state.price:
        dearer = {float(size): max(LEAST, 100 * (ratio - 1)) for size, ratio in state.price.items()}
        axes.line(list(dearer), list(dearer.values()), BLUE)
    axes.mark_x(state.block_size, "")
    entries = [
        Segment(f"held slots that are empty (now {state.empty:.1%})", 0, ORANGE),
        *(
            [Segment(f"time of attention against a contiguous cache (now {_dearer(state):+.0%})", 0, BLUE)]
            if state.price
            else []
        ),
    ]
    legend(drawing, (MARGIN, PLOT.y - 14), entries, PLOT.width)


def _dearer(state: State) -> float:
    return state.price.get(state.block_size, 1.0) - 1


def verdict(state: State) -> Verdict:
    """What this configuration means, in one line."""
    if not state.requests:
        return Verdict(
            f"Not one request with {state.samples} samples fits: {state.slots // state.block_size} blocks are too few.",
            "broken",
        )
    sequences = f"{state.requests} requests" + (f" with {state.samples} samples each" if state.samples > 1 else "")
    words = f"{sequences} run; {state.empty:.1%} of the slots they hold are empty, and {state.used:.1%} of all slots "
    words += "hold a token."
    if state.empty > 0.25:
        return Verdict(f"{words} Most of a block of {state.block_size} waits for tokens that never come.", "broken")
    if state.price and _dearer(state) > 0.25:
        return Verdict(f"{words} But attention takes {state.price[state.block_size]:.1f} times as long.", "tight")
    return Verdict(words, "tight" if state.empty > 0.08 else "fine")


def _sharing_pays(state: State) -> Progress:
    words = f"Sharing saves {state.saved:.0%} of the blocks; {state.empty:.0%} of the held slots are empty."
    return Progress(state.saved >= 0.75 and state.empty < 0.1, words)


CHALLENGE = Challenge(
    goal="Find requests and knobs for which sharing saves three quarters of the blocks, while less than 10% of the "
    "held slots are empty.",
    check=_sharing_pays,
    hint="Samples share their prompt, and nothing of what they write. Who sends long prompts and wants short answers?",
    lesson="What can be shared is the common beginning; today vLLM shares it between any two requests (lesson 05).",
)


def show() -> LessonWidget:
    """The widget: knobs for the pool and for the requests, the picture, and the challenge."""
    kinds = [(kind.title, name) for name, kind in WORKLOADS.items()]
    knobs = {
        "The pool": {
            "block_size": steps("Block size", BLOCK_SIZES, START["block_size"], "token slots in a block"),
            "slots": steps("Slots", [(f"{slots:,}", slots) for slots in POOLS], START["slots"], "slots in the pool"),
        },
        "The requests": {
            "requests": choice("Lengths as in", kinds, START["requests"], "how long prompts and answers are"),
            "samples": steps("Samples", SAMPLES, START["samples"], "answers to each request, side by side"),
            "share": choice("Prompt", [("shared", True), ("a copy each", False)], True, "who holds its full blocks"),
        },
    }
    return LessonWidget(
        title="Who holds which block",
        lead="A colour is a request, a cell is a block of the cache. Make the blocks too large, or the samples many.",
        knobs=knobs,
        presets={
            "Start again": START,
            "Blocks too large": {**START, "block_size": 512, "requests": "alpaca"},
        },
        sweep=sweep,
        figure=figure,
        verdict=verdict,
        challenge=CHALLENGE,
    )


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(figure(sweep(**IN_THE_LESSON)))
