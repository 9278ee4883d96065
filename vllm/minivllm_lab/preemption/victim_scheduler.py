"""A scheduler for the engine that leaves the choice of the victim to a function: the learner's `victim` of exercise 11.

    LLM(model, parts=Parts(scheduler=scheduler_with_victims(victim)))

The function says who of those who run loses its blocks; everything else stays the engine's own. No torch.
"""

from collections.abc import Callable
from dataclasses import dataclass

from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler
from minivllm.errors import MinivllmError


@dataclass(frozen=True)
class RunningRequest:
    """What the function sees of a request."""

    request_id: str
    priority: int
    """Less goes first."""
    arrival_time: float
    num_tokens: int
    """Of the prompt and of the answer so far."""
    num_computed_tokens: int
    num_blocks: int


Victim = Callable[[list[RunningRequest], str], RunningRequest]
"""`victim(running, policy)`: the victim, one of `running` (in order of admission); `policy` is "fcfs" or "priority"."""


def scheduler_with_victims(victim: Victim, base: type[Scheduler] = Scheduler) -> type[Scheduler]:
    """The engine's scheduler, or one derived from it, with `victim` choosing the victims.

    An answer that is none of those who run raises `MinivllmError` in the engine's step.
    """

    class VictimsScheduler(base):
        def _choose_victim(self) -> Request:
            held = self.kv_cache_manager.req_to_blocks
            running = [
                RunningRequest(
                    one.request_id, one.priority, one.arrival_time, one.num_tokens, one.num_computed_tokens,
                    len(held.get(one.request_id, ())),
                )
                for one in self.running
            ]  # fmt: skip
            chosen = victim(list(running), self.config.policy)
            for request, seen in zip(self.running, running, strict=True):
                if seen is chosen:
                    return request
            names = ", ".join(one.request_id for one in running)
            raise MinivllmError(f"your victim says {chosen!r}, and those who run are {names}"[:300])

    return VictimsScheduler
