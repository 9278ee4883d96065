"""A scheduling policy that lets a function, `admit` of exercise 12, decide which adapters may join.

    LLM(model, enable_lora=True, max_loras=2, parts=Parts(policy=learner_policy(admit)))

The function picks the waiting requests that may start; order, memory and budget stay the engine's
own. This module does not import torch.
"""

from collections.abc import Callable, Sequence

from minivllm.core.policy import SchedulingPolicy
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler
from minivllm.core.step import Step
from minivllm.errors import MinivllmError

Admit = Callable[[Sequence[int], Sequence[int], int, int], Sequence[int]]
"""`admit(running, waiting, max_loras, seats)` gets adapters, 0 for none, and returns indices of
waiting requests.
"""


def adapter_of(request: Request) -> int:
    """Return the number of a request's adapter, 0 for none."""
    return request.lora_request.lora_int_id if request.lora_request else 0


def learner_policy(admit: Admit) -> SchedulingPolicy:
    """Return a policy that uses `admit` as its gate.

    If the engine cannot carry out what `admit` returns, its step raises a `MinivllmError` that
    shows the result.
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
    running, waiting = (list(map(adapter_of, queue)) for queue in (scheduler.running, requests))
    max_loras, seats = scheduler.config.max_loras, scheduler.config.max_num_seqs - len(running)
    chosen = admit(running, waiting, max_loras, seats)
    ensure_possible(chosen, running, waiting, max_loras, seats)
    return chosen


def ensure_possible(
    admitted: object, running: Sequence[int], waiting: Sequence[int], max_loras: int, seats: int
) -> None:
    """Check that the engine can carry out this result of `admit`.

    Raises:
        MinivllmError: it is not a list of indices, or there are not enough seats or slots.
    """
    said, count = f"your admit returns {admitted!r}", len(waiting)
    if not isinstance(admitted, list) or not all(isinstance(each, int) and 0 <= each < count for each in admitted):
        raise MinivllmError(f"{said}; it must return a list of indices into the {count} waiting requests")
    if len(set(admitted)) < len(admitted) or len(admitted) > seats:
        raise MinivllmError(f"{said}, but there are seats for {seats} different requests")
    active = {*running, *(waiting[index] for index in admitted)} - {0}
    if len(active) > max_loras:
        raise MinivllmError(f"your admit lets {len(active)} different adapters run, but there are {max_loras} slots")
