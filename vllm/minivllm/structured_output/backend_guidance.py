"""Grammars that say which tokens may come next, and advance token by token. llguidance does the
parsing.

Its matchers never raise. A matcher that has reached its limits (it bounds its own work at every
step), or has met a token that does not fit, stays in an error state and from then on allows only
the end.

In vLLM v0.33.0: `vllm/v1/structured_output/backend_guidance.py` (`GuidanceBackend`,
`GuidanceGrammar`).
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

MOST_COMPILED = 32
"""Grammars that are kept for later requests with the same text."""


class GuidanceGrammar:
    """An implementation of `minivllm.core.grammar.StructuredOutputGrammar`."""

    def __init__(self, matcher: LLMatcher, eos_token_ids: frozenset[int]) -> None:
        self.matcher = matcher
        self._eos_token_ids = eos_token_ids
        self._terminated = False

    def copy(self) -> "GuidanceGrammar":
        """Return a grammar in the same state, which advances independently."""
        return GuidanceGrammar(self.matcher.deep_copy(), self._eos_token_ids)

    @property
    def error(self) -> str | None:
        """The grammar's error in one line, or None."""
        return " ".join(self.matcher.get_error().split())[:400] if self.matcher.is_error() else None

    def accept_token(self, token_id: int) -> bool:
        """Advance by a token. Return whether it fits; if not, the grammar enters an error state."""
        fits = self.matcher.consume_token(token_id)
        self._terminated = fits and token_id in self._eos_token_ids
        return fits

    def validate_tokens(self, token_ids: list[int]) -> list[int]:
        """Return the longest prefix of these tokens that fits. The grammar does not advance."""
        return token_ids[: self.matcher.validate_tokens(token_ids)]

    def is_terminated(self) -> bool:
        """Return whether an end-of-sequence token has been accepted."""
        return self._terminated


class GuidanceBackend:
    """A compiler of grammars for one vocabulary, which also fills their bitmasks."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=list(eos_token_ids) or None)
        self._eos_token_ids = frozenset(self._tokenizer.eos_tokens)
        self._executor = LLExecutor()
        self.compile_grammar = lru_cache(MOST_COMPILED)(self._compile_grammar)
        """Compile a grammar, or return one that was compiled lately. The caller must not advance
        it.
        """

    def _compile_grammar(self, text: str) -> GuidanceGrammar:
        """Return a grammar in its initial state, or in an error state if the text cannot be
        compiled.
        """
        limits = LLParserLimits(verbose_errors=False)  # the defaults bound the work of each step
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=limits)
        return GuidanceGrammar(matcher, self._eos_token_ids)

    def fill_bitmask(self, bitmask: np.ndarray, rows: Sequence[tuple[GuidanceGrammar, int, list[int]]]) -> None:
        """Fill rows of bitmask [rows, ceil(vocab / 32)], int32: bit i of word w is token 32 w + i.

        `rows` holds, for each grammar, its first row and the drafts after each of which another
        row is filled. The rows after a draft that does not fit, or that ends the text, are left
        unchanged. The grammars do not advance.
        """
        plain = [(grammar.matcher, row) for grammar, row, drafts in rows if not drafts]
        drafted = [(grammar.matcher, row, drafts) for grammar, row, drafts in rows if drafts]
        # The library writes to the array's memory directly, in its own threads.
        where: tuple[Any, ...] = (bitmask.ctypes.data, bitmask.strides[0], len(bitmask))
        if plain:
            self._executor.unsafe_compute_mask_ptr(plain, *where)
        if drafted:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *where)
