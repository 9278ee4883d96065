"""Lesson 01's tables, its figure and its command line."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from minivllm.config import EMBEDDED_MODEL
from minivllm.config.units import GIB
from minivllm.memory import MemoryLedger
from minivllm_lab import palette
from minivllm_lab.cli import lesson_parser, positive_int
from minivllm_lab.figures import panels
from minivllm_lab.tables import Timed, closing, table


def show_generation(found: Mapping) -> None:
    """Time of a token against the tokens before it, without a cache and with one, and the work of both."""
    times = zip(found["lengths"], found["ms_without"], found["ms_with"], strict=True)
    rows = [(n, f"{slow:.1f}", f"{fast:.1f}", f"{slow / fast:.1f} ×") for n, slow, fast in times]
    without, cached = found["token_passes_without"], found["token_passes_with"]
    caption = f"token passes: {without:,} without, {cached:,} with a cache"
    table("Milliseconds for one token", ("tokens before it", "without a cache", "with one", "ratio"), rows, caption)


def show_sizes(sizes: Mapping[str, int]) -> None:
    """Bytes per token of models, the smallest first, and what one long request takes."""
    order = sorted(sizes.items(), key=lambda item: item[1])
    rows = [(name, f"{size:,}", f"{size / 1024:g}", f"{size * 32768 / GIB:.1f}") for name, size in order]
    table("A 16-bit KV cache", ("model", "bytes a token", "KiB", "GiB for 32,768 tokens"), rows)


def show_sequences(rates: Mapping[str, float], gains: Mapping[str, float]) -> None:
    """Tokens a second by how many sequences decode together."""
    rows = [(count, f"{rate:,.0f}", f"{gains[count]:.1f} ×") for count, rate in rates.items()]
    table("Sequences that decode together", ("sequences", "tokens a second", "against one"), rows)


def show_unused(found: Mapping[str, Mapping]) -> None:
    """Share of the reserved slots that stay empty, by kind of request and by the slots of a reservation."""
    slots = next(iter(found.values()))["unused"]
    rows = [(x["title"], f"{x['mean']:,.0f}", *(f"{s:.1%}" for s in x["unused"].values())) for x in found.values()]
    columns = ("requests like", "mean tokens", *(f"of {int(n):,}" for n in slots))
    table("Reserved slots that never hold a token", columns, rows, "requests longer than the slots are turned away")


def show_card(found: Mapping[str, Mapping], workloads: Mapping[str, Mapping], ledger: MemoryLedger) -> None:
    """How many requests a card runs with whole reservations and without, by kind of request."""
    slots = ledger.max_model_len
    running = ledger.longest_request // slots
    rows = [(workloads[n]["title"], running, f"{x['used']:.0%}", x["unreserved"]) for n, x in found.items()]
    title = f"{ledger.device.name}, room for {ledger.tokens:,} tokens, {slots:,} slots reserved for each request"
    table(title, ("requests like", "run reserved", "cache in use", "run unreserved"), rows)


def close(found: dict, disturbance: str) -> None:
    """Print the conclusions; `disturbance` says what else kept the machine busy, if anything."""
    run, card = found["generation"], found["card"]
    longer, gain = found["intensity"]["longer_64"], found["sequences"]["gain"]["64"]
    closing(
        Timed(
            f"The same {run['new_tokens']} tokens took {run['token_passes_without']:,} token passes without a cache "
            f"and {run['token_passes_with']:,} with one; the last came {run['last_ratio']:.1f} times faster."
        ),
        Timed(
            f"Weights are read once for all: for 64 sequences in {longer:.1f} times the time of one. Together they "
            f"gave {gain:.0f} times the tokens a second."
        ),
        f"{card['running']} requests with reserved slots fill the {card['name']}, where {card['alpaca']['unreserved']} "
        "short ones would fit. Lesson 02 makes them fit.",
        disturbance=disturbance,
    )


def draw(found: dict, path: str) -> None:
    """Time per token against length; the card's memory; how much of the reserved part is ever used."""
    run, card, bottom = found["generation"], found["card"], 0.0
    used = {kind["title"]: 1 - kind["unused"]["2048"] for kind in found["reservation"].values()}
    with panels(path, 3) as (left, middle, right):
        left.plot(run["lengths"], run["ms_without"], "o-", color=palette.VERMILLION, label="without a cache")
        left.plot(run["lengths"], run["ms_with"], "s-", color=palette.BLUE, label="with a cache")
        left.set(title="Time of one token", xlabel="tokens before it", ylabel="ms", ylim=0)
        left.legend()
        memory = {name.replace(" and rotary table", ""): size / GIB for name, size in card["memory"].items()}
        for name, size in memory.items():
            color = palette.BLUE if name == "KV cache" else palette.GREY
            middle.bar(0, size, bottom=bottom, color=color, edgecolor="white")
            middle.text(0.45, bottom + size / 2, f"{size:.1f} {name}" if size > 1 else "", va="center")
            bottom += size
        middle.set(title=f"{card['model']} on the {card['name']}", ylabel="GiB", xlim=(-0.4, 1.9), xticks=[])
        right.barh(list(used), 1, color=palette.PALE)
        right.bar_label(right.barh(list(used), list(used.values()), color=palette.BLUE), fmt="{:.0%}", padding=4)
        right.set(title="Used, of 2,048 slots reserved", xticks=[])
        right.invert_yaxis()


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The lesson's own flags, besides the common ones; `doc` is shown by --help."""
    flags = lesson_parser(doc or "", EMBEDDED_MODEL)
    flags.add_argument("--prompt", default="def ", help="text to continue")
    flags.add_argument("--tokens", type=positive_int, help="how many to generate (default: 256, 32 quick, 1024 full)")
    flags.add_argument("--gpu", default="L4", help="the card of the ledger")
    flags.add_argument("--serve", default="Llama-3.1-8B", help="the model on that card")
    flags.add_argument("--max-model-len", type=positive_int, default=2048, help="slots reserved for each request")
    return flags
