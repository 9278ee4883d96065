"""The disaggregation model's error against published figures, and which of them it was fitted to.

    for check in disaggregation_checks(): print(check.table, check.what, check.measured,
    check.modelled, check.fitted)

The cost of a step is that of today's kernels at a data sheet's rates (`layouts`); the publications'
engines are from 2023 and slower. So DistServe's example appears twice: with the cost as it is, and
with two factors fitted to two of its figures, for arithmetic and for memory, so that the others are
predictions. Everything else is fitted to nothing. Not checked: DistServe's and Mooncake's gains on
recorded traffic, whose lengths and settings are not published in a form that could be run here.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from functools import cache

from minivllm.memory import kv_bytes_per_token
from minivllm_lab.disaggregation.goodput import SHARE, Colocated, Disaggregated, Objective, System, Work
from minivllm_simulate.cost_model import StepShape
from minivllm_simulate.deployments import find_knee
from minivllm_simulate.hardware import get_hardware
from minivllm_simulate.known_models import known_model
from minivllm_simulate.kv_links import Link, get_link, least_bandwidth
from minivllm_simulate.layouts import Layout, PlacedCost, PlacedModel
from minivllm_simulate.levers import SERVING, LeverCost
from minivllm_simulate.open_load import finished
from minivllm_simulate.published import SPLITWISE, SPLITWISE_FIRST_TOKENS, PublishedCheck, splitwise_cost

DISTSERVE = (
    "DistServe's blog, figure 6: 13B, one A100-80, 512 tokens in and 64 out, Poisson; 90 % within 0.4 s and 40 ms"
)
DISTSERVE_PAPER = "DistServe, section 3.3: OPT-66B, 512 tokens"
MOONCAKE = "Mooncake (FAST 2025): LLaMA-70B, prefix of 8,192 tokens; data-sheet peaks"
MOONCAKE_ENGINE = "Mooncake (FAST 2025): transfer engine over RoCE, 40 GB"

TTFT, TPOT, NEVER = 0.4, 0.04, 1e6
ARITHMETIC_SLOWER, MEMORY_SLOWER = 1.75, 1.82
"""Fitted: with them a prefilling A100 sustains 5.6 requests a second, and a decoding one 10, as
in DISTSERVE.
"""
NO_LINK = Link("none", 1e15, 0.0, "DistServe's example leaves it out")
SPLITWISE_GAPS = {("coding", 13): (0.052, 0.031), ("conversation", 129): (0.040, 0.028)}
"""Seconds between tokens on A100 and H100, by trace and its median tokens out; the rest is in
`published`.
"""


@dataclass(frozen=True)
class DisaggregationCheck(PublishedCheck):
    """A published figure and the model's value, the table they belong to, and whether the model was
    fitted to the figure.
    """

    table: str
    fitted: bool = False


@cache
def disaggregation_checks(counted: int = 200) -> tuple[DisaggregationCheck, ...]:
    """Return all checks; each run counts `counted` requests."""
    return (
        *distserve_checks("DistServe, cost as it is", counted, 1.0, 1.0),
        *distserve_checks("DistServe, two factors fitted", counted, ARITHMETIC_SLOWER, MEMORY_SLOWER),
        *splitwise_checks(),
        *link_checks(),
    )


def disaggregation_error(counted: int = 200) -> float:
    """Return the median of |modelled − measured| / measured over the figures that were not fitted."""
    return statistics.median(abs(check.error) for check in disaggregation_checks(counted) if not check.fitted)


# ---- DistServe's example


def slower(arithmetic: float, memory: float) -> PlacedCost:
    """Return the cost of OPT-13B on an A100-80 whose arithmetic and memory are slower by these
    factors.
    """
    cost = PlacedModel(known_model("opt-13b"), get_hardware("A100-80"), Layout(1, 1, 1)).cost
    roofline = cost.step.roofline
    slow = replace(roofline, flops=roofline.flops / arithmetic, bandwidth=roofline.bandwidth / memory)
    return replace(cost, step=replace(cost.step, roofline=slow))


def example(prefill: int, decode: int, cost: PlacedCost) -> Disaggregated:
    """Set up DistServe's example with these numbers of GPUs. Its prefills are not batched."""
    opt, gpu = known_model("opt-13b"), get_hardware("A100-80")
    return Disaggregated(opt, gpu, prefill, decode, NO_LINK, budget=512, cost=cost)


def sustained(system: System, work: Work, objective: Objective, high: float, part: str = "") -> float:
    """Find the highest sustained rate up to `high`; if `part` is "prefill", a computed prompt
    counts as a first token.
    """

    def attainment(rate: float) -> float:
        served = finished(system.serve(work, rate))
        if part != "prefill":
            return served.attainment(objective)
        times = [client.parts["queue"] + client.parts["prefill"] for client in served.clients]
        return sum(time <= objective.ttft for time in times) / len(times)

    return find_knee(attainment, high / 128, high, 7, SHARE)


