"""Messages on the socket between the engine's process and a rank. They are pickled, since both
sides run the same code.
"""

import traceback
from dataclasses import dataclass
from typing import Any

from minivllm.errors import LostPeerError, MinivllmError
from minivllm.platforms.out_of_memory import explain_out_of_memory

RESET = "reset"
"""The call that a rank accepts after a failure: it must leave nothing of the calls before it."""


@dataclass(frozen=True)
class Call:
    """A call of `method(*arguments)` on every rank. Only the rank `replies` sends its result (None:
    all ranks do), and any rank that fails sends its failure.
    """

    number: int
    method: str
    arguments: tuple[Any, ...]
    replies: int | None


@dataclass(frozen=True)
class Failure:
    """An exception on a rank. `refusal` is the equivalent error that the user can act on, if any;
    `lost_peer` means that another rank caused it.
    """

    text: str
    traceback: str = ""
    refusal: MinivllmError | None = None
    lost_peer: bool = False

    @classmethod
    def of(cls, error: Exception) -> "Failure":
        """Describe the exception that is being handled."""
        refusal = error if isinstance(error, MinivllmError) else explain_out_of_memory(error)
        text = f"{type(error).__name__}: {error}"
        return cls(text, traceback.format_exc(), refusal, isinstance(error, LostPeerError))

    def error(self, otherwise: Exception) -> Exception:
        """Return the refusal, if there is one, else the given error with the traceback as a
        note.
        """
        if self.refusal is not None:
            return self.refusal
        otherwise.add_note(self.traceback)
        return otherwise


@dataclass(frozen=True)
class Reply:
    """The result of a call, or the failure that prevented it."""

    number: int
    value: Any = None
    failure: Failure | None = None
