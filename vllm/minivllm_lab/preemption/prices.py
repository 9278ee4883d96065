"""Lesson 11's comparison of recomputing with copying: measured on this machine, and by data sheets."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from functools import partial
from typing import Any

from minivllm.memory import kv_bytes_per_token
from minivllm_lab.lesson import LessonCode
from minivllm_lab.paged_model import decoder_of
from minivllm_lab.preemption.costs import COPY_SECONDS, LARGE, SHARE_OF_PEAK, SMALL, Crossover
from minivllm_lab.preemption.report import paged_model, short
from minivllm_lab.progress import track
from minivllm_lab.tables import record_table, table
from minivllm_lab.timing import in_turns
from minivllm_simulate.hardware import get_hardware
from minivllm_simulate.known_models import known_model
from minivllm_simulate.kv_links import get_link
from minivllm_simulate.memory import num_parameters

CROSSOVER_BLOCK = 16


def measure_crossover(
    space: LessonCode, break_even: Callable[..., float], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Time the return of preempted requests: recomputed, copied in small pieces, and copied through
    one buffer.
    """
    rounds, sizes = (1, (64, 256)) if arguments.quick else (5, (64, 256, 1024))
    model = paged_model(arguments, 2 * max(sizes) // CROSSOVER_BLOCK, CROSSOVER_BLOCK)
    ids = [1 + index % 4000 for index in range(max(sizes))]
    figures: dict[str, Any] = {"tokens": {}, "bytes_per_token": model.bytes_per_token}
    rows = []
    for size in track(sizes, "bringing requests back"):
        blocks = random.Random(size).sample(range(1, model.num_blocks), size // CROSSOVER_BLOCK)
        spaces = {name: space(model.cache, model.num_blocks, name == "gathered") for name in ("small", "gathered")}
        calls: dict[str, Callable[[], object]] = {"recompute": partial(model.forward, ids[:size], 0, blocks)}
        calls |= {name: partial(_there_and_back, each, blocks) for name, each in spaces.items()}
        times = in_turns(calls, rounds, arguments.device)
        us = {name: 1e6 * min(seconds) / size for name, seconds in times.items()}
        copies = {name: each.num_copies // (rounds + 1) for name, each in spaces.items()}
        figures["tokens"][str(size)] = {"us": us, "copies": copies}
        small, gathered = (cell for name in spaces for cell in ((f"{us[name]:.2f}", copies[name]),))
        rows.append((size, f"{us['recompute']:.2f}", *small, *gathered, f"{us['recompute'] / us['gathered']:.0f} ×"))
    parameters = num_parameters(decoder_of(arguments).config)
    flops = 2 * parameters / (figures["tokens"]["64" if arguments.quick else "256"]["us"]["recompute"] / 1e6)
    least = figures["break_even"] = break_even(model.bytes_per_token, parameters, flops)
    table(
        "Bringing a request back, on this machine",
        ("tokens", "recompute", "small pieces", "copies", "gathered", "copies", "cheaper by"),
        rows,
        f"µs for each token, out and back. {model.bytes_per_token:,} bytes a token, so the break-even is "
        f"{least / 1e6:.0f} MB/s.",
    )
    return figures


def _there_and_back(space: Any, blocks: list[int]) -> None:
    space.swap_out("request", blocks)
    space.swap_in("request", blocks)


GPUS = (
    ("Meta-Llama-3-8B", "H100", "PCIe 5"), ("Meta-Llama-3-8B", "A100-80", "PCIe 4"),
    ("Meta-Llama-3-8B", "L4", "PCIe 4"), ("opt-13b", "A100-40", "PCIe 4"),
)  # fmt: skip


def show_gpus(recompute: LessonCode, swap: LessonCode, break_even: LessonCode, effective: LessonCode) -> dict[str, Any]:
    """Compare recompute and swap by the lesson's formulas, with the small pieces of 2023 and with
    today's large ones.

    Raises:
        AssertionError: the simulator's cost model disagrees.
    """
    records: dict[str, dict[str, Any]] = {}
    for model_name, gpu_name, link_name in GPUS:
        model, gpu, link = known_model(model_name), get_hardware(gpu_name), get_link(link_name)
        size, flops = kv_bytes_per_token(model), SHARE_OF_PEAK * gpu.flops_of("bfloat16")
        parameters, piece = num_parameters(model), SMALL.bytes_of_copy(model)
        least = break_even(size, parameters, flops)
        record: dict[str, Any] = {"recompute_us": 1e6 * recompute(1, parameters, flops), "break_even_gb": least / 1e9}
        for name, pieces in (("small", SMALL), ("large", LARGE)):
            rate = effective(pieces.bytes_of_copy(model), link.bandwidth, COPY_SECONDS)
            us = 1e6 * swap(1, size, rate)
            modelled = Crossover.of(model, gpu, link, pieces, directions=2)
            assert abs(modelled.swap * 1e6 / us - 1) < 1e-9, f"{model_name}: the cost model disagrees"
            record[name] = {"us": us}
        record["copy_us"] = 1e6 * (piece / least - piece / link.bandwidth)
        records[f"{model_name}, {gpu_name}"] = record
    record_table(
        "\nModelled: GPUs and links",
        {short(name): record for name, record in records.items()},
        "{name} | recompute {recompute_us:.0f} | small {small[us]:.1f} | large {large[us]:.1f} | "
        "break-even, GB/s {break_even_gb:.1f} | µs a copy {copy_us:.1f}",
        f"µs for each token, out and back, by data sheets: {SHARE_OF_PEAK:.0%} of the peak, and "
        f"{1e6 * COPY_SECONDS:.1f} µs to issue a copy. Links: 50 GB/s for the H100, 25 for the others. "
        "Small: a layer's keys or values of a block; large: a block of all layers. Last: how long issuing a "
        "small copy may take at most, if swap is to win.",
    )
    return records
