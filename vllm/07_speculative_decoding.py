"""Lesson 07. Speculative decoding: how can a guess be exact, and when does it pay?

Builds two ways to guess the next tokens (look them up, or ask a small model), the rule that keeps or replaces a guess
without changing what comes out, and the kernel that applies it to a batch. You learn why verifying a few tokens costs
about as much as one, how many tokens a guess buys, and from which batch on it costs more than it buys.

    uv run python vllm/07_speculative_decoding.py                      # under a minute on a laptop, no GPU needed
    uv run python vllm/07_speculative_decoding.py --tokens 5 --rounds 40000
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.core.stats import SpecDecodingStats
from minivllm.lab.cached_model import CachedModel
from minivllm.platforms.triton_utils import tl, triton

# %% 2. The idea: guess a few tokens, verify all of them in one step, keep what may stand


# region: ngram
def propose_ngram(token_ids: Sequence[int], min_n: int, max_n: int, k: int) -> list[int]:
    """What came after the last few tokens where they first stood: at most k drafts, perhaps none.

    The longest run of min_n to max_n last tokens that also stands earlier counts.
    """
    for n in range(min(max_n, len(token_ids) - 1), min_n - 1, -1):
        for start in range(len(token_ids) - n):
            if token_ids[start : start + n] == token_ids[-n:]:
                return list(token_ids[start + n : start + n + k])
    return []


# endregion


# region: rejection
def accept(p: Tensor, q: Tensor, drafts: Sequence[int], uniforms: Tensor) -> int:
    """How many drafts stand: each with probability min(1, p(x) / q(x)), up to the first that does not.

    p [drafts + 1, vocab] is what the target would have drawn from, q [drafts, vocab] what the drafts were drawn from;
    uniforms [drafts] are in [0, 1).
    """
    for i, x in enumerate(drafts):
        if uniforms[i] * q[i, x] >= p[i, x]:
            return i
    return len(drafts)


def recovered(p: Tensor, q: Tensor, noise: Tensor) -> int:
    """A draw from max(p − q, 0), made to sum to one: the token that wins a race. All [vocab].

    `noise` are draws from the exponential distribution of mean 1; token x arrives at noise(x) / weight(x).
    """
    return int(((p - q).clamp(min=0) / noise).argmax())


def verify(p: Tensor, q: Tensor, drafts: Sequence[int], uniforms: Tensor, noise: Tensor) -> list[int]:
    """The tokens of one step: the drafts that stand, and one of the target's own. noise [drafts + 1, vocab]."""
    n = accept(p, q, drafts, uniforms)
    rest = q[n] if n < len(drafts) else torch.zeros_like(p[n])  # all stand: the bonus token is drawn from p itself
    return [*drafts[:n], recovered(p[n], rest, noise[n])]


# endregion


def distribution(logits: Tensor, temperature: float) -> Tensor:
    """Probabilities [..., vocab] that one draws from; at temperature 0 all of it on the likeliest token."""
    if temperature == 0:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).float()
    return (logits / temperature).softmax(-1)


# region: drafter
class Ngram:
    """Drafts by looking them up. It is certain of each: q is 1 at the draft."""

    def __init__(self, vocab_size: int, min_n: int = 1, max_n: int = 3) -> None:
        self.vocab_size, self.min_n, self.max_n = vocab_size, min_n, max_n

    def __call__(self, token_ids: list[int], k: int) -> tuple[list[int], Tensor]:
        """At most k drafts, and what they were drawn from: q [drafts, vocab]."""
        drafts = propose_ngram(token_ids, self.min_n, self.max_n, k)
        return drafts, F.one_hot(torch.tensor(drafts, dtype=torch.long), self.vocab_size).float()


class DraftModel:
    """Drafts by a small model of the same vocabulary, token by token, with a KV cache of its own."""

    def __init__(self, model: CachedModel, temperature: float = 0.0) -> None:
        self.model, self.temperature = model, temperature

    def __call__(self, token_ids: list[int], k: int) -> tuple[list[int], Tensor]:
        """k drafts, and what they were drawn from: q [k, vocab]."""
        self.model.length = min(self.model.length, len(token_ids) - 1)  # forget the drafts that did not stand
        known, rows = list(token_ids), []
        for _ in range(k):
            rows.append(distribution(self.model.forward(known[self.model.length :])[-1], self.temperature))
            known.append(int(rows[-1].multinomial(1)))
        return known[len(token_ids) :], torch.stack(rows)


# endregion


# region: generate
@dataclass
class Generation:
    """Tokens after the prompt, and the drafts' fate."""

    tokens: list[int]
    stats: SpecDecodingStats = field(default_factory=SpecDecodingStats)


