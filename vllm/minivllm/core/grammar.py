"""The scheduler's view of a request's grammar. `minivllm.structured_output` compiles grammars.

In vLLM v0.33.0: `vllm/v1/structured_output/backend_types.py` (`StructuredOutputGrammar`),
`vllm/v1/structured_output/request.py` (`StructuredOutputRequest`).
"""

from concurrent.futures import Future
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


class StructuredOutputRequest:
    """A request's grammar: being compiled since the request arrived, compiled, or failed to
    compile. The library that compiles it bounds its own work to about a second.
    """

    def __init__(self, future: Future[StructuredOutputGrammar]) -> None:
        self.future = future

    @property
    def grammar(self) -> StructuredOutputGrammar:
        """The grammar, which must have been compiled without an error."""
        return self.future.result(timeout=0)

    def is_pending(self) -> bool:
        """Return whether the grammar is still being compiled."""
        return not self.future.done()

    def failure(self) -> str | None:
        """Return why there is no grammar, once it is not pending; None if there is one."""
        raised = self.future.exception()
        if raised is not None:
            return f"the grammar could not be compiled: {type(raised).__name__}: {raised}"
        return self.grammar.error
