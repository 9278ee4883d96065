"""Lesson 03's flags, tables and figure, and what it computes from the counted bytes: the powers that they follow,
and ratios at the shape of the paper's figure 2.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from minivllm.errors import MinivllmError
from minivllm.models.tokenizer import load_tokenizer
from minivllm.platforms.allocator import keep_freed_memory
from minivllm.platforms.device import device_name
from minivllm.platforms.triton_utils import HAS_TRITON
from minivllm_lab.aot import SHARED_MEMORY, compile_for
from minivllm_lab.cli import lesson_parser, positive_int
from minivllm_lab.flash_attention import attention_traffic
from minivllm_lab.flash_attention.attention_in_model import ModelRun
from minivllm_lab.flash_attention.attention_traffic import exponent, flash_traffic, naive_traffic
from minivllm_lab.lesson import wrote
from minivllm_lab.pictures import palette
from minivllm_lab.pictures.figures import SMALL_TEXT, panels
from minivllm_lab.progress import track
from minivllm_lab.results import ensure_writable, write_json
from minivllm_lab.tables import Timed, closing, console, table

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

    from minivllm.models.decoder import Decoder
    from minivllm_lab.flash_attention.other_attention import Kernel

HEADS, BUDGET = 8, 2**30
"""Heads whose stored scores must fit into this many bytes."""
TEXT = "def total(prices, count):\n    result = 0\n    for price in prices:\n        result +="
LIMITS = {dtype.__name__: math.log(float(np.finfo(dtype).max)) for dtype in (np.float16, np.float32)}
"""The largest score whose exponential each dtype can hold."""
HEAD_DIM = 64
"""The head dim of the figure's curves."""
MIB = 2**20
HEAD_DIMS = [32, 64, 128, 256]
"""The head dims used to fit the exponent of the head dim."""
ON_CHIP = 228 * 1024
"""Bytes of shared memory of an H100's multiprocessor."""
PAPERS_GB = 40.3
"""FlashAttention, figure 2: what standard attention moved, forward and backward."""


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Build the parser: the common flags and the lesson's own; --help shows `doc`."""
    flags = lesson_parser(doc)
    flags.add_argument("--head-dim", type=positive_int, default=64, help="width of a head in the counted loops")
    flags.add_argument("--block-q", type=positive_int, default=128, help="queries per tile in the counted loops")
    flags.add_argument("--block-k", type=positive_int, default=64, help="keys per tile in the counted loops")
    flags.add_argument("--target", choices=tuple(SHARED_MEMORY), default="sm_90", help="GPU the tiles are compiled for")
    flags.add_argument("--row", metavar="FILE", help="also write one row of the model's scores, which the widget shows")
    return flags


class Plan(NamedTuple):
    """A run's model, and how much work it does."""

    model: Decoder
    tokenizer: Tokenizer
    longest: int
    """Tokens up to which the bytes are counted, a power of two."""
    lengths: list[int]
    """Tokens at which attention is timed."""
    tiles: list[tuple[int, int, int]]
    """Tiles that are compiled: queries, keys, loads in flight."""


def plan(arguments: argparse.Namespace, device: torch.device) -> Plan:
    """Load the model and plan the work that the flags select.

    Raises:
        MinivllmError: a flag is out of range, or --row cannot be written.
    """
    from minivllm.models.loader import load_model

    keep_freed_memory()
    _check(arguments)
    model, tokenizer = load_model(arguments.model, device, "float32")[0], load_tokenizer(arguments.model)
    lengths = [512, 1024] if arguments.quick else [512, 1024, 2048, 4096]
    if arguments.full or device.type == "cuda":
        lengths.append(8192)
    if arguments.quick:
        return Plan(model, tokenizer, 2**14, lengths, [(128, 64, 2), (128, 128, 4)])
    tiles = [(64, 32, 2), (128, 64, 2), (128, 128, 2), (128, 128, 4), (256, 64, 2)]
    return Plan(model, tokenizer, 2**17, lengths, tiles)


def _check(arguments: argparse.Namespace) -> None:
    """Reject flags that the lesson cannot handle."""
    if arguments.head_dim > 1024:
        raise MinivllmError(f"--head-dim must be at most 1,024, got {arguments.head_dim:,}")
    if arguments.block_q * arguments.block_k < 64:
        raise MinivllmError("a tile needs at least 64 scores, or NumPy counts for hours: raise --block-q or --block-k")
    if arguments.row:
        ensure_writable(arguments.row)


def show_budget(heads: int, budget: int) -> dict[str, int]:
    """Print the most tokens whose float32 scores and weights fit into `budget` bytes, and the first
    power of two that is refused; nothing is allocated.
    """
    longest = attention_traffic.longest_naive(budget, heads, 4)
    refused = 2 ** longest.bit_length()
    needs = heads * naive_traffic(refused, 1, 4).extra
    lack = f"{refused:,} tokens need {needs / MIB:,.0f} MiB, but there are {budget / MIB:,.0f}"
    console.print(f"It refuses: {lack}; {longest:,} tokens fit")
    return {"refused_at": refused, "longest": longest}


