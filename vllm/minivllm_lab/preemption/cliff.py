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
from minivllm_lab.drawing import QUIET, RULE, line, rect, svg, text
from minivllm_lab.palette import VERMILLION
from minivllm_lab.preemption.published_waste import workload
from minivllm_simulate.cost_model import RooflineCost
from minivllm_simulate.hardware import get_hardware
from minivllm_simulate.known_models import known_model
from minivllm_simulate.virtual_clock import SimulatedRequest, Simulation, percentile, simulate

RATE, POOLS = 10, (2000, 1000, 800, 600, 500, 400)
"""Requests a second, and the sizes of the pools."""
GIVEN = 2
"""The number of pools that the bet shows."""

WIDTH, LEFT, TOP, HIGH, WIDE = 700, 96, 60, 210, 560
FASTEST, SLOWEST = 0.03, 20
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
    return simulate(work, SchedulerConfig(max_model_len=20_000, **limits), pool, cost)


@lru_cache
def pool_of(blocks: int) -> Pool:
    """Simulate an open load that would fill 436 blocks on average, with a pool of `blocks`."""
    draw, now, work = random.Random(1), 0.0, []
    for request in workload():
        now += draw.expovariate(RATE)
        work.append(SimulatedRequest(request.prompt_tokens, request.output_tokens, now))
    run = on_h100(work, blocks, max_num_seqs=256, max_num_batched_tokens=2048)
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
    return _picture("And when the pool is a little more than half full?", POOLS[:GIVEN], asks=True)


def reveal() -> str:
    """Draw all pools: the cliff."""
    return _picture("The cliff begins where the peak fills the pool", POOLS)


def _picture(title: str, pools: Sequence[int], *, asks: bool = False) -> str:
    points = [pool_of(blocks) for blocks in pools]
    parts = [text(16, 28, title, size=15, bold=True)]
    parts.append(text(LEFT - 8, TOP - 12, "first token, 99th percentile, s (log axis)", size=12, colour=QUIET))
    for seconds in (0.03, 0.1, 0.3, 1, 3, 10):
        parts += [
            line((LEFT, _y(seconds)), (LEFT + WIDE, _y(seconds)), RULE),
            text(LEFT - 8, _y(seconds) + 4, str(seconds), size=12, anchor="end"),
        ]
    for share in range(0, 101, 20):
        parts.append(text(_x(share / 100), TOP + HIGH + 18, f"{share} %", size=12, anchor="middle"))
    words = "how full the pool is on average; the smaller the pool, the fuller"
    parts.append(text(LEFT + WIDE / 2, TOP + HIGH + 38, words, size=12, anchor="middle", colour=QUIET))
    if asks:
        left = _x(points[-1].mean) + 24
        parts.append(rect(left, TOP, LEFT + WIDE - left, HIGH, "#FFFFFF", stroke=QUIET, dash="4 3"))
        middle = (left + LEFT + WIDE) / 2
        parts.append(text(middle, TOP + HIGH - 10, "?", size=24, anchor="middle"))  # low: its height tells nothing
    else:
        full = _x(points[0].mean / points[0].most)  # of a pool that these requests' peak just fills
        parts.append(line((full, TOP), (full, TOP + HIGH), QUIET, dash="4 3"))
        parts.append(text(full - 8, TOP + 14, "here the peak fills the pool", size=12, anchor="end", colour=QUIET))
    corners = [(_x(point.mean), _y(point.ttft)) for point in points]
    parts += [line(here, there, VERMILLION, width=2) for here, there in pairwise(corners)]
    for point, (x, y) in zip(points, corners, strict=True):
        # Left of the question mark, and right of the steep curve.
        place, anchor = (x + 20, "end") if point.blocks in POOLS[:GIVEN] else (x + 8, "start")
        parts += [
            rect(x - 4, y - 4, 8, 8, VERMILLION, radius=4),
            text(x - 8, y - 10, f"{point.ttft:.2f}", size=12, anchor="end"),
            text(place, y + 16, f"{point.blocks:,} blocks", size=12, anchor=anchor, colour=QUIET),
        ]
    label = ". ".join(f"{point.mean:.0%} full on average: {point.ttft:.2f} s" for point in points)
    return svg(WIDTH, TOP + HIGH + 54, *parts, label=f"{title} {label}.")


def _x(share: float) -> float:
    return LEFT + share * WIDE


def _y(seconds: float) -> float:
    return TOP + HIGH * math.log(SLOWEST / seconds, SLOWEST / FASTEST)
