"""Lesson 03: the tiles of attention: what they move, where they no longer fit, and one row as it is walked.

The bytes come from the loop counters of `minivllm.simulate.attention_traffic`, which the lesson's script holds against
loops that count their own trips; what fits on a chip from the same module, which is held against a compiler. The row of
scores is one that the embedded model computed: `vllm/03_flash_attention.py --row` wrote it.

The picture in the lesson's text: `uv run python -P -m widgets flash_attention lessons/figures/03_tiles.svg`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import inf
from typing import Any

from minivllm.config.checks import require
from minivllm.simulate.attention_traffic import (
    CHIPS,
    KIB,
    OTHER_REGISTERS,
    REGISTER_FILE,
    SMALLEST_TILE,
    Chip,
    Traffic,
    flash_programs,
    flash_traffic,
    least_traffic,
    longest_naive,
    most_queries_kept,
    most_queries_launched,
    naive_traffic,
    register_bytes,
    shared_memory_bytes,
)
from minivllm.simulate.hardware import Hardware, get_hardware
from minivllm.simulate.load_sweep import crossing
from widgets.flash_attention_challenges import CHALLENGES
from widgets.flash_attention_figure import figure
from widgets.flash_attention_row import Row, Step, scaled_row, walked
from widgets.knobs import choice, steps
from widgets.plot import tokens
from widgets.shell import LessonWidget
from widgets.spec import Guess, Spec, Verdict, require_numbers

QUERIES = (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
"""Queries of a tile: the swept axis."""
KEYS = (16, 32, 48, 64, 80, 96, 112, 128, 192, 256)
LENGTHS = tuple(2**power for power in range(10, 18))  # 1K to 128K tokens
HEADS = 32
"""Query heads whose scores would be stored together: Llama-3.1-8B's."""
MOST_BANDS = 6
"""Bands of programs in the map of tiles; more programs than that are drawn together."""
MOST = {
    "length": 2**17,
    "head_dim": 1024,
    "block_q": 1024,
    "block_k": 1024,
    "stages": 16,
    "keys_a_tile": 1024,
    "times": 1e6,
}
MODELS = {64: "meta-llama/Llama-3.2-1B", 128: "meta-llama/Llama-3.1-8B", 256: "google/gemma-3-4b-it"}
"""A model with heads of this width."""


@dataclass(frozen=True)
class Band:
    """Programs that are drawn together in the map of tiles."""

    programs: int
    """Programs up to the end of this band, those before it too."""
    queries: int
    """Queries up to its end."""
    read: int
    """Bytes loaded once it is through, by the programs before it too."""


@dataclass(frozen=True)
class State:
    """One configuration and its results. Bytes are of one head unless all heads are named."""

    length: int
    head_dim: int
    hardware: Hardware
    chip: Chip
    block_q: int
    block_k: int
    stages: int
    naive: Traffic
    tiled: Traffic
    least: int
    queries: tuple[int, ...]
    by_queries: tuple[Traffic, ...]
    """Of the tiles, at each of `queries`."""
    lengths: tuple[int, ...]
    naive_by_length: tuple[int, ...]
    """Bytes moved at each of `lengths`."""
    tiled_by_length: tuple[int, ...]
    few: float
    """Tiles of fewer queries than this move more bytes than T × T stored."""
    kept: int
    """Most queries of a tile whose O and scores stay in registers."""
    launched: int
    """Most queries of a tile that fit into shared memory."""
    longest: int
    """Most tokens whose scores and weights, of all heads, fit into the GPU's memory."""
    programs: int
    bands: tuple[Band, ...]
    row: Row
    steps: tuple[Step, ...]
    own: bool
    """The row was walked by the reader's code."""

    @property
    def less(self) -> float:
        """How many times fewer bytes the tiles move."""
        return self.naive.moved / self.tiled.moved

    @property
    def shared(self) -> dict[str, int]:
        """Bytes of shared memory, by what they hold."""
        return shared_memory_bytes(self.block_q, self.block_k, self.head_dim, self.stages)

    @property
    def registers(self) -> dict[str, int]:
        """Bytes of registers, by what they hold."""
        parts = register_bytes(self.block_q, self.block_k, self.head_dim, q_in_registers=self.chip.q_in_registers)
        return parts | {"others": OTHER_REGISTERS}

    @property
    def launches(self) -> bool:
        """Does the tile fit into shared memory?"""
        return self.block_q <= self.launched

    @property
    def spills(self) -> bool:
        """Do O and the scores need more registers than there are?"""
        return self.block_q > self.kept

    @property
    def ridge(self) -> float:
        """Operations that the GPU can do in the time that its memory takes for one byte."""
        return self.hardware.ridge("float16")

    @property
    def wrong(self) -> Step | None:
        """The first step of the reader's code that is not right."""
        return next((step for step in self.steps if step.wrong), None)

    def launched_at(self, queries: int) -> int:
        """Bytes of shared memory that a tile of so many queries asks for."""
        return sum(shared_memory_bytes(queries, self.block_k, self.head_dim, self.stages).values())


