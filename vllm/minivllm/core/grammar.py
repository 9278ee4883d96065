"""The scheduler's view of a request's grammar. `minivllm.structured_output` compiles grammars.

In vLLM v0.33.0: `vllm/v1/structured_output/backend_types.py` (`StructuredOutputGrammar`).
"""

from typing import Protocol


class StructuredOutputGrammar(Protocol):
    """The state of one request within its grammar."""

    @property
    def error(self) -> str | None:
        """The error message, in one line; None if there has been no error."""

    def accept_token(self, token_id: int) -> bool:
        """Advance by one token. Return whether it fits; if not, the grammar is in error."""
        ...

    def validate_tokens(self, token_ids: list[int]) -> list[int]:
        """Return the longest prefix of these tokens that fits the grammar, without advancing it."""
        ...

    def is_terminated(self) -> bool:
        """Return whether an end-of-sequence token has been accepted."""
        ...


class StructuredOutputRequest(Protocol):
    """A grammar that is being compiled, is compiled, or has failed to compile."""

    @property
    def grammar(self) -> StructuredOutputGrammar:
        """Return the grammar, which must have been compiled without an error."""
        ...

    def is_pending(self) -> bool:
        """Return whether the grammar is still being compiled."""
        ...

    def failure(self) -> str | None:
        """Return why there is no grammar, or None if there is one."""
