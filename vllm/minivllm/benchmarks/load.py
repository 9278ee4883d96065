"""Open and closed load.

Open load: requests come at a rate, whatever the server does, as users come who do not know of each other. Closed load:
so many clients, each of which sends its next request when it has the answer to the last; an overloaded server slows
them down, and they hide that it is.

In vLLM v0.33.0: `get_request` and `benchmark` in `vllm/benchmarks/serve.py`.
"""

import asyncio
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from minivllm.benchmarks.client import RequestFuncOutput, SampleRequest, Target, new_session, send
from minivllm.errors import MinivllmError


@dataclass(frozen=True)
class LoadResult:
    """The outputs in the order of their requests, and the seconds from the first request to the last answer."""

    outputs: list[RequestFuncOutput]
    duration: float


def arrival_times(number: int, request_rate: float, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """Return when each request is sent, in seconds since the start.

    Gaps follow a gamma distribution of this shape: 1 is a Poisson process, less comes in bursts, more is more even, and
    infinity has equal gaps. They are scaled so that the last request is sent at number / rate, which leaves less noise
    between seeds.
    """
    if request_rate <= 0 or burstiness <= 0:
        raise MinivllmError("request_rate and burstiness must be above 0")
    if math.isinf(request_rate):
        return [0.0] * number
    rng = random.Random(seed)
    gaps = [1.0 if math.isinf(burstiness) else rng.gammavariate(burstiness, 1.0 / burstiness) for _ in range(number)]
    scale = number / request_rate / sum(gaps)
    times, now = [], 0.0
    for gap in gaps:
        now += gap * scale
        times.append(now)
    return times


async def run_load(
    target: Target,
    samples: Sequence[SampleRequest],
    *,
    request_rate: float = math.inf,
    burstiness: float = 1.0,
    max_concurrency: int | None = None,
    seed: int = 0,
    request_id_prefix: str = "",
    on_done: Callable[[RequestFuncOutput], None] | None = None,
) -> LoadResult:
    """Send all requests, and return when all are answered.

    An open load has a `request_rate`, in requests per second. A closed load has none, and `max_concurrency` clients.
    With both, requests come at the rate, and at most so many are under way; how long one waits for its turn is its
    `queue_time`. `on_done` is called after each request.
    """
    turns = asyncio.Semaphore(max_concurrency or max(1, len(samples)))
    start = time.perf_counter()

    async def one(index: int, when: float) -> RequestFuncOutput:
        if (wait := start + when - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        arrived = time.perf_counter()
        async with turns:
            queue_time = time.perf_counter() - arrived
            request_id = f"{request_id_prefix}{index}" if request_id_prefix else None
            output = await send(session, target, samples[index], request_id)
        output.queue_time = queue_time
        if on_done is not None:
            on_done(output)
        return output

    async with new_session(max_concurrency) as session:
        times = arrival_times(len(samples), request_rate, burstiness, seed)
        outputs = await asyncio.gather(*(one(index, when) for index, when in enumerate(times)))
    return LoadResult(outputs, time.perf_counter() - start)
