"""`n` completions of one prompt are `n` requests, which share the prompt's blocks through the
prefix cache.

In vLLM v0.33.0: `vllm/v1/engine/parallel_sampling.py` (`ParentRequest`).
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from minivllm.core.engine_messages import EngineCoreRequest
from minivllm.outputs import CompletionOutput


class ParentRequest:
    """Collects the completions of its children by index. `request_id` is the user's id, not the
    core's.
    """

    def __init__(self, request_id: str, n: int) -> None:
        self.request_id = request_id
        self.n = n
        self.unfinished = set(range(n))
        # Two sets: an output may be observed after its request was counted as ended.
        self._running = set(range(n))
        self._completions: dict[int, CompletionOutput] = {}
        self.kv_transfer_params: dict[str, Any] | None = None
        """What the KV connector has told at the end of the completion that it was told of."""

    def observe(self, completion: CompletionOutput) -> None:
        """Record the latest state of one child."""
        self._completions[completion.index] = completion
        if completion.finished():
            self.unfinished.discard(completion.index)

    def end(self, index: int) -> int | None:
        """Record that a child has ended. Return the number of children when it was the last one,
        before that None.
        """
        self._running.discard(index)
        return None if self._running else self.n

    def completions(self) -> list[CompletionOutput]:
        """Return the completions so far, ordered by index."""
        return [self._completions[index] for index in sorted(self._completions)]


def child_requests(request: EngineCoreRequest) -> Iterator[EngineCoreRequest]:
    """Split a request for `n` completions into `n` requests; yield the request itself if n is 1.

    The KV connector learns of the first one only: a transfer is read once, and the others share the
    first one's blocks or compute their own.
    """
    params = request.sampling_params
    if params.n == 1:
        yield request
        return
    for index in range(params.n):
        yield replace(
            request,
            request_id=f"{index}_{request.request_id}",
            sampling_params=params.child(index),
            kv_transfer_params=request.kv_transfer_params if index == 0 else None,
        )
