"""Lesson 11's cliff: the time to the first token under one load, over the pool's size; measured by
simulation, and drawn for the bet and its reveal.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from minivllm.config import CacheConfig, SchedulerConfig
from minivllm.core.scheduler import Scheduler
from minivllm_lab.pictures.drawing import QUIET, RULE, line, points, rect, svg, text, tint
from minivllm_lab.pictures.palette import BLUE, VERMILLION
from minivllm_lab.preemption.published_waste import workload
from minivllm_simulate.cost_model import RooflineCost
from minivllm_simulate.hardware import get_hardware
from minivllm_simulate.known_models import known_model
from minivllm_simulate.virtual_clock import SimulatedRequest, Simulation, percentile, simulate

RATE, REQUESTS, POOLS = 5, 1500, (1600, 800, 450, 350, 300)
"""Requests a second, their number, and the sizes of the pools. With 300 requests the 99th
percentile would be that of three, and a matter of luck.
"""
GIVEN = 2
"""The number of pools that the bet shows."""

WIDTH, LEFT, TOP, HIGH, WIDE = 700, 96, 60, 210, 560
HELD_HIGH, HELD_MOST = 110, 800
"""The height of the reveal's upper picture, and the blocks at its upper end."""
FASTEST, SLOWEST = 0.03, 30
"""The seconds at the ends of the axis, which is logarithmic."""


class Pool(NamedTuple):
    """The result for a pool of `blocks`: how full it is, preemptions, and latencies in seconds."""

    blocks: int
    mean: float
    most: float
    preemptions: int
    ttft: float
    p50: float
    p99: float


def on_h100(work: Sequence[SimulatedRequest], blocks: int, **limits: Any) -> Simulation:
    """Simulate Llama-3.1-8B on an H100 with a pool of `blocks`, without prefix caching."""
    cost = RooflineCost.of(known_model("Llama-3.1-8B"), get_hardware("H100"))
    pool = CacheConfig(num_gpu_blocks=blocks + 1, enable_prefix_caching=False)
    return simulate(work, Scheduler(SchedulerConfig(max_model_len=20_000, **limits), pool), cost)


def run_of(blocks: int, seed: int = 1) -> Simulation:
    """Simulate an open load that would fill 268 blocks on average, with a pool of `blocks`; `seed`
    draws the arrivals.
    """
    draw, now, work = random.Random(seed), 0.0, []
    for request in workload(requests=REQUESTS):
        now += draw.expovariate(RATE)
        work.append(SimulatedRequest(request.prompt_tokens, request.output_tokens, now))
    return on_h100(work, blocks, max_num_seqs=256, max_num_batched_tokens=2048)


@lru_cache
def pool_of(blocks: int, seed: int = 1) -> Pool:
    """Return how full a pool of `blocks` is under this load, and how long requests take."""
    run = run_of(blocks, seed)
    busy = sum(step.seconds for step in run.steps)
    latencies = [request.latency for request in run.requests]
    return Pool(
        blocks,
        mean=sum(step.kv_cache_usage * step.seconds for step in run.steps) / busy,
        most=max(step.kv_cache_usage for step in run.steps),
        preemptions=run.num_preemptions,
        ttft=percentile(run.ttfts, 0.99),
        p50=percentile(latencies, 0.5),
        p99=percentile(latencies, 0.99),
    )


def bet() -> str:
    """Draw the two largest pools, and a question mark over the rest."""
    title = "And when the pool is a little more than half full?"
    return _card(title, POOLS[:GIVEN], TOP + HIGH + 54, *_curve(POOLS[:GIVEN], TOP, asks=True))


def reveal() -> str:
    """Draw the blocks that the requests hold over time, and below it all pools: the cliff."""
    title, top = "The average has room, the peaks have not", TOP + HELD_HIGH + 56
    return _card(title, POOLS, top + HIGH + 54, *_held(), *_curve(POOLS, top))


def _card(title: str, pools: Sequence[int], height: float, *parts: str) -> str:
    told = (pool_of(blocks) for blocks in pools)
    label = ". ".join(f"{point.mean:.0%} full on average: {point.ttft:.2f} s" for point in told)
    return svg(WIDTH, height, text(16, 28, title, size=15, bold=True), *parts, label=f"{title}. {label}.")