def colocated(cost: PlacedCost) -> Colocated:
    """Set up DistServe's example on one GPU that does both and computes prompts whole."""
    opt, gpu = known_model("opt-13b"), get_hardware("A100-80")
    return Colocated(opt, gpu, 1, budget=2560, chunked_prefill=False, cost=cost)


def distserve_checks(table: str, counted: int, arithmetic: float, memory: float) -> list[DisaggregationCheck]:
    """Check figure 6 of DISTSERVE with these factors; unless they are 1, they were fitted to two of
    its figures.
    """
    work, cost, fitted = Work(512, 64, counted=counted), slower(arithmetic, memory), arithmetic != 1
    first, following, both = Objective(TTFT, NEVER), Objective(NEVER, TPOT), Objective(TTFT, TPOT)
    alone = colocated(cost)
    three, mixed = sustained(example(2, 1, cost), work, both, 48) / 3, sustained(alone, work, both, 16)
    rows = [
        ("prefill alone, requests/s", 5.6, sustained(example(1, 8, cost), work, first, 24, "prefill"), fitted),
        ("decode alone, requests/s", 10.0, sustained(example(8, 1, cost), work, following, 48), fitted),
        ("colocated: first tokens in time, requests/s", 2.3, sustained(alone, work, first, 24), False),
        ("colocated: following tokens in time, requests/s", 1.6, sustained(alone, work, following, 16), False),
        ("colocated: both, requests/s and GPU", 1.6, mixed, False),
        ("2 prefill, 1 decode: requests/s and GPU", 10 / 3, three, False),
        ("2 prefill, 1 decode against colocated", 2.1, three / mixed, False),
    ]
    return [DisaggregationCheck(label, DISTSERVE, published, ours, table, was) for label, published, ours, was in rows]


# ---- Splitwise's table, and links


def splitwise_checks() -> list[DisaggregationCheck]:
    """Check the prompt and token times of one request on two kinds of GPU, and the ratio between
    the two.
    """
    checks, gpus = [], ("A100-80", "H100")
    first_tokens = zip(SPLITWISE_FIRST_TOKENS.items(), SPLITWISE_GAPS.items(), strict=True)
    for ((trace, prompt), by_gpu), ((_, output), tbts) in first_tokens:
        ttfts = tuple(by_gpu.values())
        first = [splitwise_cost(gpu).seconds(StepShape.of([(prompt, 0)])) for gpu in gpus]
        following = [splitwise_cost(gpu).seconds(StepShape.of([(1, prompt + output // 2)])) for gpu in gpus]
        for name, published, ours in (("TTFT", ttfts, first), ("TBT", tbts, following)):
            rows = [
                (f"{trace}: {name} on {gpu}, seconds", *times)
                for gpu, *times in zip(gpus, published, ours, strict=True)
            ]
            rows.append((f"{trace}: {name}, H100 against A100", published[1] / published[0], ours[1] / ours[0]))
            checks += [DisaggregationCheck(*row[:1], SPLITWISE, *row[1:], "Splitwise, table IV") for row in rows]
    return checks


def link_checks() -> list[DisaggregationCheck]:
    """Check a prompt's bytes, the bandwidth that moves it as fast as it is computed, and the rates
    that networks reach.
    """
    model, table = known_model("Meta-Llama-3-70B"), "Bytes and links"
    opt66 = 2 * 64 * 9216 * 2
    rows = [("KV cache of a prompt, bytes", DISTSERVE_PAPER, 1.13 * 2**30, 512.0 * opt66)]
    for gpu, published in (("A100-80", 6e9), ("H100", 19e9)):
        peak = LeverCost.of(replace(SERVING, tensor_parallel=8), model, get_hardware(gpu)).roofline
        prefill = peak.floor_seconds(StepShape.of([(8192, 0)]))
        label = (
            f"8 x {gpu.replace('A100-80', 'A800').replace('H100', 'H800')}: bandwidth from which loading pays, bytes/s"
        )
        rows.append((label, MOONCAKE, published, least_bandwidth(model, 8192, prefill)))
    sent = 131_072 * kv_bytes_per_token(model)
    for many, name, published in ((4, "200 Gb/s", 87e9), (8, "400 Gb/s", 190e9)):
        rate = sent / (sent / (many * get_link(name).bandwidth))
        rows.append((f"{many} x {name}: bytes/s reached, against line rate", MOONCAKE_ENGINE, published, rate))
    return [DisaggregationCheck(label, source, published, ours, table) for label, source, published, ours in rows]
