"""Compute the state of lesson 03's widget: the bytes that tiles of each size move, what fits on a
chip, and one row.

The bytes come from the loop counters of `minivllm_lab.flash_attention.attention_traffic`, which the
lesson's script checks against loops that count their own iterations. What fits on a chip comes from
the same module, checked against a compiler. The scores of the row come from the embedded model:
`vllm/03_flash_attention.py --row` wrote them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from typing import Any

from minivllm_lab.flash_attention.attention_traffic import (
    CHIPS,
    OTHER_REGISTERS,
    Chip,
    Traffic,
    flash_traffic,
    longest_naive,
    most_queries_kept,
    most_queries_launched,
    naive_traffic,
    register_bytes,
    shared_memory_bytes,
)
from minivllm_simulate.hardware import Hardware, get_hardware
from minivllm_simulate.load_sweep import crossing
from widgets.flash_attention.row import Row, Step, scaled_row, walked

QUERIES = (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
"""Queries per tile: the swept axis."""
KEYS = (16, 32, 48, 64, 80, 96, 112, 128, 192, 256)
LENGTHS = tuple(2**power for power in range(10, 18))  # 1K to 128K tokens
HEADS = 32
"""Query heads whose scores are stored together: those of Llama-3.1-8B."""


@dataclass(frozen=True)
class State:
    """One configuration and its results. Bytes are for one head unless noted otherwise."""

    length: int
    head_dim: int
    hardware: Hardware
    chip: Chip
    block_q: int
    block_k: int
    stages: int
    naive: Traffic
    tiled: Traffic
    queries: tuple[int, ...]
    by_queries: tuple[Traffic, ...]
    """The traffic of tiles with each of `queries`."""
    few: float
    """Below this many queries, tiles move more bytes than T × T stored."""
    kept: int
    """The most queries per tile whose O and scores fit into registers."""
    launched: int
    """The most queries per tile that fit into shared memory."""
    longest: int
    """The most tokens whose scores and weights, of all heads, fit into the GPU's memory."""
    programs: int
    row: Row
    steps: tuple[Step, ...]
    own: bool
    """Whether the reader's code computed the row."""

    @property
    def less(self) -> float:
        """Return how many times fewer bytes the tiles move."""
        return self.naive.moved / self.tiled.moved

    @property
    def shared(self) -> dict[str, int]:
        """Return the bytes of shared memory that each part takes."""
        return shared_memory_bytes(self.block_q, self.block_k, self.head_dim, self.stages)

    @property
    def registers(self) -> dict[str, int]:
        """Return the bytes of registers that each part takes."""
        parts = register_bytes(self.block_q, self.block_k, self.head_dim, q_in_registers=self.chip.q_in_registers)
        return parts | {"others": OTHER_REGISTERS}

    @property
    def launches(self) -> bool:
        """Return whether the tile fits into shared memory."""
        return self.block_q <= self.launched

    @property
    def spills(self) -> bool:
        """Return whether O and the scores exceed the registers."""
        return self.block_q > self.kept

    @property
    def ridge(self) -> float:
        """Return the operations that the GPU can do while its memory delivers one byte."""
        return self.hardware.ridge("float16")

    @property
    def wrong(self) -> Step | None:
        """Return the first step that the reader's code gets wrong, or None."""
        return next((step for step in self.steps if step.wrong), None)


def sweep(
    length: int = 8192,
    head_dim: int = 128,
    gpu: str = "H100",
    block_q: int = 16,
    block_k: int = 64,
    stages: int = 2,
    keys_a_tile: int = 4,
    times: float = 1,
    softmax_step: Callable[..., Any] | None = None,
) -> State:
    """Count the bytes moved in one configuration and along the swept axis, and sum the row of
    scores tile by tile.

    Args:
        length: Tokens in the sequence.
        head_dim: Width of a head, with 16 bits per element.
        gpu: One of `CHIPS`.
        block_q, block_k: Queries and keys per tile.
        stages: Tiles of keys and values in shared memory at a time.
        keys_a_tile: Keys per tile of the row.
        times: The factor of the row's scores.
        softmax_step: The reader's function of exercise 03.

    Raises:
        MinivllmError: The reader's code returns no state.
    """
    chip = CHIPS[gpu]
    hardware = get_hardware(gpu)
    naive = naive_traffic(length, head_dim)
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
        queries=QUERIES,
        by_queries=by_queries,
        few=_few(by_queries, naive),
        kept=most_queries_kept(chip, block_k, head_dim),
        launched=most_queries_launched(chip, block_k, head_dim, stages),
        longest=longest_naive(hardware.memory_bytes, HEADS),
        programs=-(-length // block_q),
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
    """Return the number of queries below which tiles move more bytes than the naive way, or the
    smallest tile if they never do.
    """
    few = crossing(QUERIES[::-1], [traffic.moved for traffic in by_queries[::-1]], naive.moved, log=True)
    return min(few, QUERIES[-1]) if few < inf else QUERIES[0]
