"""Fit the constants of `minivllm_lab.workload.server` to the published rows whose role is "calibration".

    uv run python benchmarks/workload_fit.py    # two minutes; starts from the present constants

The fit minimizes |log(modelled / published)|, averaged over the rows of a lab and then over the labs, so that no
lab counts for more because it published more. Each constant is varied in turn, in ever smaller steps.

What the scheduler decides in a closed loop does not depend on what a step costs. So each load is simulated once, and
its steps are timed again for each set of constants.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from dataclasses import replace
from functools import cache
from itertools import accumulate

from minivllm_lab.workload.measured import Measured, measure
from minivllm_lab.workload.published import ASIDE, Row, published_rows
from minivllm_lab.workload.server import CONSTANTS, GENERATIONS, Constants, Generation
from minivllm_simulate.virtual_clock import RequestTimeline

ROWS = [row for row in published_rows() if row.source.role != ASIDE]
STEPS = (0.5, 0.2, 0.08, 0.03)
"""Shares by which a constant is changed, one round after another."""
Fit = tuple[Constants, *tuple[Generation, ...]]


@cache
def first_run(row: Row) -> Measured:
    """Simulate a row's load once."""
    return measure(row.server(), row.requests)


def retimed(row: Row, constants: Constants, hosts: tuple[Generation, ...]) -> float:
    """Return a row's figure under other constants, from the steps of its first run."""
    server = row.server(constants, hosts)
    if row.requests.rate:
        return measure(server, row.requests).metric(row.metric)
    before = first_run(row)
    seconds = [server.cost.seconds(step.shape) for step in before.run.steps]
    ends = list(accumulate(seconds))
    moved = {step.start + step.seconds: end for step, end in zip(before.run.steps, ends, strict=True)} | {0.0: 0.0}
    requests = [
        RequestTimeline(moved[each.arrival], [moved[at] for at in each.token_times]) for each in before.run.requests
    ]
    steps = [
        step._replace(start=end - each, seconds=each)
        for step, each, end in zip(before.run.steps, seconds, ends, strict=True)
    ]
    run = replace(before.run, requests=requests, steps=steps)
    return replace(before, run=run, first=server.host.first).metric(row.metric)


@cache
def distance(row: Row, constants: Constants, host: Generation) -> float:
    """Return how far off one row is, as a logarithm."""
    assert isinstance(row.value, float | int)
    return abs(math.log(retimed(row, constants, (replace(host, since=6),)) / row.value))


def loss(fit: Fit) -> float:
    """Return the mean over labs of the means over their rows."""
    constants, *hosts = fit
    by_lab: dict[str, list[float]] = defaultdict(list)
    for row in ROWS:
        old = row.source.gpu.startswith("A100")
        unused = dict.fromkeys(("hopper", "memory") if old else ("ampere", "ampere_memory"), 0.5)
        unused |= {} if " tp" in row.model else {"rank": 1e-3}
        by_lab[row.source.lab].append(distance(row, replace(constants, **unused), row.server(constants, hosts).host))
    return statistics.mean(map(statistics.mean, by_lab.values()))


def neighbours(fit: Fit, step: float) -> list[Fit]:
    """Return the fits in which one constant is larger or smaller by a share."""
    found = []
    for index, part in enumerate(fit):
        names = [name for name, value in vars(part).items() if isinstance(value, float)]
        for name in names:
            for factor in (1 + step, 1 / (1 + step)):
                value = getattr(part, name) * factor
                if name not in ("memory", "ampere_memory", "ampere", "hopper") or value <= 0.95:
                    found.append((*fit[:index], replace(part, **{name: value}), *fit[index + 1 :]))
    return found


def main() -> None:
    """Descend, and print each improvement."""
    fit: Fit = (CONSTANTS, *GENERATIONS)
    best = loss(fit)
    for step in STEPS:
        improved = True
        while improved:
            improved = False
            for each in neighbours(fit, step):
                if (value := loss(each)) < best - 1e-4:
                    fit, best, improved = each, value, True
                    break
        print(f"{best:.4f}", *fit, sep="\n  ", flush=True)


if __name__ == "__main__":
    main()
