"""A scheduling policy that leaves the gate of the adapters to a function: `admit` of exercise 12.

    LLM(model, enable_lora=True, max_loras=2, parts=Parts(policy=learner_policy(admit)))

The function says who of those that wait may start; everything else (order, memory, budget) stays the engine's own.
No torch.
"""

from collections.abc import Callable, Sequence

from minivllm.core.policy import SchedulingPolicy
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler
from minivllm.core.step import Step
from minivllm.errors import MinivllmError

Admit = Callable[[Sequence[int], Sequence[int], int, int], Sequence[int]]
"""`admit(running, waiting, max_loras, places)`: adapters by number, 0 for none, to indices of those that wait."""


def adapter_of(request: Request) -> int:
    """The number of a request's adapter, 0 for none."""
    return request.lora_request.lora_int_id if request.lora_request else 0


def learner_policy(admit: Admit) -> SchedulingPolicy:
    """Return the policy with this function as its gate.

    An answer that cannot be carried out raises `MinivllmError` in the engine's step; the message says which.
    """
    may_start: set[str] = set()

    def schedule(scheduler: Scheduler, step: Step) -> None:
        scheduler.schedule_running(step)
        if step.preempted_req_ids or not scheduler.waiting:
            return
        waiting = list(scheduler.waiting)
        chosen = _ask(admit, scheduler, waiting)
        may_start.clear()
        may_start.update(waiting[index].request_id for index in chosen)
        scheduler.schedule_waiting(step)

    return SchedulingPolicy(schedule=schedule, may_admit=lambda request, *_: request.request_id in may_start)


def _ask(admit: Admit, scheduler: Scheduler, requests: Sequence[Request]) -> Sequence[int]:
    running, waiting = [adapter_of(one) for one in scheduler.running], [adapter_of(one) for one in requests]
    max_loras, places = scheduler.config.max_loras, scheduler.config.max_num_seqs - len(running)
    chosen = admit(running, waiting, max_loras, places)
    ensure_possible(chosen, running, waiting, max_loras, places)
    return chosen


def ensure_possible(found: object, running: Sequence[int], waiting: Sequence[int], max_loras: int, places: int) -> None:
    """Check that an engine can carry this answer out.

    Raises:
        MinivllmError: it is no list of indices, or there are not so many places or slots.
    """
    if not isinstance(found, list) or not all(isinstance(one, int) and 0 <= one < len(waiting) for one in found):
        raise MinivllmError(f"your admit says {found!r}, and indices into the {len(waiting)} that wait are possible")
    if len(set(found)) < len(found) or len(found) > places:
        raise MinivllmError(f"your admit says {found!r}, and there are places for {places} different requests")
    active = {*running, *(waiting[index] for index in found)} - {0}
    if len(active) > max_loras:
        raise MinivllmError(f"your admit lets {len(active)} different adapters run, and there are {max_loras} slots")
