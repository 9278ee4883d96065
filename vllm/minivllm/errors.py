"""The errors that a person can act on: what is wrong, and what would be right."""

from collections.abc import Sequence


class MinivllmError(ValueError):
    """Input that cannot work. Scripts print it as one line and exit with code 2, without a traceback."""


class UnsupportedModelError(MinivllmError):
    """A model for which an answer would be wrong, so none is given."""


class NonFiniteLogitsError(MinivllmError):
    """The model computed NaN or infinity, from which no token can be chosen. `request_ids` says for whom."""

    def __init__(self, message: str, request_ids: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.request_ids = tuple(request_ids)


class WorkerDiedError(RuntimeError):
    """A process that computed a part of the model has ended, and the engine with it. The message says which and why."""


class EngineDeadError(RuntimeError):
    """The process of the engine's core has ended; no request can be served by it any more."""


class LostPeerError(RuntimeError):
    """Another rank did not come to a sum. What became of that one is the error; this is what the others notice."""
