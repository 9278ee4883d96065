"""Exceptions, most of which a user can act on: their messages say what is wrong and what would be
right.
"""

from collections.abc import Sequence

LONGEST = 1000
"""Characters of an error's message, beyond which its middle is left out."""


class MinivllmError(ValueError):
    """Raised for input that cannot work. Scripts print it as one line and exit with code 2, without
    a traceback.

    The message becomes one line even if it quotes a multi-line value, such as an array. `parameter`
    is the field of a request that is wrong, if it is exactly one; a server passes it on to its
    client.
    """

    def __init__(self, message: str = "", parameter: str | None = None) -> None:
        super().__init__(one_line(message))
        self.parameter = parameter


class UnsupportedModelError(MinivllmError):
    """Raised when a model is not supported: any answer for it would be wrong."""


class NonFiniteLogitsError(MinivllmError):
    """Raised when the model computed NaN or infinity for these requests, so that no token can be
    chosen for them.
    """

    def __init__(self, request_ids: Sequence[str]) -> None:
        self.request_ids = tuple(request_ids)
        shown = ", ".join(self.request_ids[:5]) + (", ..." if len(self.request_ids) > 5 else "")
        super().__init__(
            f"the model computed NaN or infinite logits for {len(self.request_ids)} requests ({shown}): "
            "check its weights, or try dtype='float32'"
        )


class AdapterError(MinivllmError):
    """Raised when a LoRA adapter that was being served can no longer be read, because its folder
    has changed. Its requests end.
    """

    def __init__(self, message: str = "", lora_int_id: int = 0) -> None:
        super().__init__(message)
        self.lora_int_id = lora_int_id


class WorkerFailedError(RuntimeError):
    """Raised when a call has failed on a rank that survives. The message says which rank and why; a
    note holds the rank's traceback.
    """


class WorkerDiedError(RuntimeError):
    """Raised when a worker process has died, and the engine with it. The message says which rank
    died and why.
    """


class EngineDeadError(RuntimeError):
    """Raised when the engine core's process has died, so that it can serve no more requests."""


class EngineStoppedError(EngineDeadError):
    """Raised when the engine was told to end while requests were in progress."""


class LostPeerError(RuntimeError):
    """Raised when another rank has left an all-reduce or a broadcast. The cause is that rank's own
    failure; this is how its peers notice.
    """


def one_line(message: str) -> str:
    """Return the message with its lines joined by spaces, and with the middle cut out if it is very
    long.
    """
    lines = message.splitlines()
    line = message if len(lines) < 2 else " ".join(stripped for text in lines if (stripped := text.strip()))
    half = LONGEST // 2
    return line if len(line) <= LONGEST else f"{line[:half]} ... {line[-half:]}"
