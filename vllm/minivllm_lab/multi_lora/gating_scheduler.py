"""A scheduler for the engine that leaves the gate of the adapters to a function: `admit` of exercise 12.

    LLM(model, enable_lora=True, max_loras=2, parts=Parts(scheduler=scheduler_that_gates(admit)))

The function says who of those that wait may start; everything else (order, memory, budget) stays the engine's own.
No torch.
"""

from collections.abc import Callable, Sequence

from minivllm.core.request import Request
from minivllm.core.request_queue import RequestQueue
from minivllm.core.scheduler import Scheduler, Step
from minivllm.errors import MinivllmError

Admit = Callable[[Sequence[int], Sequence[int], int, int], Sequence[int]]
"""`admit(running, waiting, max_loras, places)`: adapters by number, 0 for none, to indices of those that wait."""


def adapter_of(request: Request) -> int:
    """The number of a request's adapter, 0 for none."""
    return request.lora_request.lora_int_id if request.lora_request else 0


def scheduler_that_gates(admit: Admit) -> type[Scheduler]:
    """The engine's scheduler with this function as its gate.

    An answer that cannot be carried out raises `MinivllmError` in the engine's step; the message says which.
    """

    class GatingScheduler(Scheduler):
        def _schedule_waiting(self, step: Step, chunk_limit: int, queue: RequestQueue | None = None) -> None:
            asked = list(self.waiting if queue is None else queue)
            running, waiting = [adapter_of(one) for one in self.running], [adapter_of(one) for one in asked]
            places = self.config.max_num_seqs - len(self.running)
            found = admit(running, waiting, self.config.max_loras, places)
            ensure_possible(found, running, waiting, self.config.max_loras, places)
            self._may_start = {asked[index].request_id for index in found}
            super()._schedule_waiting(step, chunk_limit, queue)

        def _is_blocked(self, request: Request, running_loras: set[int]) -> bool:
            return super()._is_blocked(request, set()) or request.request_id not in self._may_start

    return GatingScheduler


def ensure_possible(found: object, running: Sequence[int], waiting: Sequence[int], max_loras: int, places: int) -> None:
    """Whether an engine can carry this answer out.

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
