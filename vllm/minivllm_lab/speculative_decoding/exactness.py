"""Lesson 07's two proofs: its kernels sample, token for token, what the rule samples; and the rule gives
the target's own probabilities, which rules that look like it do not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from minivllm_lab.progress import track
from minivllm_lab.tables import console, heading, record_table

Verify = Callable[[np.ndarray, np.ndarray, list[int], np.ndarray, np.ndarray], list[int]]
"""(p, q, drafts, uniforms, noise) -> tokens, as the lesson's `verify`."""

# ---- the kernels ---------------------------------------------------------------------------------


def draft_batch(counts: Sequence[int], vocab_size: int) -> tuple[Tensor, ...]:
    """Draw random arguments for the lesson's `rejection_launch`, for requests with these numbers of
    drafts.

    Return p [drafts + requests, vocab], q [drafts, vocab] near p, drafts int32 drawn from q,
    draft_start, uniforms, noise.
    """
    starts = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)
    p = torch.randn(sum(counts) + len(counts), vocab_size).softmax(-1)
    has_draft = torch.cat([torch.arange(count + 1) < count for count in counts])
    q = (p[has_draft].log() + torch.randn(sum(counts), vocab_size) / 2).softmax(-1)
    drafts = q.multinomial(1)[:, 0].int() if len(q) else torch.empty(0, dtype=torch.int32)
    return p, q, drafts, starts, torch.rand(len(q)), torch.empty_like(p).exponential_()


def verified_one_by_one(verify: Verify, batch: Sequence[Tensor]) -> list[list[int]]:
    """Apply the rule to each request of a `draft_batch`; return rows of tokens, −1 after the last."""
    p, q, drafts, starts, uniforms, noise = (tensor.numpy() for tensor in batch)
    width, rows = int(np.diff(starts).max()) + 1, []
    for i, (start, end) in enumerate(pairwise(starts.tolist())):
        of_drafts, of_targets = slice(start, end), slice(start + i, end + i + 1)
        drawn = q[of_drafts], drafts[of_drafts].tolist(), uniforms[of_drafts]
        tokens = verify(p[of_targets], *drawn, noise[of_targets])
        rows.append(tokens + [-1] * (width - len(tokens)))
    return rows


def verify_kernel(launch: Callable[..., Tensor], verify: Verify, device: torch.device) -> dict:
    """Compare the kernels with the rule, token for token, for vocabularies that no block size divides.

    Raises:
        AssertionError: they differ.
    """
    heading("3. The kernel")
    counts, vocabularies = [3, 0, 1, 3, 2], [31, 1000, 1025, 4096]
    for vocab_size in vocabularies:
        batch = draft_batch(counts, vocab_size)
        tokens = launch(*(tensor.to(device) for tensor in batch))
        assert tokens.tolist() == verified_one_by_one(verify, batch), f"wrong with a vocabulary of {vocab_size}"
    console.print(f"Requests with {counts} drafts: correct for vocabularies of {vocabularies} tokens")
    return {"vocabularies": vocabularies}


# ---- the rule ------------------------------------------------------------------------------------

STATES = 5


def tiny_models(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Make a target and a draft over five tokens, each depending on the previous one: matrices
    [token, next token].
    """
    draw = np.random.default_rng(seed)
    target = draw.dirichlet(np.full(STATES, 2.0), STATES) * 0.9 + 0.1 / STATES
    draft = target * np.exp(draw.normal(size=target.shape))
    return target, draft / draft.sum(-1, keepdims=True)


def two_tokens(rule: Verify, models: tuple[np.ndarray, np.ndarray], draw: np.random.Generator) -> tuple[int, int, int]:
    """Draw two tokens after token 0, with two drafts per step; also count the drafts that the first
    step accepted.
    """
    (target, draft), tokens, accepted = models, [0], 0
    while len(tokens) < 3:
        known = list(tokens[-1:])
        for _ in range(2):
            known.append(int(np.searchsorted(draft[known[-1]].cumsum(), draw.random())))
        new = rule(target[known], draft[known[:-1]], known[1:], draw.random(2), draw.exponential(size=(3, STATES)))
        accepted = accepted if len(tokens) > 1 else len(new) - 1
        tokens += new
    return tokens[1], tokens[2], accepted


def try_rules(rules: Mapping[str, Verify], rounds: int, seed: int) -> dict:
    """Draw two tokens many times by each rule; compare how often each pair occurs with the target's
    own probabilities.
    """
    heading("4. Exact, or nearly")
    models, results = tiny_models(seed=5), {}
    exact = models[0][0][:, None] * models[0]
    freedom, sum_min = exact.size - 1, float(np.minimum(models[0][0], models[1][0]).sum())
    for name, rule in track(rules.items(), "testing rules"):
        draw, counts, num_accepted = np.random.default_rng(seed), np.zeros_like(exact), 0
        for _ in range(rounds):
            first, second, accepted = two_tokens(rule, models, draw)
            counts[first, second] += 1
            num_accepted += accepted > 0
        chi = float(((counts - rounds * exact) ** 2 / (rounds * exact)).sum())
        chance = float(torch.special.gammaincc(torch.tensor(freedom / 2.0), torch.tensor(chi / 2.0)))
        distance = float(np.abs(counts / rounds - exact).sum() / 2)
        results[name] = {"chi": chi, "p": chance, "distance": distance, "accepted": num_accepted / rounds}
    record_table(
        f"Two tokens of a vocabulary of five, drawn {rounds:,} times",
        results,
        "rule {name} | first drafts accepted {accepted:.3f} | chi-square {chi:,.0f} | chance {p:.3f}",
        f"Σ min(p, q) is {sum_min:.3f}. Chance: that an exact rule is as far off ({freedom} degrees of freedom).",
    )
    return {"rules": results, "freedom": freedom, "sum_min": sum_min, "rounds": rounds}
