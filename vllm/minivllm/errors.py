"""Exceptions, most of which a user can act on: they say what is wrong and what would be right."""

from collections.abc import Sequence


class MinivllmError(ValueError):
    """Input that cannot work. Scripts print it as one line and exit with code 2, without a traceback."""


class UnsupportedModelError(MinivllmError):
    """The model is not supported: any answer for it would be wrong."""


class NonFiniteLogitsError(MinivllmError):
    """The model produced NaN or infinite logits, which cannot be sampled. `request_ids` names the affected requests."""

    def __init__(self, message: str, request_ids: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.request_ids = tuple(request_ids)


class WorkerDiedError(RuntimeError):
    """A worker process has died, and the engine with it. The message says which rank died and why."""


class EngineDeadError(RuntimeError):
    """The process of the engine core has died; it can serve no more requests."""


class LostPeerError(RuntimeError):
    """Another rank did not join an all-reduce. That rank's failure is the cause; this is how its peers notice."""
