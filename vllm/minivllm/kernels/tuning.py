"""Autotuning: find the fastest of a few configurations, once per class of shapes, on the caller's
own data.

Kernels pass a short list, best guess first. The first call of each class on a GPU times every
entry; later calls look up the winner. While a CUDA graph is being captured nothing can be timed, so
an unknown class takes the first entry (run each shape once before capturing it, as the engine
does). `MINIVLLM_AUTOTUNE=0` always takes the first.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import torch

Configuration = TypeVar("Configuration")

_winners: dict[Hashable, object] = {}


def fastest(
    candidates: Sequence[Configuration], shape_class: Hashable, launch: Callable[[Configuration], object]
) -> Configuration:
    """Return the candidate whose `launch` takes the least time. Launching must be repeatable.

    A candidate that does not fit this GPU (too much shared memory) is skipped.
    """
    if len(candidates) == 1 or os.environ.get("MINIVLLM_AUTOTUNE") == "0":
        return candidates[0]
    if shape_class not in _winners:
        if torch.cuda.is_current_stream_capturing():  # nothing can be timed now
            return candidates[0]
        times = [_seconds(launch, candidate) for candidate in candidates]
        _winners[shape_class] = candidates[times.index(min(times))]
    return _winners[shape_class]  # type: ignore[return-value]


def _seconds(launch: Callable[[Configuration], object], candidate: Configuration, repeats: int = 5) -> float:
    from triton.runtime.errors import OutOfResources

    times = []
    try:
        launch(candidate)  # compiles
        for _ in range(repeats):
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            start.record()
            launch(candidate)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
    except OutOfResources:
        return float("inf")
    return statistics.median(times)
