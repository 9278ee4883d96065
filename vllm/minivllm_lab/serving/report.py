"""Lesson 06's traced request, its modelled GPUs, its figure and its command line; the loads are in
`loads`, clients that break a server in `raw_clients`.

Each `measure_*` function measures, prints its table and returns its figures.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from torch import Tensor

from minivllm_lab.cli import lesson_parser, whole_number
from minivllm_lab.engines.http_load import Ask
from minivllm_lab.pictures import palette
from minivllm_lab.pictures.figures import SMALL_TEXT, curves, panels
from minivllm_lab.progress import track
from minivllm_lab.serving.loads import describe_knee, load_completions, prompts, sizes, to_real
from minivllm_lab.serving.request_trace import HOPS, trace
from minivllm_lab.tables import Timed, closing, console, heading, ms, record_table
from minivllm_simulate.deployments import bytes_sent, deployment, serve
from minivllm_simulate.hardware import get_hardware
from minivllm_simulate.known_models import known_model

SLO_TTFT = 0.25
"""Seconds to a first token, by default."""
GPUS, GPU, MODEL = 4, "H100", "Llama-3.1-8B"
RATES = (60, 120, 200)
"""Requests a second, at the modelled deployments."""


# ---- 1. one request ------------------------------------------------------------------------------


def measure_trace(port: int, arguments: argparse.Namespace) -> dict:
    """Trace requests that are alone in the server; show, hop by hop, the one with the median time
    to first token.
    """
    heading("1. One request, hop by hop")
    count, runs = sizes(arguments).traced, []
    asks = [Ask(to_real(token_ids, 16)) for token_ids in prompts(count + 3, seed=1)]
    load_completions(port, asks[:3], clients=1)  # to warm up
    for ask in asks[3:]:
        with trace() as times:
            (answer,) = load_completions(port, [ask], clients=1)
        runs.append((answer, times))
    answer, times = sorted(runs, key=lambda run: run[0].ttft)[count // 2]
    marks = {"the client is connected": answer.connected} | {hop: times[hop] for hop in HOPS if hop in times}
    marks["the client has the first event"] = answer.events[0]
    at = {hop: seconds - answer.sent for hop, seconds in marks.items()}
    since = [0.0, *at.values()]
    rows = {hop: {"at": t, "since": t - before} for (hop, t), before in zip(at.items(), since, strict=False)}
    title = "From a POST to its first token"
    caption = f"and {len(answer.events) - 1} events later, at {ms(answer.latency)} ms, the last"
    record_table(title, rows, "hop {name} | at, ms {at:ms} | since the one before {since:ms}", caption)
    server_ttft = at["the text is in its collector"] - at["its JSON is checked"]
    at_ms = {hop: 1e3 * seconds for hop, seconds in at.items()}
    return {"at_ms": at_ms, "ttft_ms": 1e3 * answer.ttft, "server_ttft_ms": 1e3 * server_ttft}


# ---- 5. the grammar's mask -----------------------------------------------------------------------


def as_bitmask(allowed: Tensor) -> Tensor:
    """Pack booleans [rows, vocab] into int32 [rows, ceil(vocab / 32)]: token t is bit t % 32 of
    word t // 32.
    """
    padded = torch.nn.functional.pad(allowed.long(), (0, -allowed.shape[1] % 32)).unflatten(1, (-1, 32))
    words = (padded << torch.arange(32)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def apply_mask(kernel: Any, logits: Tensor, bitmask: Tensor, has_grammar: Tensor) -> None:
    """Launch the lesson's kernel on logits float32 [rows, vocab], in place; the other tensors are
    int32.
    """
    rows, words = bitmask.shape
    kernel[(rows, -(-words // 32))](logits, bitmask, has_grammar, logits.shape[1], words, BLOCK=32)


def verify_mask(kernel: Any, device: torch.device) -> dict:
    """Compare the kernel bit for bit with a boolean mask, for vocabularies that are no multiple of
    a word or a tile.

    Raises:
        AssertionError: the results differ.
    """
    heading("5. The grammar's mask")
    vocabularies = (31, 32, 1000, 4096, 5003)
    for vocabulary in vocabularies:
        allowed, logits = torch.rand(3, vocabulary) < 0.3, torch.randn(3, vocabulary)
        has_grammar, masked = torch.tensor([1, 0, 1], dtype=torch.int32), logits.to(device)
        apply_mask(kernel, masked, as_bitmask(allowed).to(device), has_grammar.to(device))
        expected = logits.masked_fill(~allowed & has_grammar.bool()[:, None], -torch.inf)
        assert torch.equal(masked.cpu(), expected), f"a vocabulary of {vocabulary} is masked wrongly"
    console.print(f"two of three rows have a grammar, vocabularies of {vocabularies}: correct bit for bit")
    return {"vocabularies": vocabularies}


# ---- 6. TP, PP and DP ----------------------------------------------------------------------------


def measure_ways(arguments: argparse.Namespace) -> dict:
    """Simulate one model on four GPUs under TP, PP and DP: what is sent, what fits, how long a token
    takes at some rates, and how many requests then wait.
    """
    heading("6. TP, PP and DP")
    model, gpu, seconds = known_model(MODEL), get_hardware(GPU), sizes(arguments).simulated
    results = {}
    for way in track(("TP", "PP", "DP"), "simulating"):
        placed = deployment(model, gpu, way, GPUS)
        groups, seed = placed.layout.groups, arguments.seed
        runs = {rate: serve(placed, rate, round(seconds * rate / groups), seed=seed) for rate in RATES}
        results[way] = {
            "sent_64": bytes_sent(way, GPUS, 64, model.hidden_size, model.num_hidden_layers),
            "kv_tokens": placed.kv_tokens() * groups,
            "alone_ms": 1e3 * statistics.median(serve(placed, 0.01, 12, seed=seed).tpots),
            "tpot_ms": {f"at_{rate}": 1e3 * statistics.median(run.tpots) for rate, run in runs.items()},
            "waiting": groups * runs[RATES[-1]].queue,
        }
    shown = {way: {**each, **each["tpot_ms"], "sent": each["sent_64"] / 1e6} for way, each in results.items()}
    columns = "way {name} | MB sent, 64 tokens {sent:.1f} | tokens cached {kv_tokens:,} | TPOT alone, ms {alone_ms:.1f}"
    columns += "".join(f" | at {rate}/s {{at_{rate}:.1f}}" for rate in RATES) + " | then waiting {waiting:,}"
    caption = f"TPOT is the median of the requests that come in {seconds:g} s (ShareGPT's lengths)."
    record_table(f"{MODEL} on {GPUS} {GPU}, modelled", shown, columns, caption)
    return {"ways": results}


# ---- the whole lesson ----------------------------------------------------------------------------


def close(results: dict, arguments: argparse.Namespace, disturbance: str) -> None:
    """Print the conclusions; `disturbance` says what else kept the machine busy, if anything."""
    slow, left, load_results = results["slow"], results["left"], results["load"]
    knee = describe_knee(load_results["knee"], load_results["least"], load_results["most"])
    tokens = {way: record["tpot_ms"] for way, record in results["ways"]["ways"].items()}
    low, high = f"at_{RATES[0]}", f"at_{RATES[-1]}"
    closing(
        f"A client that did not read for {slow['unread_seconds']:g} s stopped the naive server's others for "
        f"{slow['servers']['naive']['longest_gap_ms'] / 1e3:.1f} s, and clients that left had it compute "
        f"{left['naive']['in_vain']:,} tokens in vain.",
        Timed(
            f"This server's knee is {knee} requests a second. At {load_results['most']:.1f}, the first quarter of the "
            f"requests waited {load_results['above']['ttft_first_ms']:,.0f} ms for a first token, the last "
            f"{load_results['above']['ttft_last_ms']:,.0f}."
        ),
        f"On {GPUS} {GPU}, modelled: at {RATES[0]} requests a second a token of {MODEL} takes "
        f"{tokens['TP'][low]:.1f} ms with TP and {tokens['DP'][low]:.1f} with DP, at {RATES[-1]} "
        f"{tokens['TP'][high]:.1f} and {tokens['DP'][high]:.1f}.",
        disturbance=disturbance,
    )


def draw(results: dict, path: str) -> None:
    """Plot how long first tokens take under an open load, below and above the knee."""
    with panels(path, 1, width=6.4) as (axes,):
        load = results["load"]
        knee = f"{load['knee']:.1f}"
        words = {rate: f"{rate} a second" + ", the knee" * (rate == knee) for rate in load["tried"]}
        each = {words[rate]: dict(enumerate(run["ttft_ms"], start=1)) for rate, run in load["tried"].items()}
        curves(axes, each)
        limit = 1e3 * load.get("slo_ttft", SLO_TTFT)
        axes.axhline(limit, color=palette.GREY, linestyle="--")
        axes.annotate(f"the limit: {limit:g} ms", (1, limit), va="bottom", fontsize=SMALL_TEXT)
        axes.set(xlabel="quarter of the requests", ylabel="ms to the first token", xticks=(1, 2, 3, 4))
        axes.set(title="Arrivals below the knee, at it and above")


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Add the lesson's own flags to the common ones; --help shows `doc`."""
    flags = lesson_parser(doc)
    clients = "clients of the closed load, 1 to 64 (default: 16)"
    flags.add_argument("--clients", type=whole_number(1, 64), default=16, help=clients)
    first = f"seconds to a first token (default: {SLO_TTFT:g})"
    flags.add_argument("--slo-ttft", type=float, default=SLO_TTFT, help=first)
    flags.add_argument("--slo-tpot", type=float, default=0.05, help="seconds per token after it (default: 0.05)")
    return flags
