"""One model on several GPUs with tensor, pipeline or data parallelism: what each sends, stores and
serves.

The scheduler is the real one under the virtual clock; the capacity of a layout and the cost of its
steps are in `layouts`. Everything is *modelled*.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

from minivllm.config import ModelConfig
from minivllm_simulate.hardware import Hardware
from minivllm_simulate.layouts import BLOCK_SIZE, MAX_MODEL_LEN, Layout, PlacedModel
from minivllm_simulate.open_load import OpenLoad, OpenRun, finished, run_open
from minivllm_simulate.workloads import RequestLengths, poisson_arrivals, workload

WAYS = ("TP", "PP", "DP")
PLACES = 1024


def bytes_sent(way: str, gpus: int, tokens: int, hidden: int, layers: int) -> float:
    """Return the bytes that each GPU sends in a step: two all-reduces per layer (TP), its last
    hidden states (PP), nothing (DP), in 16 bits.
    """
    states = 2 * tokens * hidden
    return {"TP": 2 * layers * 2 * (gpus - 1) / gpus * states, "PP": states if gpus > 1 else 0, "DP": 0}[way]


def deployment(model: ModelConfig, gpu: Hardware, way: str, gpus: int) -> PlacedModel:
    """Place a model on `gpus` GPUs, parallelized in one of the `WAYS`. With one GPU, all ways are
    the same.
    """
    tp, pp, dp = (gpus if way == name else 1 for name in WAYS)
    return PlacedModel(model, gpu, Layout(tp, pp, dp), PLACES)


def serve(placed: PlacedModel, rate: float, counted: int, kind: str = "sharegpt", seed: int = 0) -> OpenRun:
    """Simulate requests of a kind that arrive at random, `rate` per second, at engines that have
    been running for a long time.

    Each group gets its share of the requests, which also arrive at random. One group is simulated
    (see `open_load`) until its first `counted` requests have ended, or until as many more have
    arrived.

    Raises:
        MinivllmError: the model does not fit.
    """
    share, half = rate / placed.layout.groups, MAX_MODEL_LEN // 2
    drawn = workload(kind).sample(2 * counted, seed)
    lengths = [RequestLengths(min(request.prompt_tokens, half), min(request.output_tokens, half)) for request in drawn]
    prompt = statistics.mean(request.prompt_tokens for request in lengths)
    output = statistics.mean(request.output_tokens for request in lengths)
    at_start = round(placed.steady(prompt, output, placed.kv_tokens()).batch(share))
    arrivals = poisson_arrivals(share, 2 * counted, seed)
    wanted = (2 * counted + at_start) * (max(request.total for request in lengths) + 2 * BLOCK_SIZE)
    load = OpenLoad(lengths, arrivals, counted, at_start, seed)
    return finished(run_open(load, *placed.configs(wanted), placed.cost))


def find_knee(attainment: Callable[[float], float], low: float, high: float, rounds: int, target: float = 0.9) -> float:
    """Find, by bisection, the highest rate at which at least `target` of the requests meet their
    service level.

    `attainment(rate)` offers that load and returns the share that met it, which falls as the rate
    grows. The answer is 0 if even `low` is too much, and `high` if `high` can be sustained.
    Otherwise it is too low by at most (high - low) / 2 ** rounds.
    """
    if attainment(low) < target:
        return 0.0
    if attainment(high) >= target:
        return high
    for _ in range(rounds):
        middle = (low + high) / 2
        low, high = (middle, high) if attainment(middle) >= target else (low, middle)
    return low
