"""Count how much of a reserved KV cache requests ever fill."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from minivllm_simulate.workloads import WORKLOADS

REQUESTS = 20_000


def unused_shares(reserved: Iterable[int], seed: int = 0) -> dict[str, dict]:
    """Reserve slots for 20,000 requests of each of four published kinds; count those that stay
    empty.

    `reserved` are the lengths to try. Requests longer than a reservation are turned away.
    """
    results = {}
    for name, workload in WORKLOADS.items():
        lengths = [request.total for request in workload.sample(REQUESTS, seed)]
        unused = {}
        for slots in sorted(set(reserved)):
            fitting = [length for length in lengths if length <= slots]
            unused[str(slots)] = 1 - statistics.mean(fitting or [0]) / slots
        results[name] = {"title": workload.title, "mean": statistics.mean(lengths), "unused": unused}
    return results
