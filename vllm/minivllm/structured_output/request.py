"""A request's grammar, from its arrival on.

In vLLM v0.33.0: `vllm/v1/structured_output/request.py` (`StructuredOutputRequest`).
"""

import time
from collections.abc import Callable
from concurrent.futures import Future

from minivllm.structured_output.backend_guidance import GuidanceGrammar

SECONDS_TO_COMPILE = 60.0
"""From the request's arrival on. The library bounds its own work to about a second; this bounds the whole wait."""


class StructuredOutputRequest:
    """Implements `minivllm.core.grammar.StructuredOutputRequest` with a future of the grammar."""

    def __init__(self, future: Future[GuidanceGrammar], clock: Callable[[], float] = time.monotonic) -> None:
        self.future = future
        self._clock, self._deadline = clock, clock() + SECONDS_TO_COMPILE

    @property
    def grammar(self) -> GuidanceGrammar:
        """See `core.grammar`."""
        return self.future.result(timeout=0)

    def is_pending(self) -> bool:
        """See `core.grammar`. It is over after `SECONDS_TO_COMPILE`, too."""
        return not self.future.done() and self._clock() < self._deadline

    def failure(self) -> str | None:
        """See `core.grammar`."""
        if not self.future.done():
            self.future.cancel()
            return f"the grammar was not compiled within {SECONDS_TO_COMPILE:.0f} s"
        raised = self.future.exception()
        if raised is not None:
            return f"the grammar could not be compiled: {type(raised).__name__}: {raised}"
        return self.grammar.error
