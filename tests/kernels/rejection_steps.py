"""Steps with drafts to verify: `rejection_sample` is tested on them by itself, and by its effect on
distributions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from minivllm.kernels.rejection_arguments import RejectionArguments
from minivllm.worker.sample.gumbel import draft_keys, gumbel_max, row_keys


def key_tensor(keys: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(keys.view(np.int32))


def random_step(vocab: int, drawn: bool, num_drafts: Sequence[int], seed: int = 0) -> RejectionArguments:
    """Return a step of greedy and random requests. Drafts are good: q is close to p, or they are
    the likeliest tokens; some are -1.

    Some rows exclude half of the tokens, and one row all but one.
    """
    generator = torch.Generator().manual_seed(seed + vocab)
    counts = torch.tensor(num_drafts, dtype=torch.int32)
    drafts, requests = int(counts.sum()), len(counts)
    rows = drafts + requests
    target = torch.randn(rows, vocab, generator=generator) * 2
    target[::3, 1:].masked_fill_(torch.rand((len(target[::3]), vocab - 1), generator=generator) < 0.5, -torch.inf)
    target[1] = -torch.inf
    target[1, vocab // 2] = 0.5
    seeds = np.arange(rows) + seed
    keys = key_tensor(row_keys(seeds, np.arange(rows)))
    is_draft = torch.cat([torch.arange(count + 1) < count for count in num_drafts])
    logits = target[is_draft].clamp(min=-9.0) + torch.randn(drafts, vocab, generator=generator)
    ids = gumbel_max(logits, draft_keys(seeds[:drafts], np.arange(drafts))) if drawn else target[is_draft].argmax(-1)
    ids[5::9] = -1
    greedy = torch.arange(requests) % 4 == 1
    return RejectionArguments(target, ids.int(), counts, logits if drawn else None, greedy, keys)
