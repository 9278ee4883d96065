"""Lesson 07. Speculative decoding: how can a guess be exact, and when does it pay?

Builds three ways to guess the next tokens (look them up, ask a small model, or iterate on noise), the rule that accepts
or replaces a guess without changing the distribution, and the kernel that applies it to a batch. You learn why it costs
about as much to verify a few tokens as to compute one, how many tokens a guess buys, and above which batch it loses.

    uv run python vllm/07_speculative_decoding.py                      # under a minute on a laptop, no GPU needed
    uv run python vllm/07_speculative_decoding.py --drafts 5 --quick
"""

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.core.stats import SpecDecodingStats
from minivllm.platforms.triton_utils import tl, triton
from minivllm_lab.cli import run
from minivllm_lab.disturbance import Control
from minivllm_lab.lesson import begin, keep
from minivllm_lab.proof import prove
from minivllm_lab.speculative_decoding import exactness, report
from minivllm_lab.speculative_decoding.cached_model import CachedModel

# %% 1. The pain: a pass reads all weights and yields one token for each request


@dataclass
class Generation:
    """The tokens after the prompt, the target's passes that they took, and how many drafts were accepted."""

    tokens: list[int]
    passes: int
    stats: SpecDecodingStats = field(default_factory=SpecDecodingStats)