@lru_cache
def most_held(blocks: int) -> dict[int, float]:
    """Return, for each second, the most blocks that the requests hold in a pool of `blocks`."""
    most: dict[int, float] = {}
    for step in run_of(blocks).steps:
        second = int(step.start)
        most[second] = max(most.get(second, 0), step.kv_cache_usage * blocks)
    return most


def _held() -> list[str]:
    """Draw what the requests hold over time in the largest pool, and the rims of two others."""
    most, bottom, rim = most_held(POOLS[0]), TOP + HELD_HIGH, POOLS[GIVEN]
    end = max(most)

    def place(second: float, blocks: float) -> tuple[float, float]:
        return LEFT + WIDE * second / end, bottom - HELD_HIGH * blocks / HELD_MOST

    def area(floor: float, colour: str) -> str:
        surface = [place(second, max(floor, blocks)) for second, blocks in most.items()]
        return f'<polygon points="{points([place(0, floor), *surface, place(end, floor)])}" fill="{colour}"/>'

    parts = [
        text(LEFT - 8, TOP - 12, "blocks that the requests hold, on a pool with room for all", size=12, colour=QUIET),
        area(0, tint(BLUE, 0.45)),
        area(rim, VERMILLION),
    ]
    mean = pool_of(POOLS[0]).mean * POOLS[0]
    for blocks, words in ((HELD_MOST, f"{HELD_MOST} blocks"), (rim, f"{rim} blocks"), (mean, f"mean {mean:.0f}")):
        y = place(0, blocks)[1]
        parts += [
            line((LEFT, y), (LEFT + WIDE, y), QUIET, dash="4 3"),
            text(LEFT - 8, y + 4, words, size=12, anchor="end"),
        ]
    for second in range(0, end + 1, 60):
        parts.append(text(place(second, 0)[0], bottom + 18, f"{second} s", size=12, anchor="middle"))
    return parts


def _curve(pools: Sequence[int], top: float, *, asks: bool = False) -> list[str]:
    """Draw the time to the first token over how full these pools are; the picture begins at `top`."""
    told = [pool_of(blocks) for blocks in pools]
    parts = [text(LEFT - 8, top - 12, "first token, 99th percentile, s (log axis)", size=12, colour=QUIET)]
    for seconds in (0.03, 0.1, 0.3, 1, 3, 10, 30):
        y = top + _y(seconds)
        parts += [
            line((LEFT, y), (LEFT + WIDE, y), RULE),
            text(LEFT - 8, y + 4, str(seconds), size=12, anchor="end"),
        ]
    for share in range(0, 101, 20):
        parts.append(text(_x(share / 100), top + HIGH + 18, f"{share} %", size=12, anchor="middle"))
    words = "how full the pool is on average; the smaller the pool, the fuller"
    parts.append(text(LEFT + WIDE / 2, top + HIGH + 38, words, size=12, anchor="middle", colour=QUIET))
    if asks:
        left = _x(told[-1].mean) + 24
        parts.append(rect(left, top, LEFT + WIDE - left, HIGH, "#FFFFFF", stroke=QUIET, dash="4 3"))
        middle = (left + LEFT + WIDE) / 2
        parts.append(text(middle, top + HIGH - 10, "?", size=24, anchor="middle"))  # low: its height tells nothing
    else:
        full = _x(told[0].mean / told[0].most)  # of a pool that these requests' peak just fills
        parts.append(line((full, top), (full, top + HIGH), QUIET, dash="4 3"))
        parts.append(text(full - 8, top + 14, "here the peak fills the pool", size=12, anchor="end", colour=QUIET))
    corners = [(_x(point.mean), top + _y(point.ttft)) for point in told]
    parts += [line(here, there, VERMILLION, width=2) for here, there in pairwise(corners)]
    for point, (x, y) in zip(told, corners, strict=True):
        # Left of the question mark, and right of the steep curve.
        at, anchor = (x + 20, "end") if point.blocks in POOLS[:GIVEN] else (x + 8, "start")
        parts += [
            rect(x - 4, y - 4, 8, 8, VERMILLION, radius=4),
            text(x - 8, y - 10, f"{point.ttft:.2f}", size=12, anchor="end"),
            text(at, y + 16, f"{point.blocks:,} blocks", size=12, anchor=anchor, colour=QUIET),
        ]
    return parts


def _x(share: float) -> float:
    return LEFT + share * WIDE


def _y(seconds: float) -> float:
    return HIGH * math.log(SLOWEST / seconds, SLOWEST / FASTEST)
