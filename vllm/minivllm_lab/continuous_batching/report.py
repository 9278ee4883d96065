"""Lesson 04's scenes on the simulator, its tables, its figure and its command line."""

from __future__ import annotations

import argparse
import random
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from minivllm.config import EMBEDDED_MODEL, CacheConfig, SchedulerConfig
from minivllm_lab import palette
from minivllm_lab.cli import lesson_parser, whole_number
from minivllm_lab.continuous_batching import scenes
from minivllm_lab.figures import curves, panels
from minivllm_lab.progress import track
from minivllm_lab.recording import bare_engine, foretell, record_run
from minivllm_lab.tables import Timed, closing, console, table
from minivllm_simulate.cost_model import FittedCost, RooflineCost, StepShape, model_error
from minivllm_simulate.hardware import get_hardware
from minivllm_simulate.known_models import known_model
from minivllm_simulate.workloads import Lengths, workload


def show_timeline(name: str, found: Mapping) -> None:
    """One policy's batch: a row for each slot, a letter for each request."""
    rows = found["slots"]
    console.print(f"{name}: {found['steps']} steps, {found['used']:.0%} of the slot-steps make a token")
    console.print("\n".join("  " + "".join(who or "·" for who in row) for row in rows), markup=False)


def show_slots(found: Mapping[str, Mapping], slots: int) -> None:
    """Show the share of slots in use, by kind of request."""
    columns = ("formula", "static", "continuous")
    rows = [(title, *(f"{one[column]:.1%}" for column in columns)) for title, one in found.items()]
    table(f"{slots} slots in use, from the first step to the last", ("outputs like", *columns), rows)


def show_ways(found: Mapping[str, Mapping], requests: int, tokens: int, error: object) -> None:
    """Show the engine's run with each policy, on memory for `tokens` tokens."""
    formats = ("", "", ",.0f", ".2f", "+.0%")
    rows = [(n, *(format(x, form) for x, form in zip(one.values(), formats, strict=True))) for n, one in found.items()]
    columns = ("", "most at once", "steps", "tokens a second", "× static", "modelled time off by")
    caption = f"modelled: a line through half of the steps; on the other half it is off by {error}"
    table(f"{requests} requests, memory for {tokens:,} tokens", columns, rows, caption)


MAX_LEN, RESERVED = 512, 8
"""The memory of the engine's runs: so many requests if each reserves the greatest length."""
WAYS: dict[str, tuple[int, dict]] = {
    "one at a time": (MAX_LEN, {"max_num_seqs": 1}),
    "static, reserved": (MAX_LEN, {"max_num_seqs": RESERVED, "static_batching": True}),
    "continuous, reserved": (MAX_LEN, {"max_num_seqs": RESERVED}),
    "continuous, paged": (16, {"max_num_seqs": 64}),
}
"""Block size and settings of each. A reserved region is a block as long as the greatest length."""


def pool(block_size: int) -> CacheConfig:
    """That memory in blocks of this size, and the null block."""
    count = 1 + RESERVED * MAX_LEN // block_size
    return CacheConfig(num_gpu_blocks=count, block_size=block_size, enable_prefix_caching=False)


def measure_engine(model: str, requests: int, tokens: float, device: torch.device, seed: int) -> dict:
    """Throughput of each way on the same requests, and how far a simulation is off that knows half of the steps.

    `tokens`: of an answer, in the mean.
    """
    draw, outputs, runs, found = random.Random(seed), Lengths(tokens), {}, {}
    lengths = [(draw.randint(8, 64), min(outputs.quantile(draw.random()), MAX_LEN - 64)) for _ in range(requests)]
    for name, (size, settings) in track(WAYS.items(), "running the engine"):
        core = bare_engine(model, device, pool(size), max_model_len=MAX_LEN, **settings)
        runs[name] = record_run(core, lengths)
    steps = [step for recording in runs.values() for step in recording.steps]
    cost, base = FittedCost.fit(steps[::2]), runs["static, reserved"].throughput
    for name, got in runs.items():
        figures = {"most": got.most_running, "steps": len(got.steps), "rate": got.throughput}
        found[name] = figures | {"gain": got.throughput / base, "off": foretell(lengths, got, cost)}
    error = model_error(cost, steps[1::2])
    show_ways(found, requests, RESERVED * MAX_LEN, error)
    alone, _, batched, paged = (one["gain"] for one in found.values())
    ratios = {"batching": batched, "paging": paged / batched, "both": paged, "over_one": paged / alone}
    return {**ratios, "most": found["continuous, paged"]["most"], "ways": found, "model_error": str(error)}


