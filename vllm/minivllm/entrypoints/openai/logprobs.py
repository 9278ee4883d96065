"""Convert log probabilities to the formats of the completions and chat APIs.

In vLLM v0.33.0: `_create_completion_logprobs` in `vllm/entrypoints/openai/completion/serving.py`,
`_create_chat_logprobs` in `vllm/entrypoints/openai/chat_completion/serving.py`.
"""

from collections.abc import Sequence
from itertools import islice

from tokenizers import Tokenizer

from minivllm.entrypoints.openai.protocol import (
    ChatCompletionLogProb,
    ChatCompletionLogProbs,
    ChatCompletionLogProbsContent,
    CompletionLogProbs,
    PromptLogprob,
)
from minivllm.outputs import Logprob, Logprobs

LEAST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


def completion_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], rows: Logprobs, most: int, offset: int, as_ids: bool
) -> CompletionLogProbs:
    """Return log probabilities in the completions format: parallel lists.

    Args:
        tokenizer: turns the first token of a prompt into text; the other rows hold their texts.
        token_ids: the tokens.
        rows: for each token, the log probabilities at its position; None for the first one of a
            prompt.
        most: how many of the most likely tokens are shown besides the chosen one; -1: all.
        offset: characters before these tokens.
        as_ids: show a token as "token_id:289" rather than as text.
    """
    lists = CompletionLogProbs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
    for token_id, row in zip(token_ids, rows, strict=True):
        chosen = row[token_id] if row else Logprob(0.0, None, tokenizer.decode([token_id], skip_special_tokens=False))
        token = _shown(token_id, chosen, as_ids)
        lists.tokens.append(token)
        lists.text_offset.append(offset)
        offset += len(token)
        lists.token_logprobs.append(max(chosen.logprob, LEAST) if row else None)
        if row is None:
            lists.top_logprobs.append(None)
            continue
        # The chosen token stands first in a row, so there is one more.
        top = row.items() if most < 0 else islice(row.items(), most + 1)
        lists.top_logprobs.append({_shown(top_id, entry, as_ids): max(entry.logprob, LEAST) for top_id, entry in top})
    return lists


def chat_logprobs(token_ids: Sequence[int], rows: Logprobs, most: int, as_ids: bool) -> ChatCompletionLogProbs:
    """Return log probabilities in the chat format: one entry per token, with its bytes. See
    `completion_logprobs` for the arguments.
    """
    content = []
    for token_id, row in zip(token_ids, rows, strict=True):
        assert row is not None
        top = row.items() if most < 0 else islice(row.items(), most)
        content.append(
            ChatCompletionLogProbsContent(
                **_entry(token_id, row[token_id], as_ids).__dict__,
                top_logprobs=[_entry(top_id, entry, as_ids) for top_id, entry in top],
            )
        )
    return ChatCompletionLogProbs(content=content)


def prompt_logprobs(rows: Logprobs | None) -> list[dict[int, PromptLogprob] | None] | None:
    """Return a prompt's log probabilities by token id, in vLLM's own format."""
    if rows is None:
        return None
    return [None if row is None else {token_id: _finite(entry) for token_id, entry in row.items()} for row in rows]


def _finite(entry: Logprob) -> PromptLogprob:
    return PromptLogprob(logprob=max(entry.logprob, LEAST), rank=entry.rank, decoded_token=entry.decoded_token)


def _entry(token_id: int, entry: Logprob, as_ids: bool) -> ChatCompletionLogProb:
    token = _shown(token_id, entry, as_ids)
    return ChatCompletionLogProb(token=token, logprob=max(entry.logprob, LEAST), bytes=list(token.encode()))


def _shown(token_id: int, entry: Logprob, as_ids: bool) -> str:
    return f"token_id:{token_id}" if as_ids else entry.decoded_token or ""
