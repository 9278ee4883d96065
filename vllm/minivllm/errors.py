"""Exceptions, most of which a user can act on: they say what is wrong and what would be right."""

from collections.abc import Sequence

LONGEST = 1000
"""Characters of an error's message, beyond which its middle is left out."""


class MinivllmError(ValueError):
    """Input that cannot work. Scripts print it as one line and exit with code 2, without a
    traceback.

    The message becomes one line even if it quotes a value, such as an array, that takes many.
    `parameter` is the field of a request that is wrong, where it is exactly one; a server tells its
    client.
    """

    def __init__(self, message: str = "", parameter: str | None = None) -> None:
        super().__init__(one_line(message))
        self.parameter = parameter


class UnsupportedModelError(MinivllmError):
    """The model is not supported: any answer for it would be wrong."""


class NonFiniteLogitsError(MinivllmError):
    """The model computed NaN or infinity for these requests, so no token can be chosen for them."""

    def __init__(self, request_ids: Sequence[str]) -> None:
        self.request_ids = tuple(request_ids)
        shown = ", ".join(self.request_ids[:5]) + (", ..." if len(self.request_ids) > 5 else "")
        super().__init__(
            f"the model computed NaN or infinite logits for {len(self.request_ids)} requests ({shown}): "
            "check its weights, or try dtype='float32'"
        )


class AdapterError(MinivllmError):
    """A LoRA adapter that was served cannot be read any more: its folder has changed. Its
    requests end.
    """

    def __init__(self, message: str = "", lora_int_id: int = 0) -> None:
        super().__init__(message)
        self.lora_int_id = lora_int_id


class WorkerFailedError(RuntimeError):
    """A call has failed on a rank, which lives on. The message says which rank and why; a note
    holds its traceback.
    """


class WorkerDiedError(RuntimeError):
    """A worker process has died, and the engine with it. The message says which rank died and
    why.
    """


class EngineDeadError(RuntimeError):
    """The process of the engine core has died; it can serve no more requests."""


class EngineStoppedError(EngineDeadError):
    """The engine was told to end while requests were under way."""


class LostPeerError(RuntimeError):
    """Another rank has left an all-reduce or a broadcast. Its failure is the cause; this is how
    its peers notice.
    """


def one_line(message: str) -> str:
    """Return the message with its lines joined by spaces, and without the middle of one that is
    very long.
    """
    lines = message.splitlines()
    line = message if len(lines) < 2 else " ".join(stripped for text in lines if (stripped := text.strip()))
    half = LONGEST // 2
    return line if len(line) <= LONGEST else f"{line[:half]} ... {line[-half:]}"
