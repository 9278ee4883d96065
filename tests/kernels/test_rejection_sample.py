"""Verifying drafts: what is kept is what the model would have said, in distribution or token for token."""

import numpy as np
import torch

from minivllm.kernels.rejection_sample import rejection_sample
from minivllm.worker.sample.gumbel import row_keys


def row_counts(num_drafts):
    return torch.tensor(num_drafts, dtype=torch.int32)


def keys_of(seeds, positions, keys=row_keys):
    """int32 [n, 2]."""
    return torch.from_numpy(keys(np.asarray(seeds, np.uint64), np.asarray(positions)).view(np.int32))


def test_greedy_requests_keep_drafts_up_to_the_first_that_is_not_the_likeliest():
    likeliest = torch.tensor([4, 2, 7, 1, 0, 3, 3, 5, 6])
    logits = torch.nn.functional.one_hot(likeliest, 9).float()
    drafts = torch.tensor([4, 2, 1, 9, 3], dtype=torch.int32)  # of 2, 0, 1 and 2
    kept = rejection_sample(
        logits, drafts, row_counts([2, 0, 1, 2]), None, torch.ones(4, dtype=torch.bool), keys_of([0] * 9, range(9))
    )
    assert kept.tolist() == [[4, 2, 7], [1, -1, -1], [0, -1, -1], [3, -1, -1]]