def generate(
    target: CachedModel, propose: Callable, prompt: list[int], max_tokens: int, k: int, temperature: float = 0.0
) -> Generation:
    """One pass of the target for each guess: over the tokens that it has not seen, and the drafts behind them."""
    tokens, stats = list(prompt), SpecDecodingStats()
    while len(tokens) < len(prompt) + max_tokens:
        drafts, q = propose(tokens, k) if target.length else ([], torch.empty(0))
        logits = target.forward(tokens[target.length :] + drafts)[-len(drafts) - 1 :]
        p = distribution(logits, temperature)
        new = verify(p, q, drafts, torch.rand(len(drafts)), torch.empty_like(p).exponential_())
        tokens += new
        target.length = len(tokens) - 1  # keys and values of rejected drafts lie behind: written over next
        if drafts:
            stats.observe_draft(len(drafts), len(new) - 1)
    return Generation(tokens[len(prompt) :][:max_tokens], stats)


# endregion

# %% 3. The kernel: one program a request, and of all the rows only one is read


# region: kernel
@triton.jit
def count_accepted(p, q, draft_token_ids, uniforms, request, k, vocab_size):
    """How many drafts of one request stand: each is looked at only if all before it stand."""
    count, stands = 0, 1
    while (count < k) & (stands == 1):
        at = request * k + count
        token = tl.load(draft_token_ids + at)
        x = tl.maximum(token, 0)  # −1 must not be read from
        target = tl.load(p + (at + request) * vocab_size + x)
        drawn = tl.load(uniforms + at) * tl.load(q + at * vocab_size + x)
        stands = ((token >= 0) & (drawn < target)).to(tl.int32)
        count += stands
    return count


@triton.jit
def accept_kernel(num_accepted, p, q, draft_token_ids, uniforms, k, vocab_size):
    """`accept` for many requests. Grid: (requests,).

    p float32 [requests, k + 1, vocab]; q float32 [requests, k, vocab]; draft_token_ids int32 [requests, k], −1 where a
    request has fewer, which never stands; uniforms float32 [requests, k] -> num_accepted int32 [requests].
    """
    request = tl.program_id(0).to(tl.int64)
    tl.store(num_accepted + request, count_accepted(p, q, draft_token_ids, uniforms, request, k, vocab_size))


@triton.jit
def recover_kernel(token, p, q, noise, vocab_size, BLOCK: tl.constexpr):
    """`recovered` for one row, in one block. Grid: (1,). p, q, noise float32 [vocab_size] -> token int32 [1]."""
    x = tl.arange(0, BLOCK)
    there = x < vocab_size
    weight = tl.load(p + x, mask=there, other=0.0) - tl.load(q + x, mask=there, other=0.0)
    pace = tl.maximum(weight, 0.0) / tl.load(noise + x, mask=there, other=1.0)
    tl.store(token, tl.argmax(tl.where(there, pace, -1.0), axis=0))


@triton.jit
def rejection_kernel(
    out, p, q, draft_token_ids, uniforms, noise, k, vocab_size, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr
):
    """`verify` for many requests. Grid: (requests,).

    out int32 [requests, k + 1], −1 behind the last token; the others as in `accept_kernel`, and noise float32
    [requests, k + 1, vocab]. Where a request has fewer than k drafts, q is 0. BLOCK_K is above k. Reads 16 bytes of
    each draft up to the first that does not stand; then one row of p and of noise, and of q unless all k stand:
    12 * vocab bytes, or 8 * vocab.
    """
    request, place = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_K)
    count = count_accepted(p, q, draft_token_ids, uniforms, request, k, vocab_size)
    row, rest = (request * (k + 1) + count) * vocab_size, (request * k + count) * vocab_size
    best, winner = -1.0, 0
    for start in range(0, vocab_size, BLOCK):
        x = start + tl.arange(0, BLOCK)
        there = x < vocab_size
        weight = tl.load(p + row + x, mask=there, other=0.0)
        if count < k:
            weight -= tl.load(q + rest + x, mask=there, other=0.0)
        pace = tl.maximum(weight, 0.0) / tl.load(noise + row + x, mask=there, other=1.0)
        pace = tl.where(there, pace, -1.0)
        fastest = tl.max(pace, axis=0)
        winner = tl.where(fastest > best, start + tl.argmax(pace, axis=0), winner)
        best = tl.maximum(best, fastest)
    kept = tl.load(draft_token_ids + request * k + place, mask=place < count, other=-1)
    tl.store(out + request * (k + 1) + place, tl.where(place == count, winner, kept), mask=place <= k)


# endregion


def rejection_launch(
    p: Tensor, q: Tensor, draft_token_ids: Tensor, uniforms: Tensor, noise: Tensor, block: int = 1024
) -> Tensor:
    """`verify` for many requests, by the kernel: int32 [requests, k + 1], −1 behind the last token."""
    requests, k, vocab_size = q.shape
    out = torch.empty(requests, k + 1, dtype=torch.int32, device=p.device)
    rejection_kernel[(requests,)](
        out, p, q, draft_token_ids, uniforms, noise, k, vocab_size, BLOCK_K=triton.next_power_of_2(k + 1), BLOCK=block
    )
    return out
