"""A batch in equilibrium, where as many requests join in a step as leave: the rate that it serves, and
how many requests are present at a rate. It averages what the scheduler does.

    steady = Steady(cost, prompt=1024, output=128, most=64)
    steady.capacity()          # requests a second
    steady.batch(rate=3.0)     # requests present, by Little's law
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from minivllm_simulate.cost_model import Cost, StepShape

Prefill = Literal["whole", "spread", "elsewhere"]
"""Prompts are computed each in one step, or in chunks that fill all steps alike, or by other GPUs."""
GRID = 64
"""Batch sizes that are looked at for the best one."""


@dataclass(frozen=True)
class Steady:
    """Requests with these mean lengths on one GPU, or on one group of GPUs.

    A request stays for `output` steps. So of `batch` requests, batch / output end in a step, as
    many join, and the prompts of those are computed.
    """

    cost: Cost
    prompt: float
    output: float
    most: float
    """Requests at once; see `within`."""
    prefill: Prefill = "whole"

    @classmethod
    def within(
        cls, cost: Cost, prompt: float, output: float, *, seats: float, kv_tokens: float = math.inf,
        budget: float = math.inf, prefill: Prefill = "whole",
    ) -> Steady:  # fmt: skip
        """Return the batch that these limits allow: seats, tokens in the cache, tokens of a step."""
        room = min(seats, kv_tokens / (prompt + output), budget / (1 + prompt / output))
        return cls(cost, prompt, output, max(1.0, room), prefill)

    def step_seconds(self, batch: float) -> float:
        """Return the mean seconds of a step with `batch` requests.

        Of whole prompts, some steps have one or more, others have none (Poisson).
        """
        joining = batch / self.output
        none = math.exp(-joining)
        if self.prefill == "elsewhere" or none == 1:
            return self._seconds(batch, 0)
        if self.prefill == "spread":
            return self._seconds(batch, joining * self.prompt)
        return none * self._seconds(batch, 0) + (1 - none) * self._seconds(batch, joining / (1 - none) * self.prompt)

    def _seconds(self, batch: float, prefill: float) -> float:
        keys = batch * (self.prompt + self.output / 2) + prefill
        pairs = batch * (self.prompt + self.output / 2) + prefill * self.prompt / 2
        counts = (round(count) for count in (batch, batch + prefill, keys, pairs))
        return self.cost.seconds(StepShape(*counts))

    def rate(self, batch: float) -> float:
        """Return the requests per second that a batch of this size serves."""
        return batch / (self.output * self.step_seconds(batch))

    def capacity(self, most_seconds: float = math.inf) -> float:
        """Return the maximum requests per second that it sustains in steps of at most
        `most_seconds`, 0 if no step is that short; above that, the queue grows without bound.
        """
        short = (batch for batch in self._batches() if self.step_seconds(batch) <= most_seconds)
        return max(map(self.rate, short), default=0.0)

    def batch(self, rate: float) -> float:
        """Return the number of requests present at this rate, by Little's law, or `most` if the
        rate is too high.
        """
        batches = self._batches()
        enough = next((index for index, batch in enumerate(batches) if self.rate(batch) > rate), None)
        if enough is None:
            return self.most
        low, high = [0.0, *batches][enough], batches[enough]
        for _ in range(16):
            middle = (low + high) / 2
            low, high = (middle, high) if self.rate(middle) < rate else (low, middle)
        return high

    def _batches(self) -> list[float]:
        """Return batch sizes up to the largest, which need not be the fastest, since a step too
        large for a CUDA graph is slower.

        Where prompts join, a size is a mean. A batch that only decodes is the same in each step,
        so it is a whole number.
        """
        if self.prefill == "elsewhere":
            return [float(batch) for batch in range(1, max(1, int(self.most)) + 1)]
        return [self.most * share / GRID for share in range(1, GRID + 1)]