def decode(target: CachedModel, prompt: list[int], max_tokens: int) -> Generation:
    """Decode greedily without guesses: a pass for each token."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(int(target.forward(tokens[target.length :])[-1].argmax()))
    return Generation(tokens[len(prompt) :], max_tokens)


# %% 2. The idea: guess a few tokens, verify all of them in one pass, keep those that the rule accepts


# region: ngram
def propose_ngram(token_ids: Sequence[int], min_n: int, max_n: int, k: int) -> list[int]:
    """Return at most k drafts, perhaps none: what followed the last tokens where they first occurred.

    Look for as many of the last max_n tokens as occur earlier, and for no fewer than min_n.
    """
    for n in range(min(max_n, len(token_ids) - 1), min_n - 1, -1):
        suffix = token_ids[-n:]
        for start in range(len(token_ids) - n):
            if token_ids[start : start + n] == suffix:
                return list(token_ids[start + n : start + n + k])
    return []


# endregion
# region: rejection
def accept(p: np.ndarray, q: np.ndarray, drafts: Sequence[int], uniforms: np.ndarray) -> int:
    """Count the accepted drafts: accept x with probability min(1, p(x) / q(x)), up to the first rejection.

    p [drafts + 1, vocab] is the target's distribution at each position, q [drafts, vocab] what the drafts were drawn
    from; uniforms [drafts] are from 0 up to, not including, 1. −1 is not a draft.
    """
    for i, x in enumerate(drafts):
        if x < 0 or uniforms[i] * q[i, x] >= p[i, x]:
            return i
    return len(drafts)


def recovered(p: np.ndarray, q: np.ndarray | float, noise: np.ndarray) -> int:
    """Draw from max(p − q, 0), normalised, by a race: token x arrives at noise(x) / weight(x), and the first wins.

    All are [vocab]; noise is drawn from the exponential distribution.
    """
    return int(np.argmax(np.maximum(p - q, 0) / noise))


def verify(p: np.ndarray, q: np.ndarray, drafts: Sequence[int], uniforms: np.ndarray, noise: np.ndarray) -> list[int]:
    """Return a step's tokens: the accepted drafts, and one of the target's own. noise [drafts + 1, vocab]."""
    n = accept(p, q, drafts, uniforms)
    rejected = q[n] if n < len(drafts) else 0  # all accepted: nothing is taken from p, a bonus
    return [*drafts[:n], recovered(p[n], rejected, noise[n])]


# endregion


def distribution(logits: Tensor, temperature: float) -> np.ndarray:
    """Return probabilities [..., vocab] to draw from; at temperature 0 all of it is on the likeliest token."""
    if temperature == 0:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).float().cpu().numpy()
    return (logits / temperature).softmax(-1).cpu().numpy()


def noise_like(p: np.ndarray) -> np.ndarray:
    """Draw exponential noise for each element of p."""
    return torch.empty(p.shape).exponential_().numpy()


class Ngram:
    """A drafter that looks drafts up and is certain of each: q is 1 at the draft."""

    def __init__(self, vocab_size: int, min_n: int = 1, max_n: int = 3) -> None:
        self.vocab_size, self.min_n, self.max_n = vocab_size, min_n, max_n

    def __call__(self, token_ids: list[int], k: int) -> tuple[list[int], np.ndarray]:
        """Return at most k drafts, and what they were drawn from: q [drafts, vocab]."""
        drafts = propose_ngram(token_ids, self.min_n, self.max_n, k)
        q = np.zeros((len(drafts), self.vocab_size), np.float32)
        q[range(len(drafts)), drafts] = 1.0
        return drafts, q


class DraftModel:
    """A drafter that runs a small model of the same vocabulary, token by token, with a KV cache of its own."""

    def __init__(self, model: CachedModel, temperature: float = 0.0) -> None:
        self.model, self.temperature = model, temperature

    def __call__(self, token_ids: list[int], k: int) -> tuple[list[int], np.ndarray]:
        """Return k drafts, and what they were drawn from: q [k, vocab]."""
        self.model.length = min(self.model.length, len(token_ids) - 1)  # forget rejected drafts
        known, q = list(token_ids), []
        for _ in range(k):
            q.append(distribution(self.model.forward(known[self.model.length :])[-1], self.temperature))
            known.append(recovered(q[-1], 0, noise_like(q[-1])))
        return known[len(token_ids) :], np.stack(q)


def generate(
    target: CachedModel, propose: Callable, prompt: list[int], max_tokens: int, k: int, temperature: float = 0.0
) -> Generation:
    """Run one pass of the target for each guess: over the tokens it has not seen yet, and the drafts after them."""
    tokens, stats, before = list(prompt), SpecDecodingStats(), target.passes
    while len(tokens) < len(prompt) + max_tokens:
        drafts, q = propose(tokens, k) if target.length else ([], np.empty(0))
        logits = target.forward(tokens[target.length :] + drafts)[-len(drafts) - 1 :]
        p = distribution(logits, temperature)
        new = verify(p, q, drafts, torch.rand(len(drafts)).numpy(), noise_like(p))
        tokens += new
        target.length = len(tokens) - 1  # what rejected drafts left in the cache is overwritten
        if drafts:
            stats.observe_draft(len(drafts), len(new) - 1)
    return Generation(tokens[len(prompt) :][:max_tokens], target.passes - before, stats)


def jacobi(target: CachedModel, prompt: list[int], max_tokens: int, width: int) -> Generation:
    """Decode greedily from any guess: put the target's prediction into each position, and pass again.

    Lookahead decoding is built on it. Guesses after the first wrong one follow a wrong text, and yet a few come true.
    """
    tokens, guess, before, stats = list(prompt), [0] * width, target.passes, SpecDecodingStats()
    while len(tokens) < len(prompt) + max_tokens:
        says = target.forward(tokens[target.length :] + guess)[-width - 1 :].argmax(-1).tolist()
        right = next((i for i, (mine, its) in enumerate(zip(guess, says, strict=False)) if mine != its), width)
        tokens += says[: right + 1]
        target.length = len(tokens) - 1
        guess = (says[right + 1 :] + [0] * width)[:width]
        stats.observe_draft(width, right)
    return Generation(tokens[len(prompt) :][:max_tokens], target.passes - before, stats)


# %% 3. The kernel: one program a request; the host never learns how many drafts were accepted


# region: kernel
@triton.jit
def greedy_kernel(output, drafts, target, num_drafts, BLOCK: tl.constexpr):
    """Verify one greedy request: output int32 [num_drafts + 1] gets accepted drafts, a token, then −1. Grid: (1,).

    drafts int32 [num_drafts], −1 for none; target int32 [num_drafts + 1], the likeliest tokens; BLOCK > num_drafts.
    """
    position = tl.arange(0, BLOCK)
    draft = tl.load(drafts + position, mask=position < num_drafts, other=-1)
    token = tl.load(target + position, mask=position <= num_drafts, other=-2)
    num_accepted = tl.min(tl.where(draft == token, BLOCK, position), axis=0)
    tl.store(output + position, tl.where(position <= num_accepted, token, -1), mask=position <= num_drafts)


@triton.jit
def ragged_kernel(output, drafts, target, draft_start, width, BLOCK: tl.constexpr):
    """Verify many: output int32 [requests, width]. Grid: (requests,). Request i has the drafts from draft_start[i] to
    draft_start[i + 1], int32 [requests + 1], and one target more than drafts, as has each before it."""
    request, position = tl.program_id(0), tl.arange(0, BLOCK)
    start = tl.load(draft_start + request)
    num_drafts = tl.load(draft_start + request + 1) - start
    draft = tl.load(drafts + start + position, mask=position < num_drafts, other=-1)
    token = tl.load(target + start + request + position, mask=position <= num_drafts, other=-2)
    num_accepted = tl.min(tl.where(draft == token, BLOCK, position), axis=0)
    tl.store(output + request * width + position, tl.where(position <= num_accepted, token, -1), mask=position < width)


@triton.jit
def rejection_kernel(
    output, drafts, instead, p, q, uniforms, draft_start, width, vocab_size, BLOCK: tl.constexpr
):  # fmt: skip
    """Apply `verify` to many requests. Grid: (requests,). The rows are laid out as in `ragged_kernel`.

    instead int32 [drafts + requests]: the token that follows the accepted drafts, recovered or a bonus; p
    float32 [drafts + requests, vocab_size], q [drafts, vocab_size], uniforms [drafts]. Reads 16 bytes a draft and 12 a
    request; writes 4 * width bytes a request. It reads one number per row of p or q.
    """
    request, position = tl.program_id(0), tl.arange(0, BLOCK)
    # 1. Where do the drafts of this request begin, and how many are there?
    start = tl.load(draft_start + request)
    num_drafts = tl.load(draft_start + request + 1) - start
    # 2. A lane for each position. A lane without a draft holds -1.
    draft = tl.load(drafts + start + position, mask=position < num_drafts, other=-1)
    there, row = draft >= 0, (start + position).to(tl.int64)
    # 3. One number from each row of p, which has a row more for each request before this one.
    p_draft = tl.load(p + (row + request) * vocab_size + draft, mask=there, other=0.0)
    # 4. One number from each row of q.
    q_draft = tl.load(q + row * vocab_size + draft, mask=there, other=1.0)
    uniform = tl.load(uniforms + row, mask=there, other=0.0)
    # 5. Find the first position that fails. A lane without a draft fails too: 0 < 0 is false.
    num_accepted = tl.min(tl.where(uniform * q_draft < p_draft, BLOCK, position), axis=0)
    last = tl.load(instead + start + request + num_accepted)
    # 6. Write the accepted drafts, one more token, and -1 behind it.
    token = tl.where(position < num_accepted, draft, tl.where(position == num_accepted, last, -1))
    tl.store(output + request * width + position, token, mask=position < width)


# endregion
@triton.jit
def recover_kernel(instead, p, q, noise, q_row, vocab_size, BLOCK: tl.constexpr):
    """Run the race of `recovered` for every row of p: instead int32 [rows]. Grid: (rows,).

    p, noise float32 [rows, vocab_size]; q_row int32 [rows] is the row of q to subtract, −1 for none. Reads 12 *
    vocab_size bytes a row, 8 for a bonus: all rows of a step, though each request will use one.
    """
    row = tl.program_id(0).to(tl.int64)
    rejected = tl.load(q_row + row).to(tl.int64)
    best, winner = -1.0, 0
    for start in range(0, vocab_size, BLOCK):
        x = start + tl.arange(0, BLOCK)
        there = x < vocab_size
        weight = tl.load(p + row * vocab_size + x, mask=there, other=0.0)
        if rejected >= 0:
            weight -= tl.load(q + rejected * vocab_size + x, mask=there, other=0.0)
        pace = tl.maximum(weight, 0.0) / tl.load(noise + row * vocab_size + x, mask=there, other=1.0)
        pace = tl.where(there, pace, -1.0)
        fastest = tl.max(pace, axis=0)
        winner = tl.where(fastest > best, start + tl.argmax(pace, axis=0), winner)
        best = tl.maximum(best, fastest)
    tl.store(instead + row, winner)


def rejection_launch(
    p: Tensor, q: Tensor, drafts: Tensor, draft_start: Tensor, uniforms: Tensor, noise: Tensor, block: int = 1024
) -> Tensor:
    """Apply `verify` to many requests, in two launches: int32 [requests, most drafts + 1], −1 after the last token."""
    counts = draft_start.diff().tolist()
    rows = [row for i, n in enumerate(counts) for row in [*range(int(draft_start[i]), int(draft_start[i]) + n), -1]]
    q_row, instead = torch.tensor(rows, dtype=torch.int32, device=p.device), drafts.new_empty(len(p))
    recover_kernel[(len(p),)](instead, p, q, noise, q_row, p.shape[1], BLOCK=block)
    width = max(counts) + 1
    output = drafts.new_empty(len(counts), width)
    rejection_kernel[(len(counts),)](
        output, drafts, instead, p, q, uniforms, draft_start, width, p.shape[1], BLOCK=triton.next_power_of_2(width)
    )
    return output


# %% 4. The proof: rules that look alike, and what comes out of them


def too_kind(p: np.ndarray, q: np.ndarray, drafts: list[int], uniforms: np.ndarray, noise: np.ndarray) -> list[int]:
    """Accept where u < p / q + 0.05, which is biased."""
    return verify(p, q, drafts, uniforms - 0.05, noise)


def from_p(p: np.ndarray, q: np.ndarray, drafts: list[int], uniforms: np.ndarray, noise: np.ndarray) -> list[int]:
    """Replace a rejected draft by a draw from p rather than from max(p − q, 0), which is biased."""
    n = accept(p, q, drafts, uniforms)
    return [*drafts[:n], recovered(p[n], 0, noise[n])]


def typical(p: np.ndarray, q: np.ndarray, drafts: list[int], _uniforms: np.ndarray, noise: np.ndarray) -> list[int]:
    """Accept a draft that is likely enough for how sure the target is: Medusa's typical acceptance. It is not exact."""
    for n, x in enumerate(drafts):
        entropy = -(p[n] * np.log(p[n])).sum()
        if p[n, x] <= min(0.09, 0.3 * np.exp(-entropy)):
            return [*drafts[:n], recovered(p[n], 0, noise[n])]
    return [*drafts, recovered(p[-1], 0, noise[-1])]


