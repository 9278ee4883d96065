"""Lesson 04's runs of the engine and the simulator, its tables, its figure and its command line."""

from __future__ import annotations

import argparse
import random
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

from minivllm.config import EMBEDDED_MODEL, CacheConfig, SchedulerConfig
from minivllm.memory import memory_ledger
from minivllm_lab import palette
from minivllm_lab.cli import lesson_parser, whole_number
from minivllm_lab.continuous_batching import scenes
from minivllm_lab.figures import curves, panels
from minivllm_lab.progress import track
from minivllm_lab.proof import refusal
from minivllm_lab.recording import bare_engine, foretell, record_run
from minivllm_lab.tables import Timed, closing, console, record_table, table
from minivllm_simulate.cost_model import FittedCost, RooflineCost, StepShape, model_error
from minivllm_simulate.hardware import get_hardware
from minivllm_simulate.known_models import known_model
from minivllm_simulate.workloads import Lengths, workload

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
    """Run the engine with each of `WAYS` on the same requests; print the throughput, and the error
    of a step model fitted to half of the steps.
    """
    draw, outputs, runs = random.Random(arguments.seed), Lengths(16.0 if arguments.quick else 48.0), {}
    requests = arguments.requests or (12 if arguments.quick else 256 if arguments.full else 72)
    lengths = [(draw.randint(8, 64), min(outputs.quantile(draw.random()), MAX_LEN - 64)) for _ in range(requests)]
    for name, (size, settings) in track(WAYS.items(), "running the engine"):
        core = bare_engine(arguments.model, device, pool(size), max_model_len=MAX_LEN, **settings)
        runs[name] = record_run(core, lengths)
    steps = [step for run in runs.values() for step in run.steps]
    cost, base = FittedCost.fit(steps[::2]), runs["static, reserved"].throughput
    results, rows = {}, []
    for name, run in runs.items():
        gain, off = run.throughput / base, foretell(lengths, run, cost)
        figures = {"most": run.most_running, "steps": len(run.steps), "rate": run.throughput, "gain": gain, "off": off}
        results[name] = figures
        rows.append((name, run.most_running, len(run.steps), f"{run.throughput:,.0f}", f"{gain:.2f}", f"{off:+.0%}"))
    error = model_error(cost, steps[1::2])
    columns = ("", "most at once", "steps", "tokens a second", "× static", "modelled time off by")
    caption = f"modelled: a line fitted to half of the steps; on the other half it is off by {error}"
    table(f"{requests} requests, memory for {RESERVED * MAX_LEN:,} tokens", columns, rows, caption)
    alone, _, batched, paged = (figures["gain"] for figures in results.values())
    ratios = {"batching": batched, "paging": paged / batched, "both": paged, "over_one": paged / alone}
    return {**ratios, "most": runs["continuous, paged"].most_running, "ways": results, "model_error": str(error)}


def refuse_too_long(model: str, device: torch.device) -> str:
    """Print the engine's refusal of a pool that cannot hold even one request of the maximum length."""
    small = CacheConfig(num_gpu_blocks=20)
    refused = refusal(lambda: bare_engine(model, device, small, max_model_len=512))
    console.print(f"larger than the pool: {refused}")
    return refused


def break_on_simulator(arguments: argparse.Namespace) -> dict:
    """Check the step model on published figures that it was not fitted to, then overload a
    simulated H100 and send it a long prompt.
    """
    served, card = known_model(SERVED), get_hardware("H100")
    blocks = memory_ledger(served, card, max_model_len=8192).num_blocks
    cost, cache = RooflineCost.of(served, card), CacheConfig(num_gpu_blocks=blocks, enable_prefix_caching=False)
    return {
        "kept_aside": kept_aside(),
        "overload": _measure_overload(cost, cache, 24 if arguments.quick else 200, arguments.seed),
        "long_prompt": _measure_long_prompt(cost, cache),
    }


