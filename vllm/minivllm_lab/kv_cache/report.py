"""Lesson 01's prompt, its rates, tables and figure, and its command line."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from minivllm.config import ModelConfig
from minivllm.config.units import GIB
from minivllm.memory import MemoryLedger
from minivllm.models.tokenizer import load_tokenizer
from minivllm_lab.cli import lesson_parser, positive_int
from minivllm_lab.device_rates import measure_device
from minivllm_lab.pictures import palette
from minivllm_lab.pictures.figures import panels
from minivllm_lab.tables import Timed, closing, table
from minivllm_lab.timing import median_seconds
from minivllm_simulate.known_models import known_model

if TYPE_CHECKING:
    import torch

PROMPT = "class "
"""The text to continue."""
SIZED = ("Llama-2-7b-hf", "Llama-3.1-8B", "Qwen3-8B", "DeepSeek-V3")
"""The models whose bytes per token are shown."""


def load_prompt(arguments: argparse.Namespace, device: torch.device) -> tuple:
    """Load the model and its tokenizer, and encode the prompt.

    Returns:
        The model, the tokenizer, the prompt's token ids, and the number of tokens to generate.
    """
    from minivllm.models.loader import load_model

    (model, _), tokenizer = load_model(arguments.model, device, "float32"), load_tokenizer(arguments.model)
    new_tokens = 32 if arguments.quick else 1024 if arguments.full else 256
    return model, tokenizer, tokenizer.encode(PROMPT).ids, new_tokens


class Roofline:
    """The share of a device's measured bandwidth and arithmetic rate that each step reaches.

    Shares of measured rates can be compared across machines; seconds, or shares of a data sheet's
    peaks, cannot.
    """

    def __init__(self, device: torch.device, quick: bool) -> None:
        self.device = device
        self.rates = measure_device(device, ("bfloat16", "float32"), quick)
        self.steps: dict[str, dict[str, float]] = {}

    def measure(self, name: str, step: Callable[[], object], bytes_moved: int, flops: int) -> None:
        """Time `step`, which must move `bytes_moved` bytes and do `flops` operations."""
        seconds = median_seconds(step, device=self.device)
        self.steps[name] = {
            "ms": seconds * 1e3,
            "intensity": flops / bytes_moved,
            "of_bandwidth": bytes_moved / seconds / self.rates.bandwidth,
            "of_arithmetic": flops / seconds / self.rates.flops[self.rates.fastest],
        }

    def show(self) -> dict[str, object]:
        """Print the steps against the device's rates, and return the figures of both."""
        cells = "{intensity:.1f} {ms:.2f} {of_bandwidth:.0%} {of_arithmetic:.0%}"
        rows = [(name.replace("_", " "), *cells.format(**step).split()) for name, step in self.steps.items()]
        rates = self.rates
        speed = f"{rates.bandwidth / 1e9:,.0f} GB/s, {rates.flops[rates.fastest] / 1e9:,.0f} GFLOP/s"
        caption = f"{rates.name}: {speed}, ridge at {rates.ridge:.0f} FLOPs a byte"
        if rates.fastest != "bfloat16":
            caption += f"; numbers in {rates.fastest}, in which matmuls are fastest here"
        title = "What a decode step reads: weights for n sequences, or the cache"
        table(title, ("", "FLOPs a byte", "ms", "of bandwidth", "of arithmetic"), rows, caption)
        longer = self.steps["weights_64"]["ms"] / self.steps["weights_1"]["ms"]
        return {"ridge": rates.ridge, "longer_64": longer, **self.steps}


