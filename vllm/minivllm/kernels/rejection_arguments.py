"""What all forms of `rejection_sample` take (`RejectionArguments`), and its validation."""

from __future__ import annotations

from typing import NamedTuple

import torch

from minivllm.errors import MinivllmError


class RejectionArguments(NamedTuple):
    """A step's drafts, and the logits to verify them by.

    A request's rows are those after its last known token and after each of its drafts, in order:

        target_logits    float32 [sum of (drafts + 1), vocab], after all processors. A random request's rows are divided
                         by its temperature, and -inf where top-k, top-p or min-p exclude a token
        draft_token_ids  int32 [sum of drafts]; -1 is always rejected
        num_drafts       int32 [requests], 0 and more
        draft_logits     float32 [sum of drafts, vocab]: what random requests' drafts were drawn from, by noise other than
                         `keys` give (`draft_keys` in `worker/sample/gumbel.py`); None: nothing was drawn (n-grams, argmax)
        is_greedy        bool [requests]
        keys             int32 [sum of (drafts + 1), 2]: each row's key (`row_keys` in `worker/sample/gumbel.py`)
    """

    target_logits: torch.Tensor
    draft_token_ids: torch.Tensor
    num_drafts: torch.Tensor
    draft_logits: torch.Tensor | None
    is_greedy: torch.Tensor
    keys: torch.Tensor

    def to(self, device: torch.device) -> RejectionArguments:
        """With all tensors on `device` but `num_drafts`, which the host reads."""
        named = [(name, one) for name, one in self._asdict().items() if name != "num_drafts" and one is not None]
        return self._replace(**{name: one.to(device, non_blocking=True) for name, one in named})


def check_arguments(arguments: RejectionArguments) -> None:
    """Raise `MinivllmError` if shapes do not match; the message says what is expected."""
    drafts, requests = len(arguments.draft_token_ids), len(arguments.num_drafts)
    rows, vocab = arguments.target_logits.shape
    if rows != drafts + requests or len(arguments.keys) != rows or len(arguments.is_greedy) != requests:
        raise MinivllmError(
            f"{drafts} drafts of {requests} requests need {drafts + requests} rows: there are {rows} rows of logits, "
            f"{len(arguments.keys)} keys and {len(arguments.is_greedy)} of is_greedy"
        )
    theirs = arguments.draft_logits
    if theirs is not None and theirs.shape != (drafts, vocab):
        raise MinivllmError(f"draft_logits are {list(theirs.shape)}, must be [drafts, vocab] = [{drafts}, {vocab}]")
