"""Turn the core's arrays of log probabilities into entries by token. In vLLM v0.33.0:
`vllm/v1/engine/logprobs.py`.
"""

from collections.abc import Sequence

from tokenizers import Tokenizer

from minivllm.engine.detokenizer import token_bytes
from minivllm.outputs import Logprob


def logprobs_by_token(entry: Sequence[Sequence], tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """Return the log probabilities at one position by token id; the chosen token is first."""
    rows: dict[int, Logprob] = {}
    for token_id, logprob, rank in zip(*entry, strict=True):
        # The chosen token stands first, and again among the most likely ones if it is one of them.
        rows.setdefault(token_id, Logprob(logprob, rank, _decoded(token_id, tokenizer)))
    return rows


def chosen(entry: dict[int, Logprob] | None) -> Logprob:
    """Return the chosen token's log probability, the first entry."""
    assert entry
    return next(iter(entry.values()))


def _decoded(token_id: int, tokenizer: Tokenizer | None) -> str | None:
    """Return a token's text as it would appear in the middle of a text: SentencePiece strips a
    leading space at the start of one.
    """
    if tokenizer is None:
        return None
    return token_bytes(tokenizer, skip_special_tokens=False)[token_id].decode(errors="replace")
