"""Speculation keeps the model's distribution at every position.

The model here is a table: each token depends only on the one before it. A request has two drafts
and so up to three tokens.
"""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from chi_square import Fit, fit
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.rejection_steps import key_tensor, random_step

from minivllm.kernels.cpu.rejection_calls import reject_cpu, torch_rejection
from minivllm.kernels.rejection_arguments import RejectionArguments
from minivllm.kernels.rejection_sample import rejection_sample
from minivllm.worker.sample.gumbel import draft_keys, gumbel_max, row_keys
from minivllm.worker.sample.top_k_top_p import mask_beyond_top_k_top_p

VOCAB, REQUESTS = 8, 100_000
LEVEL = 1e-3
GENERATOR = torch.Generator().manual_seed(7)
TARGET = torch.randn(1 + VOCAB, VOCAB, generator=GENERATOR) * 1.5  # row 0: the prompt; row 1 + x: after token x
DRAFT = TARGET + torch.randn(TARGET.shape, generator=GENERATOR)
SETTINGS = [
    {},
    {"temperature": 0.5},
    {"top_p": 0.8},
    {"temperature": 0.7, "top_k": 3},
    {"temperature": 1.5, "top_k": 5, "top_p": 0.9},
]


@dataclass
class Outcome:
    """The tokens of many requests, and the tables that they were drawn from."""

    tokens: np.ndarray  # [requests, 3], -1 behind the last
    drafts: np.ndarray  # [requests, 2]
    p: np.ndarray  # [1 + vocab, vocab]: probabilities after each token, as TARGET
    q: np.ndarray
    drawn: bool

    def fits(self) -> list[Fit]:
        """Fit the counts of the first token, the second, and the one after both drafts, each given
        the token before it.
        """
        before, fits = np.zeros(len(self.tokens), int), []
        for place in range(3):
            valid = self.tokens[:, place] >= 0
            pairs = before[valid] * VOCAB + self.tokens[valid, place]
            fits.append(fit(np.bincount(pairs, minlength=self.p.size).reshape(self.p.shape), self.p))
            before = 1 + self.tokens[:, place]
        return fits

    def acceptance_off(self) -> list[float]:
        """Return, for each draft, how many standard deviations the number accepted is above its
        expectation.
        """
        rates = np.minimum(self.p, self.q).sum(-1) if self.drawn else (self.p * self.q).sum(-1)  # [1 + vocab]
        before, off, reached = np.zeros(len(self.tokens), int), [], np.ones(len(self.tokens), bool)
        for place in range(2):
            accepted = reached & (self.tokens[:, place + 1] >= 0)
            expected = rates[before[reached]]
            off.append((accepted.sum() - expected.sum()) / math.sqrt((expected * (1 - expected)).sum()))
            before, reached = 1 + self.drafts[:, place], accepted
        return off


def speculate(drawn, temperature=1.0, top_k=0, top_p=1.0) -> Outcome:
    """Draft and verify once for each request. Drafts are drawn from DRAFT, which the rule is given
    if `drawn`.
    """
    target, draft = TARGET / temperature, DRAFT / temperature
    limits = torch.full((1 + VOCAB,), top_k), torch.full((1 + VOCAB,), top_p)
    mask_beyond_top_k_top_p(target, *limits)
    seeds = np.arange(REQUESTS, dtype=np.uint64)
    context = torch.zeros(REQUESTS, 3, dtype=torch.int64)
    for place in range(2):
        noise = draft_keys(seeds, np.full(REQUESTS, place))
        context[:, place + 1] = 1 + gumbel_max(draft[context[:, place]], noise)
    step = RejectionArguments(
        target_logits=target[context].flatten(0, 1),
        draft_token_ids=(context[:, 1:] - 1).flatten().int(),
        num_drafts=torch.full((REQUESTS,), 2, dtype=torch.int32),
        draft_logits=draft[context[:, :2]].flatten(0, 1) if drawn else None,
        is_greedy=torch.zeros(REQUESTS, dtype=torch.bool),
        keys=key_tensor(row_keys(np.repeat(seeds, 3), np.tile(np.arange(3), REQUESTS))),
    )
    tokens = rejection_sample(step)
    p, q = (table.double().softmax(-1).numpy() for table in (target, draft))
    return Outcome(tokens.numpy(), (context[:, 1:] - 1).numpy(), p, q, drawn)


WAYS = [*((chosen, True) for chosen in SETTINGS), (SETTINGS[0], False), (SETTINGS[-1], False)]


@pytest.mark.parametrize(("chosen", "drawn"), WAYS, ids=str)
def test_tokens_are_the_models_and_as_many_are_accepted_as_can_be(chosen, drawn):
    outcome = speculate(drawn, **chosen)
    for place, fitted in enumerate(outcome.fits()):
        assert fitted.p_value > LEVEL, f"token {place}: {fitted}"
        assert fitted.total_variation < 0.05, f"token {place}: {fitted}"
    assert max(map(abs, outcome.acceptance_off())) < 3
    assert (outcome.tokens[:, 2] >= 0).sum() > 3000, "too few bonus tokens to judge"


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
