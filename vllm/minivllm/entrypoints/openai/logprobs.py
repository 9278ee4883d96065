"""Convert log probabilities to the formats of the completions and chat APIs.

In vLLM v0.33.0: `_create_completion_logprobs` in `vllm/entrypoints/openai/completion/serving.py`,
`_create_chat_logprobs` in `vllm/entrypoints/openai/chat_completion/serving.py`.
"""

from collections.abc import Sequence
from itertools import accumulate, islice
from typing import Any

from tokenizers import Tokenizer

from minivllm.outputs import Logprob, Logprobs

LEAST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


def completion_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], rows: Logprobs, num_top: int, offset: int, as_ids: bool
) -> dict[str, list[Any]]:
    """Return log probabilities in the completions format: parallel lists.

    Args:
        tokenizer: turns the first token of a prompt into text; the other rows hold their texts.
        token_ids: the tokens.
        rows: for each token, the log probabilities at its position; None for the first one of a
            prompt.
        num_top: how many of the most likely tokens are shown besides the chosen one; -1: all.
        offset: characters before these tokens.
        as_ids: show a token as "token_id:289" rather than as text.
    """
    tokens: list[str] = []
    logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    for token_id, row in zip(token_ids, rows, strict=True):
        own = row[token_id] if row else Logprob(0.0, None, tokenizer.decode([token_id], skip_special_tokens=False))
        tokens.append(_shown(token_id, own, as_ids))
        logprobs.append(row and max(own.logprob, LEAST))  # type: ignore[arg-type]
        # The chosen token stands first in a row, so there is one more.
        top = islice((row or {}).items(), None if num_top < 0 else num_top + 1)
        shown = {_shown(top_id, entry, as_ids): max(entry.logprob, LEAST) for top_id, entry in top}
        top_logprobs.append(row and shown)  # type: ignore[arg-type]
    offsets = [*accumulate(map(len, tokens), initial=offset)][:-1]
    return {"text_offset": offsets, "token_logprobs": logprobs, "tokens": tokens, "top_logprobs": top_logprobs}


def chat_logprobs(token_ids: Sequence[int], rows: Logprobs, num_top: int, as_ids: bool) -> dict[str, Any]:
    """Return log probabilities in the chat format: one entry per token, with its bytes. See
    `completion_logprobs` for the arguments.
    """
    content = []
    for token_id, row in zip(token_ids, rows, strict=True):
        assert row is not None
        own = {"bytes": list((row[token_id].decoded_token or "").encode())}
        top = [_entry(top_id, entry, as_ids) for top_id, entry in islice(row.items(), None if num_top < 0 else num_top)]
        content.append({**_entry(token_id, row[token_id], as_ids), **own, "top_logprobs": top})
    return {"content": content}


def prompt_logprobs(rows: Logprobs | None) -> list[dict[int, Any] | None] | None:
    """Return a prompt's log probabilities by token id, in vLLM's own format."""
    if rows is None:
        return None
    return [row and {token_id: _ranked(entry) for token_id, entry in row.items()} for row in rows]


def _ranked(entry: Logprob) -> dict[str, Any]:
    return {"logprob": max(entry.logprob, LEAST), "rank": entry.rank, "decoded_token": entry.decoded_token}


def _entry(token_id: int, entry: Logprob, as_ids: bool) -> dict[str, Any]:
    token = _shown(token_id, entry, as_ids)
    return {"token": token, "logprob": max(entry.logprob, LEAST), "bytes": list(token.encode())}


def _shown(token_id: int, entry: Logprob, as_ids: bool) -> str:
    return f"token_id:{token_id}" if as_ids else entry.decoded_token or ""
