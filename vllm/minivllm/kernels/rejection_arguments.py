"""The arguments of every form of `rejection_sample` (`RejectionArguments`)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class RejectionArguments(NamedTuple):
    """A step's drafts, and the logits to verify them by.

    A request's rows are those after its last known token and after each of its drafts, in order:

        target_logits    float32 [sum of (drafts + 1), vocab], after all processors. A random request's rows are divided
                         by its temperature, and -inf where top-k, top-p or min-p exclude a token
        draft_token_ids  int32 [sum of drafts]; -1 is always rejected
        num_drafts       int32 [requests], 0 or more
        draft_logits     float32 [sum of drafts, vocab]: what random requests' drafts were drawn from, with other noise
                         than that of `keys` (`draft_keys` in `worker/sample/gumbel.py`); None: nothing was
                         drawn (n-grams, argmax)
        is_greedy        bool [requests]
        keys             int32 [sum of (drafts + 1), 2]: each row's key (`row_keys` in `worker/sample/gumbel.py`)
    """

    target_logits: Tensor
    draft_token_ids: Tensor
    num_drafts: Tensor
    draft_logits: Tensor | None
    is_greedy: Tensor
    keys: Tensor

    def to(self, device: torch.device) -> RejectionArguments:
        """Copy all tensors except `num_drafts`, which the host reads, to `device`."""
        tensors = {name: tensor for name, tensor in self._asdict().items() if tensor is not None}
        del tensors["num_drafts"]
        return self._replace(**{name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()})
