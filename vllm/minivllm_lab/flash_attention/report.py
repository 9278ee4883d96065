"""Lesson 03's flags, tables and figure, and what it computes from the counted bytes."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.markup import escape

from minivllm.config import EMBEDDED_MODEL
from minivllm.errors import MinivllmError
from minivllm.platforms.device import device_name
from minivllm.platforms.triton_utils import HAS_TRITON
from minivllm_lab import palette
from minivllm_lab.aot import SHARED_MEMORY, compile_for
from minivllm_lab.cli import lesson_parser, positive_int
from minivllm_lab.figures import panels
from minivllm_lab.flash_attention.attention_in_model import KEYS_A_TILE, ModelRun
from minivllm_lab.flash_attention.attention_traffic import (
    exponent,
    flash_traffic,
    largest_block_q,
    least_traffic,
    longest_naive,
    naive_traffic,
)
from minivllm_lab.lesson import wrote
from minivllm_lab.progress import track
from minivllm_lab.results import ensure_writable, write_json
from minivllm_lab.tables import Timed, closing, console, table

if TYPE_CHECKING:
    import torch

    from minivllm_lab.aot import Compiled

MIB = 2**20
TEXT = "def total(prices, count):\n    result = 0\n    for price in prices:\n        result +="
HEAD_DIM = 64
"""The head dim of the figure's curves."""
HEAD_DIMS = [32, 64, 128, 256]
"""The head dims used to fit the exponent of the head dim."""
PAPERS_GB = 40.3
"""FlashAttention, figure 2: what standard attention moved, forward and backward."""


def parser(doc: str) -> argparse.ArgumentParser:
    """The lesson's own flags, besides the common ones; `doc` is the script's docstring."""
    flags = lesson_parser(doc, EMBEDDED_MODEL)
    flags.add_argument("--heads", type=positive_int, default=8, help="heads whose scores must fit the budget")
    flags.add_argument("--budget-mib", type=positive_int, default=1024, help="memory for stored scores")
    flags.add_argument("--head-dim", type=positive_int, default=64, help="width of a head in the counted loops")
    flags.add_argument("--block-q", type=positive_int, default=128, help="queries a tile in the counted loops")
    flags.add_argument("--block-k", type=positive_int, default=64, help="keys a tile in the counted loops")
    flags.add_argument("--on-chip-kib", type=positive_int, default=228, help="memory on the chip, for the powers")
    flags.add_argument("--target", choices=tuple(SHARED_MEMORY), default="sm_90", help="whose compiler judges tiles")
    flags.add_argument("--text", default=TEXT, help="what the model reads")
    flags.add_argument("--row", metavar="FILE", help="also write one row of the model's scores, which the widget shows")
    return flags


@dataclass(frozen=True)
class Plan:
    """How much work a run does."""

    longest: int
    """Tokens up to which the bytes are counted, a power of two."""
    lengths: list[int]
    """Tokens at which attention is timed."""
    tiles: list[tuple[int, int, int]]
    """Tiles that are compiled: queries, keys, loads in flight."""


def plan(arguments: argparse.Namespace, device: torch.device) -> Plan:
    """The work that the flags ask for.

    Raises:
        MinivllmError: a flag is out of range, or --row cannot be written.
    """
    _check(arguments)
    lengths = [512, 1024] if arguments.quick else [512, 1024, 2048, 4096]
    if arguments.full or device.type == "cuda":
        lengths.append(8192)
    if arguments.quick:
        return Plan(2**14, lengths, [(128, 64, 2), (128, 128, 4)])
    return Plan(2**17, lengths, [(64, 32, 2), (128, 64, 2), (128, 128, 2), (128, 128, 4), (256, 64, 2)])


