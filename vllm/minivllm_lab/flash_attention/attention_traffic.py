"""Bytes that causal attention moves between a GPU's memory and its chip: with a stored score
matrix, and tile by tile.

Everything is for one head and one sequence, forward. `flash_traffic` walks the loop that the tiled
kernel runs and adds up what each step loads and stores; no cache behind the chip is assumed, so a
real GPU, with its L2, may move less.

Dao et al. 2022 (FlashAttention, arXiv 2205.14135): algorithm 0 and theorem 2 for what is counted
and its bounds. The loop order, queries outside and keys inside, is that of FlashAttention-2 (arXiv
2307.08691).
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from minivllm.errors import MinivllmError

KIB = 1024
ACCUMULATOR_BYTES = 4
"""Scores, maxima, sums and outputs are kept in float32 while they are on the chip."""
SMALLEST_TILE = 16
"""Minimum rows per tile for the tensor cores."""
REGISTER_FILE = 256 * KIB
"""Registers of a multiprocessor: 65,536 of 32 bits on each NVIDIA architecture from 7.0 to 9.0,
in bytes.
"""
OTHER_REGISTERS = REGISTER_FILE // 4
"""Addresses, masks, weights on their way into the tensor cores. With this share the model agrees
with Triton's compiler about Hopper; see the test of `register_bytes`.
"""


class Chip(NamedTuple):
    """The resources of a multiprocessor that one program may use."""

    shared_memory: int
    """Bytes of shared memory: CUDA C++ programming guide, compute capabilities."""
    q_in_registers: bool
    """The tensor cores take their operands from registers. Hopper's read them from shared
    memory.
    """


CHIPS = {
    "L4": Chip(99 * KIB, q_in_registers=True),
    "RTX 4090": Chip(99 * KIB, q_in_registers=True),
    "A100-80": Chip(163 * KIB, q_in_registers=True),
    "H100": Chip(227 * KIB, q_in_registers=False),
    "H200": Chip(227 * KIB, q_in_registers=False),
}
"""By the names of `HARDWARE`. Blackwell is missing: its tensor cores keep sums in a memory of
their own.
"""


class Traffic(NamedTuple):
    """Memory traffic, operations and temporary storage of one head's attention."""

    read: int
    """Bytes from device memory."""
    written: int
    """Bytes to device memory."""
    flops: int
    """Floating-point operations of the two matmuls; the softmax between them is not counted."""
    extra: int
    """Bytes of device memory beyond queries, keys, values and output."""

    @property
    def moved(self) -> int:
        """Bytes moved in both directions."""
        return self.read + self.written

    @property
    def intensity(self) -> float:
        """Operations per byte moved."""
        return self.flops / self.moved


def naive_traffic(length: int, head_dim: int, itemsize: int = 2) -> Traffic:
    """Count the paper's algorithm 0: scores are written, read for the softmax, its weights
    written, and read again.
    """
    vectors, matrix = length * head_dim * itemsize, length * length * itemsize
    return Traffic(
        read=3 * vectors + 2 * matrix,  # Q, K, V; scores, weights
        written=2 * matrix + vectors,  # scores, weights; output
        flops=4 * length * length * head_dim,
        extra=2 * matrix,
    )


def flash_traffic(
    length: int, head_dim: int, block_q: int, block_k: int, itemsize: int = 2, *, causal: bool = True
) -> Traffic:
    """Count the tiled loop: each tile of `block_q` queries reads the tiles of `block_k` keys
    that it sees.
    """
    row = head_dim * itemsize
    read = written = flops = 0
    for rows, seen in flash_programs(length, block_q, block_k, causal=causal):
        read += rows * row + 2 * seen * row  # Q once; K and V for every tile of queries again
        flops += 4 * rows * seen * head_dim
        written += rows * (row + ACCUMULATOR_BYTES)  # the output, and the logarithm of each row's sum
    return Traffic(read, written, flops, extra=length * ACCUMULATOR_BYTES)