def show_generation(prompt_tokens: int, without, cached) -> dict:
    """Print the time of a token against its position, without and with a cache, and the work of
    both.

    `without` and `cached` are the script's `Generation`s of the same text.
    """
    new_tokens = len(cached.seconds)
    parts = min(5, new_tokens)
    windows = [slice(new_tokens * i // parts, new_tokens * (i + 1) // parts) for i in range(parts)]
    lengths = [prompt_tokens + (window.start + window.stop) // 2 for window in windows]
    slow, fast = ([1e3 * statistics.median(run.seconds[window]) for window in windows] for run in (without, cached))
    times = zip(lengths, slow, fast, strict=True)
    rows = [(length, f"{a:.1f}", f"{b:.1f}", f"{a / b:.1f} ×") for length, a, b in times]
    caption = f"token passes: {without.token_passes:,} without, {cached.token_passes:,} with a cache"
    table("Milliseconds for one token", ("tokens before it", "without a cache", "with one", "ratio"), rows, caption)
    return {
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "token_passes_with": cached.token_passes,
        "token_passes_without": without.token_passes,
        "speedup": sum(without.seconds) / sum(cached.seconds),
        "last_ratio": slow[-1] / fast[-1],
        "lengths": lengths,
        "ms_without": slow,
        "ms_with": fast,
    }


def show_sizes(kv_bytes_per_token: Callable[[ModelConfig], int]) -> dict[str, int]:
    """Print the bytes per token of four models, and the size of one long request."""
    sizes = {name: kv_bytes_per_token(known_model(name)) for name in SIZED}
    rows = [(name, f"{size:,}", f"{size * 32768 / GIB:.1f}") for name, size in sizes.items()]
    table("A 16-bit KV cache", ("model", "bytes a token", "GiB for 32,768 tokens"), rows)
    return sizes


def show_unused(workloads: Mapping[str, Mapping]) -> Mapping[str, Mapping]:
    """Print the share of reserved slots that stay empty, by kind of request and by length of the
    reservation; return `workloads`.
    """
    slots = next(iter(workloads.values()))["unused"]
    rows = [
        (kind["title"], f"{kind['mean']:,.0f}", *(f"{share:.1%}" for share in kind["unused"].values()))
        for kind in workloads.values()
    ]
    columns = ("requests like", "mean tokens", *(f"of {int(n):,}" for n in slots))
    table("Reserved slots that never hold a token", columns, rows, "requests longer than the slots are turned away")
    return workloads


def show_card(ledger: MemoryLedger, workloads: Mapping[str, Mapping]) -> dict:
    """Print how many requests a card runs with whole reservations and without, by kind of
    request.
    """
    slots = ledger.max_model_len
    running = ledger.longest_request // slots
    usage, rows = {}, []
    for name, workload in workloads.items():
        tokens = slots * (1 - workload["unused"][str(slots)])  # that one request holds when it ends
        used, unreserved = running * tokens / ledger.tokens, int(ledger.tokens / max(tokens, 1))
        usage[name] = {"used": used, "unreserved": unreserved}
        rows.append((workload["title"], running, f"{used:.0%}", unreserved))
    title = f"{ledger.device.name}, room for {ledger.tokens:,} tokens, {slots:,} slots reserved for each request"
    table(title, ("requests like", "run reserved", "cache in use", "run unreserved"), rows)
    return {
        "name": ledger.device.name,
        "tokens": ledger.tokens,
        "running": running,
        "longest": ledger.longest_request,
        "cache_share": ledger.kv_bytes / ledger.device.memory_bytes,
        "memory": {row.name: row.bytes for row in ledger.rows},
        **usage,
    }


def close(results: dict, disturbance: str) -> None:
    """Print the conclusions, without those from timings if there was a `disturbance`."""
    run, card = results["generation"], results["card"]
    closing(
        Timed(
            f"The same {run['new_tokens']} tokens took {run['token_passes_without']:,} token passes without a cache "
            f"and {run['token_passes_with']:,} with one; the last came {run['last_ratio']:.1f} times faster."
        ),
        Timed(
            f"Weights are read once for all: one large matrix took {results['intensity']['longer_64']:.1f} times as "
            "long for 64 sequences as for one."
        ),
        f"{card['running']} requests with reserved slots fill the {card['name']}, where {card['alpaca']['unreserved']} "
        "short ones would fit. Lesson 02 makes them fit.",
        disturbance=disturbance,
    )


def draw(results: dict, path: str) -> None:
    """Plot the time per token against length, and the used share of reservations."""
    run = results["generation"]
    used = {kind["title"]: 1 - kind["unused"]["2048"] for kind in results["reservation"].values()}
    with panels(path, 2) as (left, right):
        left.plot(run["lengths"], run["ms_without"], "o-", color=palette.VERMILLION, label="without a cache")
        left.plot(run["lengths"], run["ms_with"], "s-", color=palette.BLUE, label="with a cache")
        left.set(title="Time of one token", xlabel="tokens before it", ylabel="ms", ylim=0)
        left.legend()
        right.barh(list(used), 1, color=palette.PALE)
        right.bar_label(right.barh(list(used), list(used.values()), color=palette.BLUE), fmt="{:.0%}", padding=4)
        right.set(title="Used, of 2,048 slots reserved", xticks=[])
        right.invert_yaxis()


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Build the parser: the common flags and the lesson's own; --help shows `doc`."""
    flags = lesson_parser(doc)
    flags.add_argument("--gpu", default="L4", help="the card of the ledger")
    flags.add_argument("--serve", default="Llama-3.1-8B", help="the model on that card")
    flags.add_argument("--max-model-len", type=positive_int, default=2048, help="slots reserved for each request")
    return flags