def sweep(
    length: int = 8192,
    head_dim: int = 128,
    gpu: str = "H100",
    block_q: int = 32,
    block_k: int = 64,
    stages: int = 2,
    keys_a_tile: int = 4,
    times: float = 1,
    softmax_step: Callable[..., Any] | None = None,
) -> State:
    """Count the bytes of one configuration and of the swept axis, and take the row of scores tile by tile.

    Args:
        length: tokens of the sequence.
        head_dim: width of a head, 16 bits an element.
        gpu: one of `CHIPS`.
        block_q, block_k: queries and keys of a tile.
        stages: tiles of keys and values that are in shared memory at a time.
        keys_a_tile: tile of the row that is stepped through.
        times: what the row's scores are multiplied by.
        softmax_step: the reader's own, from exercise 03.

    Raises:
        MinivllmError: a value makes no sense, or the reader's code gives no state.
    """
    require_numbers(MOST, length=length, head_dim=head_dim, block_q=block_q, block_k=block_k, stages=stages)
    require_numbers(MOST, keys_a_tile=keys_a_tile, times=times)
    require(gpu in CHIPS, f"gpu must be one of {', '.join(CHIPS)}, not {gpu!r}")
    require(times > 0, f"times must be above 0, not {times}")
    require(block_q >= SMALLEST_TILE, f"block_q must be at least {SMALLEST_TILE}, not {block_q}")
    chip, hardware, naive = CHIPS[gpu], get_hardware(gpu), naive_traffic(length, head_dim)
    by_queries = _by_queries(length, head_dim, block_k)
    row = scaled_row(times)
    return State(
        length=length,
        head_dim=head_dim,
        hardware=hardware,
        chip=chip,
        block_q=block_q,
        block_k=block_k,
        stages=stages,
        naive=naive,
        tiled=_moved(length, head_dim, block_q, block_k),
        least=least_traffic(length, head_dim),
        queries=QUERIES,
        by_queries=by_queries,
        lengths=LENGTHS,
        naive_by_length=tuple(naive_traffic(long, head_dim).moved for long in LENGTHS),
        tiled_by_length=tuple(_moved(long, head_dim, block_q, block_k).moved for long in LENGTHS),
        few=_few(by_queries, naive),
        kept=most_queries_kept(chip, block_k, head_dim),
        launched=most_queries_launched(chip, block_k, head_dim, stages),
        longest=longest_naive(hardware.memory_bytes, HEADS),
        programs=-(-length // block_q),
        bands=_bands(length, head_dim, block_q, block_k),
        row=row,
        steps=walked(row, keys_a_tile, softmax_step),
        own=softmax_step is not None,
    )


@lru_cache(maxsize=4096)
def _moved(length: int, head_dim: int, block_q: int, block_k: int) -> Traffic:
    return flash_traffic(length, head_dim, block_q, block_k)


@lru_cache(maxsize=256)
def _by_queries(length: int, head_dim: int, block_k: int) -> tuple[Traffic, ...]:
    return tuple(_moved(length, head_dim, block_q, block_k) for block_q in QUERIES)


def _few(by_queries: Sequence[Traffic], naive: Traffic) -> float:
    """The number of queries below which tiles move more than the naive way; the fewest where they never do."""
    few = crossing(QUERIES[::-1], [one.moved for one in by_queries[::-1]], naive.moved, log=True)
    return min(few, QUERIES[-1]) if few < inf else QUERIES[0]


@lru_cache(maxsize=256)
def _bands(length: int, head_dim: int, block_q: int, block_k: int) -> tuple[Band, ...]:
    """All programs, in bands of about as many each."""
    programs, row = list(flash_programs(length, block_q, block_k)), 2 * head_dim
    count = min(len(programs), MOST_BANDS)
    ends = [len(programs) * (index + 1) // count for index in range(count)]
    bands, read, queries = [], 0, 0
    for first, end in pairwise([0, *ends]):
        read += sum((rows + 2 * seen) * row for rows, seen in programs[first:end])
        queries += sum(rows for rows, _ in programs[first:end])
        bands.append(Band(end, queries, read))
    return tuple(bands)


def verdict(state: State) -> Verdict:
    """What this configuration means, in one line."""
    if state.wrong:
        return Verdict(_what_is_wrong(state, state.wrong), "broken")
    done = "Your softmax_step gives the right row. " if state.own else ""
    needed, there = sum(state.shared.values()) / KIB, state.chip.shared_memory / KIB
    if not state.launches:
        words = f"The kernel is not launched: it asks for {needed:.0f} KiB of shared memory, and there are {there:.0f}."
        return Verdict(done + words, "broken")
    if state.less < 1:
        return Verdict(f"{done}{_fewer(state)}: {state.block_q} queries a tile are too few.", "broken")
    words = f"{done}{_fewer(state)}, {state.tiled.intensity:.0f} operations a byte (ridge: {state.ridge:.0f})."
    if state.spills:
        sums = sum(state.registers.values()) / KIB
        return Verdict(f"{words} But registers spill: {sums:.0f} KiB are wanted of {REGISTER_FILE / KIB:.0f}.", "tight")
    return Verdict(words, "fine" if state.less >= 2 else "tight")


def _fewer(state: State) -> str:
    if abs(state.less - 1) < 0.01:
        return "As many bytes as with T × T stored, within 1 %"
    if state.less < 1:
        return f"{1 / state.less:.2f} times more bytes than with T × T stored"
    return f"{state.less:.2f} times fewer bytes than with T × T stored"


def _what_is_wrong(state: State, step: Step) -> str:
    name, tile = step.wrong[0], state.steps.index(step) + 1
    got, right = {"m": (step.got.m, step.right.m), "l": (step.got.l, step.right.l)}.get(
        name, (step.got.o[0], step.right.o[0])
    )
    words = f"Your softmax_step goes wrong at tile {tile}: {name} is {got:.3f}, and {right:.3f} is right."
    factor = {"l": step.factor, "O": step.factor_o}.get(name)
    if factor is None or abs(factor - step.right_factor) < 1e-3 or tile == 1:
        return words
    return f"{words} The old {name} was multiplied by {factor:.3f}, and exp(old m − new m) is {step.right_factor:.3f}."


def command(state: State) -> str:
    """The `vllm serve` line of a model with such heads, and what it leaves to the kernel."""
    fast = f"vllm serve {MODELS.get(state.head_dim, MODELS[128])} --max-model-len {state.length}"
    return (
        f"# No flag sets a tile: the backend picks it for the GPU and the head dim ({state.head_dim} here).\n"
        f"{fast} --attention-backend FLASH_ATTN"
    )


GUESS = Guess(
    "Take more and more queries a tile. What gives way first on this H100?",
    ("Shared memory: Q, K and V", "Registers: O and the scores", "Nothing up to 1,024 queries"),
    1,
    "O and the scores are kept in 32 bits: they outgrow the registers long before Q, in 16, fills shared memory.",
)
KNOBS = {
    "The attention": {
        "length": steps("Tokens T", [(tokens(long), long) for long in LENGTHS], 8192, "length of the sequence"),
        "head_dim": steps("Head dim", [64, 128, 256], 128, "width of a head"),
        "gpu": choice(
            "GPU",
            [(f"{name}: {chip.shared_memory // KIB} KiB", name) for name, chip in CHIPS.items()],
            "H100",
            "with the shared memory that one program may use",
        ),
    },
    "The tiles": {
        "block_q": steps("Queries", QUERIES, 32, "queries of a tile"),
        "block_k": steps("Keys", KEYS, 64, "keys of a tile"),
        "stages": steps("K, V at once", [1, 2, 3, 4], 2, "tiles of keys and values in shared memory at a time"),
    },
    "One row, tile by tile": {
        "keys_a_tile": steps("Keys a tile", [2, 3, 4, 6, 8, 12], 4, "of the 24 keys of the row"),
        "times": steps(
            "Scores times",
            [("1/16", 1 / 16), ("1/4", 1 / 4), ("1", 1), ("4", 4), ("16", 16)],
            1,
            "larger scores, sharper weights",
        ),
    },
}
SPEC = Spec(
    name="flash_attention",
    title="Attention in tiles",
    lead="Drag the tile through the plot; then play how its programs load, and how one row is summed.",
    knobs=KNOBS,
    presets={
        "Spilled": {"block_q": 256},
        "Not launched": {"block_q": 768},
        "FlashAttention-3": {"block_q": 128, "block_k": 128},
    },
    sweep=sweep,
    figure=figure,
    verdict=verdict,
    command=command,
    challenges=CHALLENGES,
    guess=GUESS,
    own={"softmax_step": "takes one more tile of scores and values into m, l and O"},
)


def show(**knobs: Any) -> LessonWidget:
    """The widget: `show(block_q=128)` sets a knob, `show(softmax_step=mine.softmax_step)` walks with yours."""
    return LessonWidget(SPEC, **knobs)