def show_model(run: ModelRun, row_path: str | None) -> dict[str, float]:
    """Print how close the logits are, and which dtypes the exponential of the model's scores
    overflows.

    The row of scores is written to `row_path`, if given, for the widget to show.
    """
    overflowing = " and ".join(dtype for dtype, limit in LIMITS.items() if run.largest_score > limit)
    kernel = "our kernel" if HAS_TRITON else "stored scores"
    scores = f"Its scores reach {run.largest_score:.1f}: exp overflows {overflowing or 'no dtype here'}."
    console.print(f"The model on {kernel}: logits within {run.logits_off_by:.0e}. {scores}", soft_wrap=True)
    if row_path:
        write_json(row_path, "attention_row", run.row)
        wrote(row_path)
    return {"logits_off_by": run.logits_off_by, "largest_score": run.largest_score}


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
        return flash_traffic(65536, head_dim, attention_traffic.largest_block_q(memory, head_dim, 16), 16).moved

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
    naive, least, heads = naive_traffic(1024, 64).moved, attention_traffic.least_traffic(1024, 64), 64 * 16
    tiled = {str(n): flash_traffic(1024, 64, n, 64, causal=False).moved for n in (64, 128, 256)}
    both_ways = PAPERS_GB * 1e9 / (3 * least * heads)  # on the way back 5 arrays in, 3 out
    less = {queries: naive / moved for queries, moved in tiled.items()}
    return {"ceiling": naive / least, "ceiling_both_ways": both_ways, "tiles": less}


def time_attention(device: torch.device, lengths: Sequence[int], kernel: Kernel) -> dict:
    """Time stored scores, `kernel` (on a GPU only) and PyTorch's fused attentions at each
    length, and print them.
    """
    from minivllm_lab.flash_attention.other_attention import attention_seconds

    heads, head_dim = (32, 128) if device.type == "cuda" else (4, 64)
    by_length, rows, ways = {}, [], []
    for length in track(lengths, "timing attention"):
        seconds = attention_seconds(device, length, heads, head_dim, kernel)
        ways = list(seconds)
        stored, tiled, *_ = seconds.values()
        ms = {way: 1e3 * time for way, time in seconds.items()}
        by_length[str(length)] = {"gain": stored / tiled, "ms": ms}
        cells = (f"{time:,.2f}" for time in ms.values())
        rows.append((f"{length:,}", *cells, f"{stored / tiled:.1f} ×"))
    title = f"\n{heads} heads of {head_dim}, causal, {device_name(device)}: ms"
    table(title, ("tokens", *ways, "first against second"), rows)
    return {"by_length": by_length, "gain": by_length[str(max(lengths))]["gain"]}


def show_tiles(target: str, kernel: Any, tiles: Sequence[tuple[int, int, int]]) -> dict:
    """Compile `flash_kernel` with tiles of (queries, keys, stages), without a GPU; print what
    fits and what spills.
    """
    shape = {"queries": 4096, "keys": 4096, "scale": 0.1, "CAUSAL": True, "HEADS": 32, "HEAD_DIM": 128, "BLOCK_D": 128}
    arguments = {**dict.fromkeys(("out", "q", "k", "v"), "*bf16"), "lse": "*fp32", **shape}
    rows, results = [], {}
    for block_q, block_k, stages in track(tiles, "compiling ahead of time"):
        blocks, options = {"BLOCK_Q": block_q, "BLOCK_K": block_k}, {"num_warps": 8, "num_stages": stages}
        code = compile_for(target, kernel, arguments | blocks, options)
        name = f"{block_q} × {block_k}, {stages}"
        rows.append((name, f"{code.shared:,}", "yes" if code.fits else "NO", f"{code.spilled:,}"))
        figures = {"shared": code.shared, "fits": code.fits, "spilled": code.spilled}
        results[f"{block_q}x{block_k}x{stages}"] = figures
    columns = ("queries × keys, stages", "shared memory", "fits", "spilled registers")
    table(f"Compiled for {target}, head dim 128, in bytes; {SHARED_MEMORY[target]:,} are available", columns, rows)
    return results


def conclude(results: dict, disturbance: str) -> None:
    """Print the conclusions, without those from timings if there was a `disturbance`."""
    powers, traffic, gain = results["powers"], results["traffic"], results["time"]["gain"]
    closing(
        f"The scores of {results['memory']['refused_at']:,} tokens broke the budget. Tiles keep 4 bytes a token: "
        f"T^{powers['tiled_kept']:.0f} in place of T^{powers['naive_kept']:.0f}.",
        f"Traffic stays quadratic (T^{powers['tiled_moved']:.2f}), but is {traffic['less']:.1f} times lower at "
        f"{traffic['lengths'][-1]:,} tokens.",
        Timed(f"The same output, {gain:.1f} times faster than stored scores at the longest in this run."),
        disturbance=disturbance,
    )


def draw(results: dict, path: str) -> None:
    """Plot by length how many times fewer bytes tiles move, and the bytes that each way keeps."""
    traffic = results["traffic"]
    lengths = traffic["lengths"]
    with panels(path, 2) as (left, right):
        stored = [naive_traffic(length, HEAD_DIM).moved for length in lengths]
        for block_q, colour in ((64, palette.SKY), (128, palette.BLUE), (256, palette.GREEN)):
            tiled = [flash_traffic(length, HEAD_DIM, block_q, 64).moved for length in lengths]
            less = [a / b for a, b in zip(stored, tiled, strict=True)]
            left.plot(lengths, less, "s-", color=colour)
            words = f"{block_q} queries a tile"
            left.annotate(
                words, (lengths[-1], less[-1]), (0, 6), textcoords="offset points", ha="right", fontsize=SMALL_TEXT
            )
        left.set_xscale("log", base=2)
        left.set(
            title="Fewer bytes moved than T × T", xlabel=f"tokens, a head of {HEAD_DIM}", ylabel="times", ylim=(0, 18)
        )
        right.loglog(lengths, traffic["kept"]["naive"], "o-", base=2, color=palette.VERMILLION)
        right.loglog(lengths, traffic["kept"]["tiled"], "s-", base=2, color=palette.BLUE)
        right.set(title="Bytes kept by one head", xlabel="tokens", ylabel="bytes")
        right.legend(["T × T stored", "tiles"])