def measure_overload(cost: RooflineCost, cache: CacheConfig, requests: int, seed: int) -> dict:
    """Requests like ShareGPT's at 0.7 and 1.3 times what 16 slots can serve: who waits, and for how long."""
    config = SchedulerConfig(max_model_len=8192, max_num_seqs=16)
    lengths = workload("sharegpt").sample(2 * requests, seed)
    rate = scenes.capacity(lengths, config, cache, cost)
    cases = [(load, lengths[:count]) for load in (0.7, 1.3) for count in (requests, 2 * requests)]
    found = [scenes.arrivals_at(load, part, config, cache, cost, rate, seed) for load, part in cases]
    rows = [(f"{one.load} × capacity", one.requests, one.longest_queue, f"{one.late_ttft:.2f}") for one in found]
    columns = ("arrivals", "requests", "longest queue", "s to first token, last quarter")
    table(f"Capacity {rate:.1f} requests a second, modelled", columns, rows)
    return {"capacity": rate, **{f"{one.load}_{one.requests}": vars(one) for one in found}}


def measure_long_prompt(cost: RooflineCost, cache: CacheConfig) -> dict:
    """Sixteen chats decode, then a prompt of 4,096 tokens arrives: the longest gap between a chat's tokens."""
    found = {str(budget): vars(scenes.long_prompt(budget, cache, cost)) for budget in (8192, 2048, 512, 256)}
    rows = [(budget, *(f"{1e3 * value:.1f}" for value in one.values())) for budget, one in found.items()]
    columns = ("budget", "usual gap, ms", "longest gap, ms", "its first token, ms")
    table("A prompt of 4,096 tokens among 16 chats, modelled", columns, rows)
    return found


@dataclass
class Catching:
    """One request that decodes: known and computed tokens, and samples under way whose values are not known yet."""

    known: int = 1
    computed: int = 0
    num_output_placeholders: int = 0


def pipeline(depth: int, placeholders: bool, tokens: int, schedule_ms: float, forward_ms: float) -> dict:
    """One request generates `tokens`, with up to `depth` steps under way. CPU and GPU each do one thing at a time.

    Returns ms per token, steps, and how often the scheduler found nothing to do. `placeholders`: a sample that is under
    way counts as a known token.
    """
    request, left, cpu, gpu, steps, empty = Catching(), tokens, 0.0, 0.0, 0, 0
    under_way: deque[float] = deque()
    while left > 0:
        cpu += schedule_ms
        enough = request.num_output_placeholders >= left  # the rest is being sampled already
        scheduled = not enough and request.known + request.num_output_placeholders > request.computed
        if scheduled:
            gpu, steps, request.computed = max(cpu, gpu) + forward_ms, steps + 1, request.computed + 1
            request.num_output_placeholders += placeholders
            under_way.append(gpu)
        elif not enough:
            empty += 1  # it waits for a token whose value the scheduler does not need
        if len(under_way) == depth or not scheduled:
            cpu = max(cpu, under_way.popleft())  # wait for the oldest step, and take its token in
            request.num_output_placeholders -= placeholders
            request.known, left = request.known + 1, left - 1
    return {"ms_per_token": cpu / tokens, "steps": steps, "empty": empty}


def measure_pipelines(schedule_ms: float = 2.0, forward_ms: float = 5.0, tokens: int = 100) -> dict:
    """One step after the other; two deep without placeholders; two deep with them."""
    kinds = {"one after the other": (1, False), "two deep, no placeholders": (2, False), "two deep": (2, True)}
    found = {name: pipeline(*kind, tokens, schedule_ms, forward_ms) for name, kind in kinds.items()}
    show_pipelines(found, schedule_ms, forward_ms)
    return found


