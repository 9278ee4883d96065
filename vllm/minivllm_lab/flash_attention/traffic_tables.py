"""Lesson 03's counted bytes: by length, the powers that they follow, and at the shape of the paper's
figure 2.
"""

from collections.abc import Mapping

from minivllm_lab.flash_attention.attention_traffic import (
    exponent,
    flash_traffic,
    largest_block_q,
    least_traffic,
    naive_traffic,
)
from minivllm_lab.tables import table

MIB = 2**20
HEAD_DIMS = [32, 64, 128, 256]
"""The head dims used to fit the exponent of the head dim."""
ON_CHIP = 228 * 1024
"""Bytes of shared memory of an H100's multiprocessor."""
PAPERS_GB = 40.3
"""FlashAttention, figure 2: what standard attention moved, forward and backward."""


def show_traffic(
    head_dim: int, block_q: int, block_k: int, longest: int, peaks: Mapping[str, float]
) -> dict[str, dict]:
    """Print the bytes that one head moves and keeps by length; return them, the powers that they
    follow, and the ratios at the paper's shape.

    `peaks` are the MiB that NumPy allocated.
    """
    lengths = [2**power for power in range(10, longest.bit_length())]
    naive = [naive_traffic(length, head_dim) for length in lengths]
    tiled = [flash_traffic(length, head_dim, block_q, block_k) for length in lengths]
    rows = []
    for length, stored, tiles in list(zip(lengths, naive, tiled, strict=True))[1::2]:
        moved = (f"{stored.moved / MIB:,.1f}", f"{tiles.moved / MIB:,.1f}", f"{stored.moved / tiles.moved:.1f} ×")
        rows.append((f"{length:,}", *moved, f"{stored.extra / MIB:,.0f}", f"{tiles.extra / MIB:.3f}"))
    columns = ("tokens", "T × T moves", "tiles move", "less by", "T × T keeps", "tiles keep")
    caption = (
        f"tiles of {block_q} × {block_k}; up to 2,048 tokens the loops themselves counted the same\n"
        f"at 2,048, in float32, NumPy allocated {peaks['naive']:.1f} MiB for T × T, {peaks['tiled']:.1f} for tiles"
    )
    table(f"One head of {head_dim}, causal, 16 bits: MiB", columns, rows, caption)
    traffic = {
        "lengths": lengths,
        "moved": {"naive": [x.moved for x in naive], "tiled": [x.moved for x in tiled]},
        "kept": {"naive": [x.extra for x in naive], "tiled": [x.extra for x in tiled]},
        "less": naive[-1].moved / tiled[-1].moved,
        "peak_mib": dict(peaks),
    }
    return {"traffic": traffic, "powers": _fit_powers(traffic), "figure_2": _compare_with_paper()}


def _fit_powers(traffic: dict) -> dict[str, float]:
    """Fit the powers of T, of the head dim and of the memory on the chip with which the counted
    bytes grow.
    """

    def moved(head_dim: int, memory: int) -> int:
        return flash_traffic(65536, head_dim, largest_block_q(memory, head_dim, 16), 16).moved

    lengths, half = traffic["lengths"], len(traffic["lengths"]) // 2  # only in the longer half is T far below T²
    powers = {f"{name}_moved": exponent(lengths[half:], traffic["moved"][name][half:]) for name in ("naive", "tiled")}
    powers |= {f"{name}_kept": exponent(lengths, traffic["kept"][name]) for name in ("naive", "tiled")}
    powers["head_dim"] = exponent(HEAD_DIMS, [moved(head_dim, ON_CHIP) for head_dim in HEAD_DIMS])
    chips = [ON_CHIP // 4, ON_CHIP // 2, ON_CHIP, ON_CHIP * 2]
    powers["on_chip"] = exponent(chips, [moved(64, memory) for memory in chips])
    return powers


def _compare_with_paper() -> dict:
    """Compare the ways at the shape of the paper's figure 2, forward: 64 sequences of 1,024 tokens,
    16 heads of 64.
    """
    naive, least, heads = naive_traffic(1024, 64).moved, least_traffic(1024, 64), 64 * 16
    tiled = {str(n): flash_traffic(1024, 64, n, 64, causal=False).moved for n in (64, 128, 256)}
    both_ways = PAPERS_GB * 1e9 / (3 * least * heads)  # on the way back 5 arrays in, 3 out
    less = {queries: naive / moved for queries, moved in tiled.items()}
    return {"ceiling": naive / least, "ceiling_both_ways": both_ways, "tiles": less}
