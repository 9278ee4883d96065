"""Manage the grammars of an engine core: compile them in the background, and determine once per
step which tokens fit.

Nothing is loaded before the first request with a constraint: neither the library nor the tokenizer.

In vLLM v0.33.0: `vllm/v1/structured_output/__init__.py` (`StructuredOutputManager`).
"""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TYPE_CHECKING

import numpy as np

from minivllm.config import StructuredOutputsParams
from minivllm.core.grammar import StructuredOutputGrammar, StructuredOutputRequest
from minivllm.core.request import Request, RequestStatus
from minivllm.core.scheduler_output import GrammarOutput, SchedulerOutput
from minivllm.structured_output.grammar_text import DeepThreads, grammar_text

if TYPE_CHECKING:
    from minivllm.structured_output.backend_guidance import GuidanceBackend


class StructuredOutputManager:
    """The grammars of a core: it compiles them in threads, and fills the bitmask of a step."""

    def __init__(self, vocab_size: int, load_tokenizer: Callable[[], tuple[str, Sequence[int]]]) -> None:
        """Take a vocabulary size; `load_tokenizer` is called once, in a thread, and returns a
        `tokenizer.json` and the end-of-sequence ids.
        """
        self._vocab_size = vocab_size
        self._load_tokenizer = load_tokenizer
        self._backend: GuidanceBackend | None = None
        self._threads: DeepThreads | None = None
        self._pending: set[Future[StructuredOutputGrammar]] = set()
        self._lock = threading.Lock()

    def grammar_init(self, request: Request, params: StructuredOutputsParams) -> None:
        """Start compiling a request's grammar; the request waits for it."""
        if self._threads is None:
            self._threads = DeepThreads(max(1, min(4, (os.cpu_count() or 1) // 2)))
        future = self._threads.submit(self._compile, params)
        self._pending.add(future)
        request.structured_output_request = StructuredOutputRequest(future)
        request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR

    def wait_for_one(self, seconds: float) -> None:
        """Wait up to `seconds` until a grammar has been compiled. Return at once if none is being
        compiled.
        """
        self._pending = {future for future in self._pending if not future.done()}
        if self._pending:
            wait(self._pending, seconds, FIRST_COMPLETED)

    def grammar_bitmask(self, requests: Mapping[str, Request], output: SchedulerOutput) -> GrammarOutput:
        """Return the bitmask of allowed tokens for the step's requests that sample by a grammar."""
        req_ids = []
        rows = []
        num_rows = 0
        for req_id in output.num_scheduled_tokens:
            request = requests[req_id]
            if not request.samples_by_grammar:
                continue
            drafts = output.scheduled_spec_decode_tokens.get(req_id, [])
            assert request.structured_output_request is not None
            req_ids.append(req_id)
            rows.append((request.structured_output_request.grammar, num_rows, drafts))
            num_rows += 1 + len(drafts)  # a row after the last known token, and after each draft
        # All tokens fit, until a row is filled.
        bitmask = np.full((num_rows, -(-self._vocab_size // 32)), -1, np.int32)
        assert self._backend is not None
        self._backend.fill_bitmask(bitmask, rows)
        return GrammarOutput(req_ids, bitmask)

    def _compile(self, params: StructuredOutputsParams) -> StructuredOutputGrammar:
        text = grammar_text(params)
        with self._lock:
            if self._backend is None:
                self._backend = self._make_backend()
        # A copy, because the cached grammar must stay at its beginning.
        return self._backend.compile_grammar(text).copy()

    def _make_backend(self) -> "GuidanceBackend":
        from minivllm.structured_output.backend_guidance import GuidanceBackend

        tokenizer_json, eos_token_ids = self._load_tokenizer()
        return GuidanceBackend(tokenizer_json, self._vocab_size, eos_token_ids)
