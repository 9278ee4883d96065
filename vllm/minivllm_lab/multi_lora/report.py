"""Lesson 12's sizes, its gate, its figure and its command line; the four ways are in `ways`, what the
engine does in `in_engine`.

Each `check_*` or `show_*` function prints its table and returns its figures; the callables that it
takes are the lesson's own code.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch

from minivllm.config import EMBEDDED_MODEL, ModelConfig
from minivllm.memory.adapters import linear_shapes
from minivllm_lab.cli import lesson_parser, whole_number
from minivllm_lab.lesson import LessonCode
from minivllm_lab.multi_lora.ways import RANK, width
from minivllm_lab.pictures import palette
from minivllm_lab.pictures.figures import SMALL_TEXT, panels
from minivllm_lab.proof import furthest
from minivllm_lab.tables import Timed, closing, console, record_table, table
from minivllm_simulate.known_models import known_model
from minivllm_simulate.memory import num_parameters


def check(arguments: argparse.Namespace) -> None:
    """Check the model's config before anything is measured.

    Raises:
        MinivllmError: there is no such model, or adapters for its linears are not supported.
    """
    linear_shapes(ModelConfig.from_pretrained(arguments.model))


# ---- 1. what an adapter weighs -------------------------------------------------------------------

MODELS = ("Llama-3.1-8B", "Llama-3.1-70B", "the embedded model")
RANKS = (8, 16, 64)


def show_weights(adapter_numbers: LessonCode) -> dict[str, Any]:
    """Show an adapter's bytes by rank beside the model's, and the bytes of a thousand of each."""
    records: dict[str, dict[str, float]] = {}
    for name in MODELS:
        model = ModelConfig.from_pretrained(EMBEDDED_MODEL) if name == MODELS[-1] else known_model(name)
        projections = list(linear_shapes(model).values())
        sizes = {str(rank): 2 * model.num_hidden_layers * adapter_numbers(rank, projections) for rank in RANKS}
        size = 2 * num_parameters(model)
        records[name] = {"model_bytes": size, **sizes, "share": sizes["16"] / size}
    rows = [
        (name, _bytes(record["model_bytes"]), *(_bytes(record[str(rank)]) for rank in RANKS), f"{record['share']:.1%}",
         _bytes(1000 * record["16"]), _bytes(1000 * record["model_bytes"]))
        for name, record in records.items()
    ]  # fmt: skip
    columns = ("2 bytes a number", "model", *(f"rank {rank}" for rank in RANKS), "16 / model", "1,000 of 16", "models")
    table("An adapter on all seven projections of each layer", columns, rows)
    return records


def _bytes(count: float) -> str:
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if count >= size:
            return f"{count / size:,.1f} {unit}" if count < 100 * size else f"{count / size:,.0f} {unit}"
    return f"{count / 1e3:,.1f} kB"


# ---- 2. merged or applied ------------------------------------------------------------------------


def check_applied(
    merged: LessonCode, applied: LessonCode, arguments: argparse.Namespace, device: torch.device
) -> dict[str, float]:
    """Compare one linear with the adapter merged and with it applied, and count the operations that
    applying adds.

    Raises:
        AssertionError: the two differ.
    """
    wide = width(arguments)
    shapes = (8, wide), (wide, wide), (RANK, wide), (wide, RANK)
    x, weight, a, b = (torch.randn(shape, dtype=torch.float64, device=device) / shape[1] ** 0.5 for shape in shapes)
    off = furthest(applied(x, weight, a, b), x @ merged(weight, a, b).T)
    assert off < 1e-9, f"applied and merged differ by {off}"
    operations = RANK * 2 * wide / wide**2
    console.print(
        f"One linear of {wide:,} × {wide:,}, rank {RANK}: merged and applied agree to {off:.0e} in float64. Applied, "
        f"it takes {operations:.1%} more operations."
    )
    return {"off": off, "operations": operations}


# ---- 5. break it ---------------------------------------------------------------------------------


def show_gate(serve: LessonCode, tiers: LessonCode, request: LessonCode) -> dict[str, Any]:
    """Serve sixteen equally popular adapters with more and more slots, at a rate that fills half of
    the seats; then a request whose adapter has to wait for two popular ones.
    """
    work = [request(str(i), 1 + i % 16, 8, i) for i in range(800)]
    records: dict[str, Any] = {}
    for slots in (1, 2, 4, 8, 16):
        steps = list(serve(work, slots, 16))
        batches = [[each.adapter for each in running] for running, _ in steps]
        queue = [waiting for _, waiting in steps[: len(work)]]
        records[str(slots)] = {
            "running": statistics.mean(map(len, batches[: len(work)])),
            "waiting": statistics.mean(queue),
            "most": max(queue),
            "copied": tiers(batches, slots, 16)["copied"],
        }
    record_table(
        "800 requests of 8 steps, 1 before each step, 16 adapters in turn",
        records,
        "slots {name} | seats in use {running:.1f} of 16 | waiting {waiting:.1f} | most {most} | "
        "copied into slots {copied}",
        "Seats and waiting: means over the 800 steps in which requests arrive.",
    )
    hot = [request(f"hot {i}", 1 + i % 2, 8, i) for i in range(100)]
    work = [*hot[:4], request("cold", 3, 8, 4), *hot[4:]]
    starts, with_a_third = (
        next(at for at, (running, _) in enumerate(serve(work, slots, 16)) if "cold" in {each.name for each in running})
        for slots in (2, 3)
    )
    console.print(
        f"Two slots, and {len(hot)} requests for two adapters: one for a third arrives before step 5 and starts in "
        f"step {starts + 1}, behind all of them. With three slots, in step {with_a_third + 1}."
    )
    return {**records, "cold": {"arrives": 4, "starts": starts, "with_a_third_slot": with_a_third}}


def show_ranks(adapter_numbers: LessonCode) -> dict[str, Any]:
    """Compare a slot for adapters of rank 8 with one for rank 256, in which an adapter of rank 8
    fills the same bytes.
    """
    model = known_model(MODELS[0])
    projections = list(linear_shapes(model).values())
    sizes = {rank: 2 * model.num_hidden_layers * adapter_numbers(rank, projections) for rank in (8, 256)}
    console.print(
        f"\nA slot of {MODELS[0]}: {_bytes(sizes[8])} for rank 8, {_bytes(sizes[256])} for rank 256, of which an "
        f"adapter of rank 8 fills {sizes[8] / sizes[256]:.0%}."
    )
    return {str(rank): {"slot_bytes": size, "filled": sizes[8] / size} for rank, size in sizes.items()}


# ---- the whole lesson ----------------------------------------------------------------------------


def close(figures: dict, disturbance: str) -> None:
    """Print the conclusions; `disturbance` says what else kept the machine busy, if anything."""
    weighs = figures["weighs"][MODELS[0]]
    thousand, cold = figures["thousand"]["adapters"], figures["slots"]["cold"]
    many, few = thousand[max(thousand, key=int)], thousand["8"]
    closing(
        f"An adapter of rank 16 is {weighs['share']:.1%} of {MODELS[0]}: a thousand of them take "
        f"{_bytes(1000 * weighs['16'])}, a thousand models {_bytes(1000 * weighs['model_bytes'])}.",
        Timed(
            f"With {int(max(thousand, key=int)):,} adapters one process served "
            f"{many['fixed_per_second'] / few['fixed_per_second']:.0%} of the requests a second that it served with 8, "
            "at eight different ones a step."
        ),
        f"With two slots, the request for a third adapter waited {cold['starts'] - cold['arrives']} steps for one, "
        "although batch and memory had room.",
        disturbance=disturbance,
    )


def draw(figures: dict, path: str) -> None:
    """Plot what adapters add to one linear by how many there are, and seats in use and queue by slots."""
    names = {
        "loop": ("a loop", palette.ORANGE, (1, 6)),
        "gathered": ("a copy for each token", palette.PURPLE, (1, -14)),
        "engine": ("sorted, the engine's", palette.BLUE, (1, -15)),
    }
    with panels(path, 2) as (left, right):
        distinct = figures["distinct"]
        for name, (words, colour, where) in names.items():
            times = {int(size): record[name] for size, record in distinct.items()}
            left.plot(list(times), list(times.values()), "o-", color=colour)
            at = next(iter(times.items()))
            left.annotate(words, at, where, textcoords="offset points", fontsize=SMALL_TEXT)
        base = statistics.median(record["base"] for record in distinct.values())
        left.axhline(base, color=palette.GREY, linestyle="--")
        left.annotate("to compare: W x itself", (1, base), (1, 5), textcoords="offset points", fontsize=SMALL_TEXT)
        left.axvspan(1, 16, color=palette.GREY, alpha=0.12, linewidth=0)
        left.annotate("nearly flat", (16, 0.1), (-3, 4), textcoords="offset points", fontsize=SMALL_TEXT, ha="right")
        left.set(title="What adapters add to W x, on a CPU", xlabel="different adapters among 64 tokens", ylabel="ms")
        left.annotate("W: 2,048 × 2,048, float32", (1, 10), (1, -11), textcoords="offset points", fontsize=SMALL_TEXT)
        left.set(xscale="log", yscale="log", ylim=(0.1, 10))
        left.set_xticks([int(size) for size in distinct], list(distinct))
        left.set_yticks((0.1, 0.3, 1, 3, 10), ("0.1", "0.3", "1", "3", "10"))
        left.minorticks_off()
        slots = {int(name): record for name, record in figures["slots"].items() if name != "cold"}
        for key, words, colour, where in (
            ("waiting", "wait", palette.ORANGE, (10, 0)),
            ("running", "run, in 16 seats", palette.BLUE, (4, 8)),
        ):
            means = [record[key] for record in slots.values()]
            right.plot(list(slots), means, "o-", color=colour)
            right.annotate(words, (1, means[0]), where, textcoords="offset points", fontsize=SMALL_TEXT)
        right.set(title="The bet: 16 adapters in turn", xlabel="LoRA slots", ylabel="requests, on average")
        right.set_xscale("log", base=2)
        right.set_xticks(list(slots), [str(count) for count in slots])


def _skew(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 3:
        raise argparse.ArgumentTypeError(f"must be a number from 0 to 3, not {text!r}")
    return value


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Add the lesson's own flags to the common ones; `--help` shows `doc`."""
    flags = lesson_parser(doc)
    flags.add_argument(
        "--adapters", type=whole_number(8, 5000), default=1000, help="number of registered adapters (8 to 5000)"
    )
    flags.add_argument("--skew", type=_skew, default=1.0, help="Zipf exponent of the traffic over adapters (0 to 3)")
    return flags
