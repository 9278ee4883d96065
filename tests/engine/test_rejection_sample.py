"""A step of drafts comes out the same alone, among others, and in both forms.

That speculation keeps the model's distribution is for `test_speculation.py`.
"""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.rejection_steps import random_step

from minivllm.kernels.cpu.rejection_calls import reject_cpu, torch_rejection
from minivllm.kernels.rejection_arguments import RejectionArguments
from minivllm.kernels.rejection_sample import rejection_sample
from minivllm.worker.sample.gumbel import gumbel_max

STEPS = st.builds(
    random_step,
    st.sampled_from([1, 2, 15, 16, 17, 255, 300]),
    st.booleans(),
    st.lists(st.integers(0, 4), min_size=1, max_size=6).filter(any),
    st.integers(0, 1000),
)


@given(STEPS)
@settings(max_examples=40, deadline=None)
def test_any_step_comes_out_the_same_alone_among_others_and_in_both_forms(step):
    together = rejection_sample(step)
    assert torch.equal(torch_rejection(step), together)
    likeliest = step.target_logits.argmax(-1)
    plain = gumbel_max(step.target_logits, step.keys.numpy().view(np.uint32))
    row = 0
    for request, count in enumerate(step.num_drafts.tolist()):
        rows, drafts = slice(row, row + count + 1), slice(row - request, row - request + count)
        row += count + 1
        its_step = RejectionArguments(
            step.target_logits[rows],
            step.draft_token_ids[drafts],
            step.num_drafts[request : request + 1],
            None if step.draft_logits is None else step.draft_logits[drafts],
            step.is_greedy[request : request + 1],
            step.keys[rows],
        )
        alone = reject_cpu(its_step)[0].tolist()
        kept = together[request].tolist()
        assert kept == alone + [-1] * (len(kept) - len(alone))
        proposed = step.draft_token_ids[drafts].tolist()
        accepted = sum(token >= 0 for token in kept) - 1
        assert kept[:accepted] == proposed[:accepted]
        if step.is_greedy[request] or step.draft_logits is None:
            drawn = (likeliest if step.is_greedy[request] else plain)[rows].tolist()
            assert kept[: accepted + 1] == drawn[: accepted + 1], "the tokens without drafts"
            assert accepted == count or proposed[accepted] != drawn[accepted]
