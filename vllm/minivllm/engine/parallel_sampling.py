"""`n` completions of one prompt are `n` requests. The prefix cache makes them share the prompt's blocks.

In vLLM v0.33.0: `vllm/v1/engine/parallel_sampling.py` (`ParentRequest`).
"""

from dataclasses import replace

from minivllm.core.messages import EngineCoreRequest
from minivllm.outputs import CompletionOutput


class ParentRequest:
    """Gathers the completions of its children, by their index."""

    def __init__(self, request_id: str, n: int) -> None:
        self.request_id = request_id
        self.unfinished = set(range(n))
        self._completions: dict[int, CompletionOutput] = {}

    def observe(self, completion: CompletionOutput) -> None:
        """Takes in the newest state of one child."""
        self._completions[completion.index] = completion
        if completion.finished():
            self.unfinished.discard(completion.index)

    def completions(self) -> list[CompletionOutput]:
        """Those seen so far, in order."""
        return [self._completions[index] for index in sorted(self._completions)]


def child_requests(request: EngineCoreRequest) -> list[EngineCoreRequest]:
    """The requests that a request for `n` completions becomes; itself where n is 1."""
    params = request.sampling_params
    if params.n == 1:
        return [request]
    return [
        replace(request, request_id=f"{index}_{request.request_id}", sampling_params=params.child(index))
        for index in range(params.n)
    ]
