"""The scheduler's view of a request's grammar. `minivllm.structured_output` compiles grammars.

In vLLM v0.33.0: `vllm/v1/structured_output/backend_types.py` (`StructuredOutputGrammar`).
"""

from typing import Protocol


class StructuredOutputGrammar(Protocol):
    """One request's place in its grammar."""

    @property
    def error(self) -> str | None:
        """Return what has gone wrong, in one line; None while nothing has."""

    def accept_token(self, token_id: int) -> bool:
        """Move on. Return whether the token fits; if not, the grammar is in error."""
        ...

    def validate_tokens(self, token_ids: list[int]) -> list[int]:
        """Return the leading tokens that fit one after another. The place stays the same."""
        ...

    def is_terminated(self) -> bool:
        """Return whether an end-of-sequence token has been accepted."""
        ...


class StructuredOutputRequest(Protocol):
    """A grammar that is being compiled, is compiled, or has failed."""

    @property
    def grammar(self) -> StructuredOutputGrammar:
        """Return the grammar, which must have been compiled without an error."""
        ...

    def is_pending(self) -> bool:
        """Return whether it is still being compiled."""
        ...

    def failure(self) -> str | None:
        """Return why there is no grammar, or None if there is one."""
