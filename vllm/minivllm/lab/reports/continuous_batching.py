"""Lesson 04's scenes on the simulator, its tables, its figure and its command line."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from minivllm.config import EMBEDDED_MODEL, CacheConfig, SchedulerConfig
from minivllm.lab import palette
from minivllm.lab.cli import lesson_parser, whole_number
from minivllm.lab.figures import curves, panels
from minivllm.lab.tables import Timed, closing, console, table
from minivllm.simulate import scenes
from minivllm.simulate.cost_model import RooflineCost
from minivllm.simulate.workloads import workload


def show_timeline(name: str, found: Mapping) -> None:
    """One policy's batch: a row for each slot, a letter for each request."""
    rows = found["slots"]
    console.print(f"{name}: {found['steps']} steps, {found['used']:.0%} of the slot-steps make a token")
    console.print("\n".join("  " + "".join(who or "·" for who in row) for row in rows), markup=False)


def show_slots(found: Mapping[str, Mapping], slots: int) -> None:
    """Show the share of slots in use while requests wait, by kind of request."""
    columns = ("formula", "static", "continuous")
    rows = [(title, *(f"{one[column]:.1%}" for column in columns)) for title, one in found.items()]
    table(f"{slots} slots in use while somebody waits", ("outputs like", *columns), rows)


def show_ways(found: Mapping[str, Mapping], requests: int, tokens: int, error: object) -> None:
    """Show the engine's run with each policy, on memory for `tokens` tokens."""
    formats = ("", "", ",.0f", ".2f", "+.0%")
    rows = [(n, *(format(x, form) for x, form in zip(one.values(), formats, strict=True))) for n, one in found.items()]
    columns = ("", "most at once", "steps", "tokens a second", "× static", "modelled time off by")
    caption = f"modelled: a line through half of the steps; on the other half it is off by {error}"
    table(f"{requests} requests, memory for {tokens:,} tokens", columns, rows, caption)


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
        f"A static batch of {slots} chats uses {chat['static']:.0%} of its slots while others wait, "
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
    flags.add_argument("--requests", type=at_least, help="for the engine, 12 or more (default: 72, 16 quick, 256 full)")
    return flags
