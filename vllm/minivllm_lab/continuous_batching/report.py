"""Lesson 04's runs of the engine and the simulator, its tables, its figure and its command line."""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Mapping
from typing import TYPE_CHECKING

from minivllm.config import CacheConfig, SchedulerConfig
from minivllm.core.scheduler import Scheduler
from minivllm_lab.cli import lesson_parser, whole_number
from minivllm_lab.engines.recording import bare_engine, record_run
from minivllm_lab.pictures import palette
from minivllm_lab.pictures.figures import panels
from minivllm_lab.progress import track
from minivllm_lab.proof import refusal
from minivllm_lab.tables import Timed, closing, console, record_table, table
from minivllm_simulate.cost_model import Cost, RooflineCost
from minivllm_simulate.hardware import get_hardware
from minivllm_simulate.known_models import known_model
from minivllm_simulate.memory import memory_ledger
from minivllm_simulate.virtual_clock import SimulatedRequest, simulate
from minivllm_simulate.workloads import Lengths

if TYPE_CHECKING:
    import torch

SERVED = "Llama-3.1-8B"
"""The model of the simulated scenes and of the published figures."""


def show_timeline(name: str, timeline: Mapping) -> None:
    """Print one policy's batch: a row for each seat, a letter for each request."""
    console.print(f"{name}: {timeline['steps']} steps, {timeline['used']:.0%} of the seat-steps make a token")
    rows = ("  " + "".join(name or "·" for name in row) for row in timeline["slots"])
    console.print("\n".join(rows), markup=False)


def show_seats(results: Mapping[str, Mapping], seats: int) -> None:
    """Print the share of seats in use, by kind of request."""
    columns = ("formula", "static", "continuous")
    rows = [(title, *(f"{shares[column]:.1%}" for column in columns)) for title, shares in results.items()]
    table(f"{seats} seats in use, from the first step to the last", ("outputs like", *columns), rows)


MAX_LEN, RESERVED = 512, 8
"""The memory of the engine's runs holds RESERVED requests that each reserve MAX_LEN tokens."""
WAYS: dict[str, tuple[int, dict]] = {
    "one at a time": (MAX_LEN, {"max_num_seqs": 1}),
    "static, reserved": (MAX_LEN, {"max_num_seqs": RESERVED, "static_batching": True}),
    "continuous, reserved": (MAX_LEN, {"max_num_seqs": RESERVED}),
    "continuous, paged": (16, {"max_num_seqs": 64}),
}
"""Block size and settings of each. A reserved region is a block as long as the greatest length."""


def pool(block_size: int) -> CacheConfig:
    """Divide the memory of the engine's runs into blocks of `block_size` tokens, and add the null
    block.
    """
    count = 1 + RESERVED * MAX_LEN // block_size
    return CacheConfig(num_gpu_blocks=count, block_size=block_size, enable_prefix_caching=False)


def measure_engine(arguments: argparse.Namespace, device: torch.device) -> dict:
    """Run the engine with each of `WAYS` on the same requests; print and compare the steps and the
    throughput.
    """
    draw, outputs, runs = random.Random(arguments.seed), Lengths(16.0 if arguments.quick else 48.0), {}
    requests = arguments.requests or (12 if arguments.quick else 1024 if arguments.full else 256)
    lengths = [(draw.randint(8, 64), min(outputs.quantile(draw.random()), MAX_LEN - 64)) for _ in range(requests)]
    for name, (size, settings) in track(WAYS.items(), "running the engine"):
        core = bare_engine(arguments.model, device, pool(size), max_model_len=MAX_LEN, **settings)
        runs[name] = record_run(core, lengths)
    base, results = runs["static, reserved"], {}
    for name, run in runs.items():
        steps = {"most": run.most_running, "steps": len(run.steps), "fewer": len(base.steps) / len(run.steps)}
        results[name] = {**steps, "rate": run.throughput, "gain": run.throughput / base.throughput}
    columns = (
        "batching {name} | at once {most} | steps {steps:,} | × fewer {fewer:.2f} | tokens a second {rate:,.0f} | "
        "× static {gain:.2f}"
    )
    record_table(f"{requests} requests, memory for {RESERVED * MAX_LEN:,} tokens", results, columns)
    alone, _, batched, paged = (figures["gain"] for figures in results.values())
    ratios = {"batching": batched, "paging": paged / batched, "both": paged, "over_one": paged / alone}
    return {**ratios, "most": runs["continuous, paged"].most_running, "ways": results}


