"""Turn the core's arrays of log probabilities into entries by token. In vLLM v0.33.0:
`vllm/v1/engine/logprobs.py`.
"""

from collections.abc import Sequence

from tokenizers import Tokenizer

from minivllm.engine.detokenizer import BROKEN, MAX_CHARACTER_BYTES, token_bytes
from minivllm.outputs import Logprob, Logprobs


def logprobs_by_token(
    entry: Sequence[Sequence], tokenizer: Tokenizer | None, before: Logprobs | None = None
) -> dict[int, Logprob]:
    """Return the log probabilities at one position by token id; the chosen token is first.
    `before`: those at the positions before, whose chosen tokens may have begun a character.
    """
    context = [next(iter(row)) for row in (before or [])[-MAX_CHARACTER_BYTES:] if row]
    rows: dict[int, Logprob] = {}
    for token_id, logprob, rank in zip(*entry, strict=True):
        # The chosen token stands first, and again among the most likely ones if it is one of them.
        rows.setdefault(token_id, Logprob(logprob, rank, _decoded(token_id, tokenizer, context)))
    return rows


def chosen(entry: dict[int, Logprob] | None) -> Logprob:
    """Return the chosen token's log probability, the first entry."""
    assert entry
    return next(iter(entry.values()))


def _decoded(token_id: int, tokenizer: Tokenizer | None, context: Sequence[int]) -> str | None:
    """Return a token's text as it would appear in the middle of a text: SentencePiece strips a
    leading space at the start of one.

    A token that ends a character gets all of it, and those that begin it are empty. `context`: the
    tokens before it.
    """
    if tokenizer is None:
        return None
    bytes_of = token_bytes(tokenizer, skip_special_tokens=False)
    text = _text(bytes_of[token_id])
    if not text.endswith(BROKEN):
        return text
    for start in range(len(context) - 1, -1, -1):
        text = _text(b"".join(bytes_of[token] for token in (*context[start:], token_id)))
        if not text.endswith(BROKEN):
            shown = list(context[start:])
            while shown and _text(bytes_of[shown[-1]]).endswith(BROKEN):
                shown.pop()
            return text[len(_text(b"".join(map(bytes_of.__getitem__, shown)))) :]
    return ""


def _text(data: bytes) -> str:
    return data.decode(errors="replace")