def _check(arguments: argparse.Namespace) -> None:
    """Reject flags that the lesson cannot handle."""
    on_chip = arguments.on_chip_kib * 1024
    for memory, head_dim in ((on_chip // 4, 64), (on_chip, max(HEAD_DIMS))):
        largest_block_q(memory, head_dim, 16)  # raises if not even the smallest tile fits
    if not 1 <= len(arguments.text) <= 1000:
        raise MinivllmError(f"the text must have 1 to 1,000 characters, not {len(arguments.text):,}")
    if arguments.head_dim > 1024:
        raise MinivllmError(f"--head-dim must be at most 1,024, got {arguments.head_dim:,}")
    if arguments.block_q * arguments.block_k < 64:
        raise MinivllmError("a tile needs 64 scores or more, or NumPy counts for hours: raise --block-q or --block-k")
    if arguments.row:
        ensure_writable(arguments.row)


def show_budget(heads: int, budget: int) -> dict[str, int]:
    """Double the sequence until its float32 scores and weights exceed `budget` bytes. Counted: nothing is allocated.

    Returns the length that was refused and the longest that fits, as figures.
    """
    refused, needs = 512, {}
    while needs.setdefault(refused, heads * naive_traffic(refused, 1, 4).extra) <= budget:
        refused *= 2
    longest = longest_naive(budget, heads, 4)
    rows = [(f"{n:,}", "refused" if n == refused else f"{size / MIB:,.0f}") for n, size in needs.items()]
    table(f"{heads} heads, float32", ("tokens", "scores and weights, MiB"), rows)
    lack = f"{refused:,} tokens need {needs[refused] / MIB:,.0f} MiB and there are {budget / MIB:,.0f}"
    console.print(f"It refuses: {lack}: {longest:,} tokens fit")
    return {"refused_at": refused, "longest": longest}


def show_overflow(limits: Mapping[str, float], softmax: Callable[[np.ndarray], np.ndarray]) -> dict[str, float]:
    """The softmax of a score just under and just over each dtype's limit: as it is written, and by `softmax`."""
    rows = []
    with np.errstate(over="ignore", invalid="ignore"):
        for dtype, score in [(dtype, limit + off) for dtype, limit in limits.items() for off in (-0.1, 0.1)]:
            row = np.array([[0.0, score]], dtype)
            plain = np.exp(row[0, 1]) / np.exp(row).sum()
            rows.append((dtype, f"{score:.1f}", f"{plain}", f"{softmax(row)[0, 1]}"))
    table("Softmax of 0 and x: the weight of x", ("dtype", "x", "exp(x) as it is", "maximum off first"), rows)
    return dict(limits)


def show_model(run: ModelRun, limits: Mapping[str, float]) -> dict[str, float]:
    """How close the logits came, and which dtypes the exponential of its scores overflows. As figures."""
    beyond = " and ".join(dtype for dtype, limit in limits.items() if run.largest_score > limit) or "no dtype here"
    kernel = "our kernel" if HAS_TRITON else "stored scores"
    said = f"Its scores reach {run.largest_score:.1f}: exp overflows {beyond}."
    console.print(f"The model on {kernel}: logits within {run.logits_off_by:.0e}. {said}", soft_wrap=True)
    return {"logits_off_by": run.logits_off_by, "largest_score": run.largest_score}


def show_row(row: dict, states: Sequence[Any], outputs: Sequence[np.ndarray], expected: np.ndarray) -> None:
    """One row of scores, a tile a line: `states` before the first tile and after each, and the output after each."""
    rows = []
    for number, ((before, state), output) in enumerate(zip(pairwise(states), outputs, strict=True)):
        words = "".join(row["tokens"][KEYS_A_TILE * number : KEYS_A_TILE * (number + 1)])
        numbers = f"{state.m[0]:.2f}", f"{np.exp(before.m[0] - state.m[0]):.3f}", f"{state.l[0]:.3f}"
        rows.append((escape(repr(words)[1:-1]), *numbers, " ".join(f"{x:+.3f}" for x in output)))
    caption = "the softmax of the whole row gives " + " ".join(f"{x:+.3f}" for x in expected)
    title = f"\nOne row of scores (layer {row['layer']}, head {row['head']}), {KEYS_A_TILE} keys a tile"
    table(title, ("keys", "m", "old kept", "l", "O / l, three numbers"), rows, caption)


def show_traffic(head_dim: int, block_q: int, block_k: int, longest: int, peaks: Mapping[str, float]) -> dict:
    """Bytes that one head moves and keeps at each length; `peaks` are the MiB that NumPy allocated. As figures."""
    lengths = [2**power for power in range(10, longest.bit_length())]
    naive = [naive_traffic(length, head_dim) for length in lengths]
    tiled = [flash_traffic(length, head_dim, block_q, block_k) for length in lengths]
    less = [a.moved / b.moved for a, b in zip(naive, tiled, strict=True)]
    rows = [
        (f"{n:,}", f"{a.moved / MIB:,.1f}", f"{b.moved / MIB:,.1f}", f"{ratio:.1f} ×", f"{a.extra / MIB:,.0f}",
         f"{b.extra / MIB:.3f}")
        for n, a, b, ratio in zip(lengths, naive, tiled, less, strict=True)
    ]  # fmt: skip
    columns = ("tokens", "T × T moves", "tiles move", "less by", "T × T keeps", "tiles keep")
    caption = (
        f"tiles of {block_q} × {block_k}; up to 2,048 tokens the loops themselves counted the same\n"
        f"at 2,048, in float32, NumPy allocated {peaks['naive']:.1f} MiB for T × T, {peaks['tiled']:.1f} for tiles"
    )
    table(f"One head of {head_dim}, causal, 16 bits: MiB", columns, rows, caption)
    moved = {"naive": [one.moved for one in naive], "tiled": [one.moved for one in tiled]}
    kept = {"naive": [one.extra for one in naive], "tiled": [one.extra for one in tiled]}
    return {"lengths": lengths, "moved": moved, "kept": kept, "less": less[-1], "peak_mib": dict(peaks)}


def fit_powers(traffic: dict, on_chip: int) -> dict[str, float]:
    """The powers of T, of the head dim and of the memory on the chip (bytes) with which the counted bytes grow.

    `traffic` are figures of `show_traffic`.
    """

    def moved(head_dim: int, memory: int) -> int:
        return flash_traffic(65536, head_dim, largest_block_q(memory, head_dim, 16), 16).moved

    lengths, half = traffic["lengths"], len(traffic["lengths"]) // 2  # only in the longer half is T far below T²
    powers = {f"{name}_moved": exponent(lengths[half:], traffic["moved"][name][half:]) for name in ("naive", "tiled")}
    powers |= {f"{name}_kept": exponent(lengths, traffic["kept"][name]) for name in ("naive", "tiled")}
    powers["head_dim"] = exponent(HEAD_DIMS, [moved(head_dim, on_chip) for head_dim in HEAD_DIMS])
    chips = [on_chip // 4, on_chip // 2, on_chip, on_chip * 2]
    powers["on_chip"] = exponent(chips, [moved(64, memory) for memory in chips])
    forms = (
        ("T × T stored", "T^{naive_moved:.2f}", "T^{naive_kept:.2f}"),
        ("tiles", "T^{tiled_moved:.2f} d^{head_dim:.2f} M^{on_chip:.2f}", "T^{tiled_kept:.2f}"),
    )
    rows = [[form.format(**powers) for form in row] for row in forms]
    table("\nFitted: T tokens, d head dim, M bytes on the chip", ("", "bytes moved", "bytes kept"), rows)
    return powers


def compare_with_paper() -> dict:
    """The shape of the paper's figure 2, forward: 64 sequences of 1,024 tokens, 16 heads of 64, 16 bits, no mask."""
    naive, least, heads = naive_traffic(1024, 64).moved, least_traffic(1024, 64), 64 * 16
    tiled = {f"tiles of {n} queries": flash_traffic(1024, 64, n, 64, causal=False).moved for n in (64, 128, 256)}
    ways = {"T × T stored": naive, **tiled, "every byte moved once": least}
    rows = [(way, f"{moved * heads / 1e9:.2f}", f"{naive / moved:.1f} ×") for way, moved in ways.items()]
    table("\nThe shape of the paper's figure 2, forward", ("", "GB", "less by"), rows)
    both_ways = PAPERS_GB * 1e9 / (3 * least * heads)  # on the way back 5 arrays in, 3 out
    less = {name.split()[2]: naive / moved for name, moved in tiled.items()}
    return {"ceiling": naive / least, "ceiling_both_ways": both_ways, "tiles": less}


def show_time(seconds: Mapping[int, Mapping[str, float]], heads: int, head_dim: int, device: torch.device) -> dict:
    """Seconds of each way by length, in milliseconds; the first way stores its scores. As figures."""
    found, rows, ways = {}, [], []
    for length, each in seconds.items():
        ways, (stored, tiled, *others) = list(each), each.values()
        found[str(length)] = {"gain": stored / tiled, "ms": {way: 1e3 * time for way, time in each.items()}}
        if device.type == "cuda":
            found[str(length)]["share_of_best"] = min(others) / tiled
        rate = heads * flash_traffic(length, head_dim, 1, 1).flops / tiled
        cells = (f"{1e3 * time:,.2f}" for time in each.values())
        rows.append((f"{length:,}", *cells, f"{stored / tiled:.1f} ×", f"{rate / 1e9:,.0f}"))
    title = f"\n{heads} heads of {head_dim}, causal, {device_name(device)}: ms"
    table(title, ("tokens", *ways, "first against second", "GFLOP/s of the second"), rows)
    return {"by_length": found, "gain": found[str(max(seconds))]["gain"]}


def show_guard(guarded: float) -> dict:
    """The value of l after a fully masked tile, without a guard and with it. Returns the figures."""
    with np.errstate(invalid="ignore"):
        unguarded = float(np.exp(np.subtract(-np.inf, -np.inf)))  # what the first tile would leave in l and O
    console.print(f"A tile masked as a whole: exp(-inf - -inf) = {unguarded}, for good. Guarded, l = {guarded:.4f}.")
    return {"unguarded_is_nan": math.isnan(unguarded), "guarded": float(guarded)}


def show_tiles(target: str, kernel: Any, tiles: Sequence[tuple[int, int, int]]) -> dict:
    """What the compiler says of `flash_kernel` with tiles of (queries, keys, stages): what fits, and what spills.

    It needs no GPU. Returns the figures.
    """
    shape = {"queries": 4096, "keys": 4096, "scale": 0.1, "CAUSAL": True, "HEADS": 32, "HEAD_DIM": 128, "BLOCK_D": 128}
    arguments = {**dict.fromkeys(("out", "q", "k", "v"), "*bf16"), "lse": "*fp32", **shape}
    codes: dict[tuple[int, int, int], Compiled] = {}
    for block_q, block_k, stages in track(tiles, "compiling ahead of time"):
        blocks, options = {"BLOCK_Q": block_q, "BLOCK_K": block_k}, {"num_warps": 8, "num_stages": stages}
        codes[block_q, block_k, stages] = compile_for(target, kernel, arguments | blocks, options)
    rows = [
        (f"{q} × {k}, {stages}", f"{code.shared:,}", "yes" if code.fits else "NO", f"{code.spilled:,}")
        for (q, k, stages), code in codes.items()
    ]
    columns = ("queries × keys, stages", "shared memory", "fits", "spilled registers")
    table(f"Compiled for {target}, head dim 128, in bytes; {SHARED_MEMORY[target]:,} are there", columns, rows)
    return {
        "x".join(map(str, tile)): {"shared": code.shared, "fits": code.fits, "spilled": code.spilled}
        for tile, code in codes.items()
    }


def conclude(found: dict, disturbance: str) -> None:
    """Print the conclusions; if something disturbed the timings, none are drawn from them."""
    powers, traffic = found["powers"], found["traffic"]
    closing(
        f"The scores of {found['memory']['refused_at']:,} tokens broke the budget. Tiles keep 4 bytes a token: "
        f"T^{powers['tiled_kept']:.0f} in place of T^{powers['naive_kept']:.0f}.",
        f"Traffic stays quadratic (T^{powers['tiled_moved']:.2f}), {traffic['less']:.1f} times less of it at "
        f"{traffic['lengths'][-1]:,} tokens. At the paper's shape, forward, nothing can save more than "
        f"{found['figure_2']['ceiling']:.0f} times.",
        Timed(
            f"The same output, {found['time']['gain']:.1f} times faster than stored scores at the longest in this run."
        ),
        disturbance=disturbance,
    )


def keep_row(row: dict, path: str | None) -> None:
    """Write the model's row of scores to `path`, if given, for the widget to show."""
    if path:
        write_json(path, "attention_row", row)
        wrote(path)


def draw(row: dict, found: dict, path: str) -> None:
    """A row of scores with its running maximum; how much less tiles move, and what is kept, against the length."""
    traffic, scores = found["traffic"], np.array(row["scores"])
    lengths, tile = traffic["lengths"], np.arange(len(scores)) // KEYS_A_TILE
    with panels(path, 3) as (left, middle, right):
        left.bar(np.arange(len(scores)), scores, color=[(palette.SKY, palette.BLUE)[index % 2] for index in tile])
        running = [scores[tile <= index].max() for index in tile]
        left.step(np.arange(len(scores)), running, where="mid", color=palette.VERMILLION)
        left.set(title="One row of scores, and the running m", xlabel="keys, four to a tile", xticks=[])
        stored = [naive_traffic(length, HEAD_DIM).moved for length in lengths]
        for block_q, colour in ((64, palette.SKY), (128, palette.BLUE), (256, palette.GREEN)):
            tiled = [flash_traffic(length, HEAD_DIM, block_q, 64).moved for length in lengths]
            less = [a / b for a, b in zip(stored, tiled, strict=True)]
            middle.plot(lengths, less, "s-", color=colour)
            words = f"{block_q} queries a tile"
            middle.annotate(words, (lengths[-1], less[-1]), (0, 6), textcoords="offset points", ha="right")
        middle.set_xscale("log", base=2)
        middle.set(title="Times fewer bytes moved than T × T", xlabel=f"tokens, a head of {HEAD_DIM}", ylim=(0, 18))
        right.loglog(lengths, traffic["kept"]["naive"], "o-", base=2, color=palette.VERMILLION)
        right.loglog(lengths, traffic["kept"]["tiled"], "s-", base=2, color=palette.BLUE)
        right.set(title="Bytes kept by one head", xlabel="tokens", ylabel="bytes")
        right.legend(["T × T stored", "tiles"])
