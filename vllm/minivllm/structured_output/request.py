"""A request's grammar, compiled from the moment the request arrives.

In vLLM v0.33.0: `vllm/v1/structured_output/request.py` (`StructuredOutputRequest`).
"""

import time
from collections.abc import Callable
from concurrent.futures import Future

from minivllm.structured_output.backend_guidance import GuidanceGrammar

# Counted from the request's arrival. The library bounds its own work to about a second; this bounds
# the whole wait.
SECONDS_TO_COMPILE = 60.0


class StructuredOutputRequest:
    """An implementation of `minivllm.core.grammar.StructuredOutputRequest` with a future of the
    grammar.
    """

    def __init__(self, future: Future[GuidanceGrammar], clock: Callable[[], float] = time.monotonic) -> None:
        self.future = future
        self._clock = clock
        self._deadline = clock() + SECONDS_TO_COMPILE

    @property
    def grammar(self) -> GuidanceGrammar:
        """The compiled grammar."""
        return self.future.result(timeout=0)

    def is_pending(self) -> bool:
        """Return whether the grammar is still being compiled and `SECONDS_TO_COMPILE` have not
        passed.
        """
        return not self.future.done() and self._clock() < self._deadline

    def failure(self) -> str | None:
        """Return why there is no grammar, or None."""
        if not self.future.done():
            self.future.cancel()
            return f"the grammar was not compiled within {SECONDS_TO_COMPILE:.0f} s"
        raised = self.future.exception()
        if raised is not None:
            return f"the grammar could not be compiled: {type(raised).__name__}: {raised}"
        return self.grammar.error