def _measure_overload(cost: RooflineCost, cache: CacheConfig, requests: int, seed: int) -> dict:
    """Send requests like ShareGPT's at 0.7 and 1.3 times what 16 seats can serve; print how long
    they wait.
    """
    config = SchedulerConfig(max_model_len=8192, max_num_seqs=16)
    lengths = workload("sharegpt").sample(2 * requests, seed)
    rate = scenes.capacity(lengths, config, cache, cost)
    cases = [(load, lengths[:count]) for load in (0.7, 1.3) for count in (requests, 2 * requests)]
    results = [scenes.arrivals_at(load, part, config, cache, cost, rate, seed) for load, part in cases]
    records = {f"{result['load']}_{result['requests']}": result for result in results}
    columns = "arrivals {load} × capacity | requests {requests} | longest queue {longest_queue} | "
    columns += "s to first token, last quarter {late_ttft:.2f}"
    record_table(f"Capacity {rate:.1f} requests a second, modelled", records, columns)
    return {"capacity": rate, **records}


def _measure_long_prompt(cost: RooflineCost, cache: CacheConfig) -> dict:
    """Let 16 chats decode while a prompt of 4,096 tokens arrives; print the gaps between a
    chat's tokens.
    """
    results = {str(budget): scenes.long_prompt(budget, cache, cost) for budget in (8192, 2048, 512, 256)}
    rows = [(budget, *(f"{1e3 * value:.1f}" for value in gaps.values())) for budget, gaps in results.items()]
    columns = ("budget", "usual gap, ms", "longest gap, ms", "its first token, ms")
    table("A prompt of 4,096 tokens among 16 chats, modelled", columns, rows)
    return results


def pipeline(depth: int, placeholders: bool, tokens: int, schedule_ms: float, forward_ms: float) -> dict:
    """Simulate one request that generates `tokens`, with up to `depth` steps in flight.

    CPU and GPU each do one thing at a time. With `placeholders`, a sample in flight counts as a
    known token.

    Returns:
        Milliseconds per token, steps, and how often the scheduler had nothing to schedule.
    """
    known, computed, num_output_placeholders = 1, 0, 0
    left, cpu, gpu, steps, empty = tokens, 0.0, 0.0, 0, 0
    in_flight: deque[float] = deque()
    while left > 0:
        cpu += schedule_ms
        enough = num_output_placeholders >= left  # the rest is being sampled already
        scheduled = not enough and known + num_output_placeholders > computed
        if scheduled:
            gpu = max(cpu, gpu) + forward_ms
            steps += 1
            computed += 1
            num_output_placeholders += placeholders
            in_flight.append(gpu)
        elif not enough:
            empty += 1  # it waits for a token whose value the scheduler does not need
        if len(in_flight) == depth or not scheduled:
            cpu = max(cpu, in_flight.popleft())  # wait for the oldest step, and take its token in
            num_output_placeholders -= placeholders
            known += 1
            left -= 1
    return {"ms_per_token": cpu / tokens, "steps": steps, "empty": empty}


def measure_pipelines(schedule_ms: float = 2.0, forward_ms: float = 5.0, tokens: int = 100) -> dict:
    """Compare running steps one after the other, two in flight without placeholders, and two in
    flight with them.
    """
    kinds = {"one after the other": (1, False), "two deep, no placeholders": (2, False), "two deep": (2, True)}
    results = {name: pipeline(*kind, tokens, schedule_ms, forward_ms) for name, kind in kinds.items()}
    rows = [(name, f"{x['ms_per_token']:.2f}", x["steps"], x["empty"]) for name, x in results.items()]
    title = f"Scheduling takes {schedule_ms:g} ms, the forward pass {forward_ms:g} ms"
    table(title, ("one step and the next", "ms a token", "steps", "schedules in vain"), rows)
    return results