def kept_aside() -> dict[str, dict[str, float]]:
    """The step model on published figures of Llama-3.1-8B that were not used to calibrate it.

    The A100's is from gpt-fast's README, those of the B200 from vLLM's blog of 2026-04-22. Returns for each the
    published figure, the modelled one, and by what share that is off.
    """

    def line(gpu: str) -> tuple[float, float]:
        """Milliseconds of a decode without context, and what each token of context adds."""
        cost = RooflineCost.of(known_model("Llama-3.1-8B"), get_hardware(gpu))
        near, far = (1e3 * cost.seconds(StepShape.of([(1, context)])) for context in (0, 100_000))
        return near, (far - near) / 100_000

    (a100, _), (b200, slope) = line("A100"), line("B200")
    figures = {
        "A100: tokens a second of one sequence": (93.83, 1e3 / a100),
        "B200: ms a token, no context": (3.93, b200),
        "B200: ns for each token of context": (18.0, 1e6 * slope),
    }
    return {
        what: {"published": published, "modelled": modelled, "off": modelled / published - 1}
        for what, (published, modelled) in figures.items()
    }


def show_kept_aside(found: Mapping[str, Mapping[str, float]]) -> None:
    """Show how far the step model is off on figures that it was not calibrated on."""
    rows = [(what, f"{x['published']:.3g}", f"{x['modelled']:.3g}", f"{x['off']:+.0%}") for what, x in found.items()]
    table("The step model on figures kept aside", ("Llama-3.1-8B", "published", "modelled", "off by"), rows)


def show_starved(got: Mapping[str, int], token_budget: int, steps: int) -> None:
    """Show the tokens that each request has got after some steps."""
    table(f"Tokens after {steps} steps with a budget of {token_budget}", list(got), [list(got.values())])


def show_pipelines(found: Mapping[str, Mapping], schedule_ms: float, forward_ms: float) -> None:
    """Time of a token, by how one step and the next follow each other."""
    rows = [(n, f"{x['ms_per_token']:.2f}", x["steps"], x["empty"]) for n, x in found.items()]
    title = f"Scheduling takes {schedule_ms:g} ms, the forward pass {forward_ms:g} ms"
    table(title, ("one step and the next", "ms a token", "steps", "schedules in vain"), rows)


def close(found: dict, slots: int, disturbance: str) -> None:
    """Print the conclusions; `disturbance` says what else kept the machine busy, if anything."""
    chat, ratio, gaps = found["slots"]["Azure conversation"], found["engine"], found["long_prompt"]
    closing(
        f"A static batch of {slots} chats uses {chat['static']:.0%} of its slots, "
        f"continuous batching {chat['continuous']:.0%}.",
        Timed(
            f"On the same memory the engine made {ratio['batching']:.1f} times the tokens a second of static batching, "
            f"and with pages {ratio['both']:.1f} times."
        ),
        f"A prompt of 4,096 tokens holds 16 chats up for {1e3 * gaps['8192']['longest_gap']:.0f} ms, with a budget of "
        f"512 for {1e3 * gaps['512']['longest_gap']:.0f} ms at a time (modelled).",
        disturbance=disturbance,
    )


def draw(found: dict, path: str) -> None:
    """Both timelines, and the slots that a static batch uses against its size."""
    with panels(path, 3) as (left, middle, right):
        for axes, (name, one) in zip((left, middle), found["timelines"].items(), strict=True):
            for slot, row in enumerate(one["slots"]):
                for who in sorted(set(row) - {""}):
                    start, width, colour = row.index(who), row.count(who), palette.SERIES[(ord(who) - 65) % 7]
                    axes.barh(slot, width, left=start, color=colour, edgecolor="white")
                    axes.text(start + width / 2, slot, who, ha="center", va="center", fontsize=8)
            title, end = f"{name}: {one['steps']} steps, {one['used']:.0%} used", found["timelines"]["static"]["steps"]
            axes.set(title=title, xlabel="step", ylabel="slots", xlim=(0, end), yticks=[])
            axes.invert_yaxis()
        curves(right, {title: one["theory"] for title, one in found["slots"].items()}, factor=100, octaves=True)
        right.set(title="Static: slots used", xlabel="requests in the batch", ylabel="%", ylim=(0, 102))


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The lesson's own flags, besides the common ones; `doc` is shown by --help."""
    flags = lesson_parser(doc or "", EMBEDDED_MODEL)
    # With more slots than half of the counted requests, no request would have to wait.
    flags.add_argument("--slots", type=whole_number(1, 64), default=8, help="of the batch that is counted (up to 64)")
    at_least = whole_number(12, 4096)  # fewer are too few to compare
    flags.add_argument("--requests", type=at_least, help="for the engine, 12 or more (default: 72, 12 quick, 256 full)")
    return flags
