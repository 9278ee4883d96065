"""Verifying drafts: `rejection_sample` says which are accepted, and what comes after them (lesson 07).

In vLLM v0.33.0: `vllm/v1/worker/gpu/spec_decode/rejection_sampler_utils.py`.
"""

from __future__ import annotations

import torch

from minivllm.errors import MinivllmError
from minivllm.kernels.cpu.rejection_calls import torch_rejection


def rejection_sample(
    target_logits: torch.Tensor,
    draft_token_ids: torch.Tensor,
    num_drafts: torch.Tensor,
    draft_logits: torch.Tensor | None,
    is_greedy: torch.Tensor,
    keys: torch.Tensor,
) -> torch.Tensor:
    """Each request's accepted drafts and the token after them: int64 [requests, most drafts + 1], -1 behind the last.

    A request's rows are those after its last known token and after each of its drafts, in order:

        target_logits    float32 [sum of (drafts + 1), vocab], after all processors. A random request's rows are divided
                         by its temperature, and -inf where top-k, top-p or min-p exclude a token
        draft_token_ids  int32 [sum of drafts]; -1 is always rejected
        num_drafts       int32 [requests], 0 and more
        draft_logits     float32 [sum of drafts, vocab]: what random requests' drafts were drawn from, by noise other than
                         `keys` give (`draft_keys` in `worker/sample/gumbel.py`); None: nothing was drawn (n-grams, argmax)
        is_greedy        bool [requests]
        keys             int32 [sum of (drafts + 1), 2]: each row's key (`row_keys` in `worker/sample/gumbel.py`)

    Raises:
        MinivllmError: shapes do not match.
    """
    _check(target_logits, draft_token_ids, num_drafts, draft_logits, is_greedy, keys)
    return torch_rejection(target_logits, draft_token_ids, num_drafts, draft_logits, is_greedy, keys)


def _check(
    target_logits: torch.Tensor,
    draft_token_ids: torch.Tensor,
    num_drafts: torch.Tensor,
    draft_logits: torch.Tensor | None,
    is_greedy: torch.Tensor,
    keys: torch.Tensor,
) -> None:
    drafts, requests = len(draft_token_ids), len(num_drafts)
    rows, vocab = target_logits.shape
    if rows != drafts + requests or len(keys) != rows or len(is_greedy) != requests:
        raise MinivllmError(
            f"{drafts} drafts of {requests} requests need {drafts + requests} rows: there are {rows} rows of logits, "
            f"{len(keys)} keys and {len(is_greedy)} of is_greedy"
        )
    if draft_logits is not None and draft_logits.shape != (drafts, vocab):
        raise MinivllmError(
            f"draft_logits are {list(draft_logits.shape)}, must be [drafts, vocab] = [{drafts}, {vocab}]"
        )