def kept_aside() -> dict[str, dict[str, float]]:
    """Print how far the step model is off from published figures that it was not calibrated on.

    The A100's figure is from gpt-fast's README, the B200's are from vLLM's blog of 2026-04-22.
    """
    a100, _ = _decode_line("A100")
    b200, slope = _decode_line("B200")
    figures = {
        "A100: tokens a second of one sequence": (93.83, 1e3 / a100),
        "B200: ms a token, no context": (3.93, b200),
        "B200: ns for each token of context": (18.0, 1e6 * slope),
    }
    results = {
        name: {"published": published, "modelled": modelled, "off": modelled / published - 1}
        for name, (published, modelled) in figures.items()
    }
    rows = [(name, f"{x['published']:.3g}", f"{x['modelled']:.3g}", f"{x['off']:+.0%}") for name, x in results.items()]
    table("The step model on held-out figures", (SERVED, "published", "modelled", "off by"), rows)
    return results


def _decode_line(gpu: str) -> tuple[float, float]:
    """Return the milliseconds of a decode step without context, and those that each token of
    context adds.
    """
    cost = RooflineCost.of(known_model(SERVED), get_hardware(gpu))
    near, far = (1e3 * cost.seconds(StepShape.of([(1, context)])) for context in (0, 100_000))
    return near, (far - near) / 100_000


def show_starved(tokens: Mapping[str, int], token_budget: int, steps: int) -> None:
    """Print how many tokens each request has received after `steps` steps."""
    table(f"Tokens after {steps} steps with a budget of {token_budget}", list(tokens), [list(tokens.values())])


def close(results: dict, seats: int, disturbance: str) -> None:
    """Print the conclusions, without those from timings if there was a `disturbance`."""
    chat, ratio, gaps = results["slots"]["Azure conversation"], results["engine"], results["long_prompt"]
    closing(
        f"A static batch of {seats} chats uses {chat['static']:.0%} of its seats, "
        f"continuous batching {chat['continuous']:.0%}.",
        Timed(
            f"In the same memory the engine made {ratio['batching']:.1f} times the tokens a second of static batching, "
            f"and with pages {ratio['both']:.1f} times."
        ),
        f"A prompt of 4,096 tokens holds 16 chats up for {1e3 * gaps['8192']['longest_gap']:.0f} ms, with a budget of "
        f"512 for {1e3 * gaps['512']['longest_gap']:.0f} ms at a time (modelled).",
        disturbance=disturbance,
    )


def draw(results: dict, path: str) -> None:
    """Plot both timelines, and the seats that a static batch uses by its size."""
    with panels(path, 3) as (left, middle, right):
        end = results["timelines"]["static"]["steps"]
        for axes, (name, timeline) in zip((left, middle), results["timelines"].items(), strict=True):
            for seat, row in enumerate(timeline["slots"]):
                for letter in sorted(set(row) - {""}):
                    start, width = row.index(letter), row.count(letter)
                    colour = palette.SERIES[(ord(letter) - 65) % 7]
                    axes.barh(seat, width, left=start, color=colour, edgecolor="white")
                    axes.text(start + width / 2, seat, letter, ha="center", va="center", fontsize=8)
            title = f"{name}: {timeline['steps']} steps, {timeline['used']:.0%} used"
            axes.set(title=title, xlabel="step", ylabel="seats", xlim=(0, end), yticks=[])
            axes.invert_yaxis()
        theory = {title: shares["theory"] for title, shares in results["slots"].items()}
        curves(right, theory, factor=100, octaves=True)
        right.set(title="Static: seats used", xlabel="requests in the batch", ylabel="%", ylim=(0, 102))


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Build the parser: the common flags and the lesson's own; --help shows `doc`."""
    flags = lesson_parser(doc or "", EMBEDDED_MODEL)
    # With more seats than half of the counted requests, no request would have to wait.
    flags.add_argument("--seats", type=whole_number(1, 64), default=8, help="seats of the counted batch (up to 64)")
    at_least = whole_number(12, 4096)  # fewer are too few to compare
    flags.add_argument("--requests", type=at_least, help="requests, at least 12 (default: 72, 12 quick, 256 full)")
    return flags