def flash_programs(length: int, block_q: int, block_k: int, *, causal: bool = True) -> Iterator[tuple[int, int]]:
    """Yield each program of the tiled loop, in the grid's order, as (queries of its tile, keys that
    it reads).
    """
    for start in range(0, length, block_q):
        rows = min(block_q, length - start)
        yield rows, min(math.ceil((start + rows) / block_k) * block_k, length) if causal else length


def least_traffic(length: int, head_dim: int, itemsize: int = 2) -> int:
    """Count the bytes that any attention must move: Q, K and V read once, the output written
    once.
    """
    return 4 * length * head_dim * itemsize


def shared_memory_bytes(
    block_q: int, block_k: int, head_dim: int, stages: int = 2, itemsize: int = 2
) -> dict[str, int]:
    """Return the shared memory of one program, in bytes; it holds `stages` tiles of keys and values
    at a time.

    A kernel that needs more than `Chip.shared_memory` is not launched.
    """
    return {"Q": block_q * head_dim * itemsize, "K, V": 2 * stages * block_k * head_dim * itemsize}


def register_bytes(
    block_q: int, block_k: int, head_dim: int, itemsize: int = 2, *, q_in_registers: bool = False
) -> dict[str, int]:
    """Return the register bytes of a program's sums. Beyond `REGISTER_FILE - OTHER_REGISTERS`
    they spill (modelled).
    """
    parts = {
        "O": block_q * head_dim * ACCUMULATOR_BYTES,
        "scores": block_q * block_k * ACCUMULATOR_BYTES,
        "m, l": 2 * block_q * ACCUMULATOR_BYTES,
    }
    return parts | ({"Q": block_q * head_dim * itemsize} if q_in_registers else {})


def most_queries_launched(chip: Chip, block_k: int, head_dim: int, stages: int = 2) -> int:
    """Return the maximum number of queries per tile that `chip` can launch; 0 if keys and values
    leave no room for any.
    """
    parts = shared_memory_bytes(1, block_k, head_dim, stages)
    return max(0, (chip.shared_memory - parts["K, V"]) // parts["Q"])


def most_queries_kept(chip: Chip, block_k: int, head_dim: int) -> int:
    """Return the maximum number of queries per tile whose sums stay in registers (modelled)."""
    a_row = sum(register_bytes(1, block_k, head_dim, q_in_registers=chip.q_in_registers).values())
    return (REGISTER_FILE - OTHER_REGISTERS) // a_row


def largest_block_q(on_chip: int, head_dim: int, block_k: int, itemsize: int = 2) -> int:
    """Return the largest number of queries per tile, in steps of 16, whose tiles and sums take at
    most `on_chip` bytes.

    Raises:
        MinivllmError: not even 16 fit together with the tiles of keys and values.
    """
    tiles = shared_memory_bytes(1, block_k, head_dim, stages=1, itemsize=itemsize)
    a_row = tiles["Q"] + sum(register_bytes(1, block_k, head_dim, itemsize).values())
    rows = (on_chip - tiles["K, V"]) // a_row // SMALLEST_TILE * SMALLEST_TILE
    if rows < SMALLEST_TILE:
        needed = tiles["K, V"] + SMALLEST_TILE * a_row
        raise MinivllmError(
            f"{SMALLEST_TILE} queries and {block_k} keys of head dim {head_dim} need {needed:,} bytes on the chip, "
            f"but there are {on_chip:,}: use fewer keys per tile"
        )
    return rows


def longest_naive(memory: int, heads: int, itemsize: int = 2) -> int:
    """Return the maximum number of tokens whose scores and weights, for all heads at once, fit into
    `memory` bytes.
    """
    return math.isqrt(memory // (2 * heads * itemsize))


def exponent(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Fit y = c x^p by least squares on logarithms and return p: 1 is linear, 2 quadratic."""
    log_x, log_y = [math.log(x) for x in xs], [math.log(y) for y in ys]
    mean_x, mean_y = sum(log_x) / len(xs), sum(log_y) / len(ys)
    covariance = sum((x - mean_x) * (y - mean_y) for x, y in zip(log_x, log_y, strict=True))
    return covariance / sum((x - mean_x) ** 2 for x in log_x)