RULES = {"the rule": verify, "a little too kind": too_kind, "recovers from p": from_p, "typical acceptance": typical}

# %% 5. What it buys: tokens for each pass, and what a pass with drafts costs


def expected_tokens(alpha: float, k: int) -> float:
    """Return the tokens of a step whose k drafts are each accepted with probability alpha: a geometric sum."""
    return sum(alpha**i for i in range(k + 1))


def speed_up(alpha: float, k: int, draft_cost: float, verify_cost: float = 1.0) -> float:
    """Return the speed-up from drafts. Both costs, of a draft and of a pass over k drafts, are in target steps."""
    return expected_tokens(alpha, k) / (verify_cost + k * draft_cost)


# %% The talk, in order


def main(arguments: Namespace) -> None:
    """Run the lesson from top to bottom."""
    device, control, k = begin("Lesson 07. Speculative decoding", arguments), Control(), arguments.drafts
    target, draft = report.load_models(arguments.model, arguments.draft_model, device)
    prompts = report.held_out_prompts(arguments.model, 2 if arguments.quick else 12)

    def guessing(make_proposer: Callable[[], Callable]) -> Callable[..., Generation]:
        return lambda model, prompt, max_tokens: generate(model, make_proposer(), prompt, max_tokens, k)

    methods = {
        "no drafts": decode,
        "n-gram": guessing(lambda: Ngram(target.config.vocab_size)),
        "draft model": guessing(lambda: DraftModel(CachedModel(draft, report.MAX_MODEL_LEN))),
        "Jacobi": partial(jacobi, width=k),
    }
    with control.watch():
        found: dict = {"draft_cost": report.measure_draft_cost((target, draft), device)}
    found["family"] = report.count_family(methods, target, prompts, expected_tokens, arguments)
    found["kernel"] = prove(partial(exactness.verify_kernel, rejection_launch, verify), device)
    found["exact"] = exactness.try_rules(RULES, 2_000 if arguments.quick else 20_000, arguments.seed)
    with control.watch():
        found["batches"] = report.measure_batches(arguments, device, partial(speed_up, draft_cost=0.0))
    found["temperature"] = report.measure_temperature(target, draft, prompts, distribution)
    report.close(found, control.disturbance())
    keep(__file__, found, arguments, report.draw, disturbance=control.record())


parser = partial(report.parser, __doc__)

if __name__ == "__main__":
    run(main, parser())