def refuse_too_long(model: str, device: torch.device) -> str:
    """Print the engine's refusal of a pool that cannot hold even one request of the maximum length."""
    small = CacheConfig(num_gpu_blocks=20)
    refused = refusal(lambda: bare_engine(model, device, small, max_model_len=512))
    console.print(f"larger than the pool: {refused}")
    return refused


def measure_long_prompt() -> dict:
    """Let 16 chats decode on a simulated H100 while a prompt of 4,096 tokens arrives; print the gaps
    between a chat's tokens.
    """
    served, card = known_model(SERVED), get_hardware("H100")
    blocks = memory_ledger(served, card, max_model_len=8192).num_blocks
    cost, cache = RooflineCost.of(served, card), CacheConfig(num_gpu_blocks=blocks, enable_prefix_caching=False)
    results = {str(budget): long_prompt(budget, cache, cost) for budget in (8192, 2048, 512, 256)}
    rows = [(budget, *(f"{1e3 * value:.1f}" for value in gaps.values())) for budget, gaps in results.items()]
    columns = ("budget", "usual gap, ms", "longest gap, ms", "its first token, ms")
    table("A prompt of 4,096 tokens among 16 chats, modelled", columns, rows)
    return results


def long_prompt(budget: int, cache: CacheConfig, cost: Cost) -> dict[str, float]:
    """Let 16 chats decode 200 tokens each while a prompt of 4,096 arrives after half a second, under
    a budget in tokens; return the median and the longest gap between two tokens of a chat, and the
    prompt's time to first token.
    """
    work = [SimulatedRequest(128, 200)] * 16 + [SimulatedRequest(4096, 16, arrival=0.5)]
    config = SchedulerConfig(max_model_len=8192, max_num_batched_tokens=budget)
    *chats, prompt = simulate(work, Scheduler(config, cache), cost).requests
    gaps = [gap for chat in chats for gap in chat.itls]
    return {"usual_gap": statistics.median(gaps), "longest_gap": max(gaps), "ttft": prompt.ttft}


def show_starved(tokens: Mapping[str, int], token_budget: int, steps: int) -> None:
    """Print how many tokens each request has received after `steps` steps."""
    shares = ", ".join(f"{name} {count}" for name, count in tokens.items())
    console.print(f"tokens after {steps} steps with a budget of {token_budget}: {shares}")


def close(results: dict, seats: int, disturbance: str) -> None:
    """Print the conclusions, without those from timings if there was a `disturbance`."""
    chat, gaps = results["slots"]["Azure conversation"], results["long_prompt"]
    _, _, batched, paged = results["engine"]["ways"].values()
    closing(
        f"A static batch of {seats} chats uses {chat['static']:.0%} of its seats, "
        f"continuous batching {chat['continuous']:.0%}.",
        Timed(
            f"In the same memory the engine needed {batched['fewer']:.1f} times fewer steps than with static batching, "
            f"and with pages {paged['fewer']:.1f} times. That made {batched['gain']:.1f} and {paged['gain']:.1f} times "
            "the tokens a second on this machine."
        ),
        f"A prompt of 4,096 tokens holds 16 chats up for {1e3 * gaps['8192']['longest_gap']:.0f} ms, with a budget of "
        f"512 for {1e3 * gaps['512']['longest_gap']:.0f} ms at a time (modelled).",
        disturbance=disturbance,
    )


def draw(results: dict, path: str) -> None:
    """Plot when each seat works and when it stays empty, under both policies."""
    with panels(path, 2) as axes_of:
        end = results["timelines"]["static"]["steps"]
        for axes, (name, timeline) in zip(axes_of, results["timelines"].items(), strict=True):
            for seat, row in enumerate(timeline["slots"]):
                axes.barh(seat, len(row), color=palette.PALE)
                for letter in sorted(set(row) - {""}):
                    start, width = row.index(letter), row.count(letter)
                    axes.barh(seat, width, left=start, color=palette.SKY, edgecolor="white")
                    axes.text(start + width / 2, seat, letter, ha="center", va="center")
            title = f"{name}: {timeline['steps']} steps, {timeline['used']:.0%} in use"
            axes.set(title=title, xlabel="step (grey: an empty seat)", ylabel="seats", xlim=(0, end), yticks=[])
            axes.invert_yaxis()


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Build the parser: the common flags and the lesson's own; --help shows `doc`."""
    flags = lesson_parser(doc)
    # With more seats than half of the counted requests, no request would have to wait.
    flags.add_argument("--seats", type=whole_number(1, 64), default=8, help="seats of the counted batch (up to 64)")
    at_least = whole_number(12, 4096)  # fewer are too few to compare
    flags.add_argument("--requests", type=at_least, help="requests, at least 12 (default: 256, 12 quick, 1024 full)")
    return flags
