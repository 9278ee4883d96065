"""Verifying drafts: `rejection_sample` decides which are accepted, and which token follows them
(lesson 07).

For a request with drafts x_1 ... x_n, row i of the target's logits follows its last known token
and i drafts:

    greedy                      x is accepted if it is the argmax; else the argmax replaces it
    random, x a point mass      accepted if equal to a Gumbel draw from p, which else replaces it: same as without drafts
    random, x drawn from q      x is accepted if u < p(x) / q(x); else argmax of max(p - q, 0) / E replaces it
    after the last draft        the argmax, or a draw from p

p and q are the softmax of the target's and the draft's logits, u the row's `decision_number`, E
each token's waiting time (`noise.py`). A race of waiting times E / w is won by a token in
proportion to its weight w, so no sum of max(p - q, 0) is needed. A draft of -1 was not drawn: there
the point-mass rule applies, and rejects it.

Layouts
    target_logits [sum of (drafts + 1), vocab], draft_logits [sum of drafts, vocab]: fp32, rows contiguous
    starts        int32 [requests + 1]: each request's first row of target_logits; row i verifies draft i - request
    partials      of (row, chunk of the vocabulary), [rows, chunks]: fp32 scores and int32 tokens of the best; fp32
                  largest and sums [2, rows, chunks] of p (first) and q: the largest logit, and the
                  sum of exp(logit - largest)

Grid
    reduce_rows   (requests, max drafts + 1, chunks): the best score of a chunk, or its parts of two softmax sums
    walk_drafts   (requests,): combines the chunks, draft by draft, up to the first rejection
    recover       (requests, chunks), if drafts were drawn: the best of max(p - q, 0) / E, where something was rejected
    replace       (requests,), likewise: writes the best of all chunks to the output

Must move: each row of logits read once, 4 × vocab × (drafts + requests) bytes of the target and 4 ×
vocab × drafts of the draft; recovery reads one more row of each, since p and q are known only when
their sums are. Partials are 8 to 16 bytes for each 16 KB read. Arithmetic: 10 integer operations
and two logarithms for each token that is drawn, an exponential for each of p and q that is summed
up. Rows after the first rejection are read in vain, but to wait for it would leave most of a GPU idle,
since requests are few.

A logit that is NaN or infinity excludes its token, as -inf does: such a row gets some token of the
vocabulary, no other row is affected, and the engine ends its request (`nonfinite_req_ids`).

In vLLM v0.33.0: `vllm/v1/worker/gpu/spec_decode/rejection_sampler_utils.py`
(`_compute_local_logits_stats_kernel`, `_rejection_kernel`, `_resample_kernel`,
`_insert_resampled_kernel`).

The CPU twin is in `cpu/rejection_loops.py`; it stops at the first rejection.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minivllm.kernels.backend import choose_backend
from minivllm.kernels.cpu.rejection_calls import reject_cpu
from minivllm.kernels.noise import decision_number, waiting_time
from minivllm.kernels.rejection_arguments import RejectionArguments
from minivllm.platforms.triton_utils import tl, triton

CHUNK = 4096  # tokens per program
# These arguments change from step to step, and Triton must not compile a kernel for each of their
# values.
CHANGING = ("num_rows", "width")


@triton.jit
def load_logits(row_of_logits, token, VOCAB: tl.constexpr):
    """Load the logits of one row; tokens beyond the vocabulary, NaNs and positive infinities become
    -inf.
    """
    logits = tl.load(row_of_logits + token, mask=token < VOCAB, other=float("-inf"))
    return tl.where(logits < float("inf"), logits, float("-inf"))


@triton.jit
def load_key(keys, row):
    """Load the two halves of a row's key."""
    return tl.load(keys + 2 * row), tl.load(keys + 2 * row + 1)


@triton.jit
def load_drawn(draft_token_ids, is_greedy, starts, request, place, VOCAB: tl.constexpr, HAS_Q: tl.constexpr):
    """Return the draft that a row verifies if it was drawn from logits, else -1."""
    drawn = tl.full((), -1, tl.int32)
    if HAS_Q:
        start, end = tl.load(starts + request), tl.load(starts + request + 1)
        if (tl.load(is_greedy + request) == 0) & (start + place + 1 < end):
            drawn = tl.load(draft_token_ids + start + place - request)
    return tl.where(drawn < VOCAB, drawn, -1)


@triton.jit
def store_sum(largest, sums, at, logits):
    """Store a chunk's largest logit, and the sum of exp(logit - largest)."""
    top = tl.max(logits, 0)
    base = tl.where(top > float("-inf"), top, 0.0)
    tl.store(largest + at, top)
    tl.store(sums + at, tl.sum(tl.exp(logits - base), 0))


@triton.jit
def log_sum(largest, sums, row, CHUNKS: tl.constexpr, PADDED_CHUNKS: tl.constexpr):
    """Return the logarithm of the sum of a row's exponentials; infinity if all are 0, so that
    every probability is 0.
    """
    chunk = tl.arange(0, PADDED_CHUNKS)
    tops = tl.load(largest + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=float("-inf"))
    parts = tl.load(sums + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=0.0)
    top = tl.max(tops, 0)
    base = tl.where(top > float("-inf"), top, 0.0)
    total = tl.sum(parts * tl.exp(tops - base), 0)
    return tl.where(total > 0.0, base + tl.log(tl.where(total > 0.0, total, 1.0)), float("inf"))


@triton.jit
def store_best(scores, tokens, at, score, first_token):
    """Store a chunk's best score and its token, the first one in a tie."""
    best, index = tl.max(score, 0, return_indices=True)
    tl.store(scores + at, best)
    tl.store(tokens + at, first_token + index)


@triton.jit
def load_best(scores, tokens, row, CHUNKS: tl.constexpr, PADDED_CHUNKS: tl.constexpr):
    """Return a row's best score and its token."""
    chunk = tl.arange(0, PADDED_CHUNKS)
    parts = tl.load(scores + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=float("-inf"))
    best, index = tl.max(parts, 0, return_indices=True)
    return best, tl.load(tokens + row * CHUNKS + index)


@triton.jit(do_not_specialize=CHANGING)
def reduce_rows_kernel(
    target_logits,
    draft_logits,
    draft_token_ids,
    starts,
    is_greedy,
    keys,
    scores,
    tokens,
    largest,
    sums,
    num_rows,
    target_stride,
    draft_stride,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_Q: tl.constexpr,
):
    """Grid (requests, max drafts + 1, chunks)."""
    request = tl.program_id(0)
    place = tl.program_id(1)
    chunk = tl.program_id(2)
    chunks = tl.num_programs(2)
    row = tl.load(starts + request) + place
    if row < tl.load(starts + request + 1):
        token = chunk * CHUNK + tl.arange(0, CHUNK)
        at = row * chunks + chunk
        logits = load_logits(target_logits + row.to(tl.int64) * target_stride, token, VOCAB)
        drawn = load_drawn(draft_token_ids, is_greedy, starts, request, place, VOCAB, HAS_Q)
        if drawn >= 0:
            store_sum(largest, sums, at, logits)
            # Every request before this row has one row more than drafts.
            drawn_from = load_logits(draft_logits + (row - request).to(tl.int64) * draft_stride, token, VOCAB)
            store_sum(largest, sums, num_rows * chunks + at, drawn_from)
        else:
            if tl.load(is_greedy + request) == 0:
                first, second = load_key(keys, row)
                logits -= tl.log(waiting_time(token, first, second))
            store_best(scores, tokens, at, logits, chunk * CHUNK)


@triton.jit(do_not_specialize=CHANGING)
def walk_drafts_kernel(
    out,
    rejected,
    normalizers,
    target_logits,
    draft_logits,
    draft_token_ids,
    starts,
    is_greedy,
    keys,
    scores,
    tokens,
    largest,
    sums,
    num_rows,
    target_stride,
    draft_stride,
    width,
    PADDED_WIDTH: tl.constexpr,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    PADDED_CHUNKS: tl.constexpr,
    HAS_Q: tl.constexpr,
):
    """Grid (requests,). `rejected` [requests]: the row to recover from, or -1; `normalizers`
    [requests, 2]: its log sums.

    A draft that was drawn and rejected remains in the output until it is replaced.
    """
    request = tl.program_id(0)
    start, end = tl.load(starts + request), tl.load(starts + request + 1)
    column = tl.arange(0, PADDED_WIDTH)
    kept = tl.full((PADDED_WIDTH,), -1, tl.int32)
    row_rejected = tl.full((), -1, tl.int32)
    place = tl.full((), 0, tl.int32)
    accepted = tl.full((), 1, tl.int32)
    while accepted == 1:
        row = start + place
        drawn = load_drawn(draft_token_ids, is_greedy, starts, request, place, VOCAB, HAS_Q)
        if drawn >= 0:
            sum_p = log_sum(largest, sums, row, CHUNKS, PADDED_CHUNKS)
            sum_q = log_sum(largest, sums, num_rows + row, CHUNKS, PADDED_CHUNKS)
            log_p = load_logits(target_logits + row.to(tl.int64) * target_stride, drawn, VOCAB) - sum_p
            log_q = load_logits(draft_logits + (row - request).to(tl.int64) * draft_stride, drawn, VOCAB) - sum_q
            possible = log_q > float("-inf")  # else it was not drawn from these logits
            first, second = load_key(keys, row)
            ratio = tl.exp(log_p - tl.where(possible, log_q, 0.0))
            accepted = (possible & (decision_number(first, second) < ratio)).to(tl.int32)
            token = drawn
            row_rejected = tl.where(accepted == 1, -1, row)
            tl.store(normalizers + 2 * request, sum_p)
            tl.store(normalizers + 2 * request + 1, tl.where(possible, sum_q, float("inf")))
        else:
            draft = tl.load(draft_token_ids + row - request, mask=row + 1 < end, other=-1)
            _, token = load_best(scores, tokens, row, CHUNKS, PADDED_CHUNKS)
            accepted = (token == draft).to(tl.int32)
        kept = tl.where(column == place, token, kept)
        place += 1
    tl.store(rejected + request, row_rejected)
    tl.store(out + request * width + column, kept.to(tl.int64), mask=column < width)


@triton.jit
def recover_kernel(
    target_logits,
    draft_logits,
    rejected,
    normalizers,
    keys,
    scores,
    tokens,
    target_stride,
    draft_stride,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Grid (requests, chunks)."""
    request = tl.program_id(0)
    chunk = tl.program_id(1)
    chunks = tl.num_programs(1)
    row = tl.load(rejected + request)
    if row >= 0:
        token = chunk * CHUNK + tl.arange(0, CHUNK)
        logits = load_logits(target_logits + row.to(tl.int64) * target_stride, token, VOCAB)
        drawn_from = load_logits(draft_logits + (row - request).to(tl.int64) * draft_stride, token, VOCAB)
        sum_p, sum_q = tl.load(normalizers + 2 * request), tl.load(normalizers + 2 * request + 1)
        first, second = load_key(keys, row)
        # The residual, not normalized.
        left = tl.maximum(tl.exp(logits - sum_p) - tl.exp(drawn_from - sum_q), 0.0)
        store_best(scores, tokens, row * chunks + chunk, left / waiting_time(token, first, second), chunk * CHUNK)


@triton.jit(do_not_specialize=CHANGING)
def replace_kernel(out, rejected, starts, scores, tokens, width, CHUNKS: tl.constexpr, PADDED_CHUNKS: tl.constexpr):
    """Grid (requests,). Where max(p - q, 0) is 0 for all tokens, p and q differ only by rounding,
    so the draft stays.
    """
    request = tl.program_id(0)
    row = tl.load(rejected + request)
    if row >= 0:
        best, token = load_best(scores, tokens, row, CHUNKS, PADDED_CHUNKS)
        if best > 0.0:
            tl.store(out + request * width + row - tl.load(starts + request), token.to(tl.int64))


def rejection_sample(arguments: RejectionArguments, *, backend: str | None = None) -> Tensor:
    """Return each request's accepted drafts and the token after them, padded with -1: int64
    [requests, max drafts + 1].

    `num_drafts` is read on the host: if it is on a GPU, the host waits for it. `backend` "triton"
    or "cpu"; None follows the device.
    """
    if choose_backend(backend, arguments.target_logits) == "cpu":
        return reject_cpu(arguments)
    counts = arguments.num_drafts.cpu().long()
    device = arguments.target_logits.device
    starts = torch.zeros(len(counts) + 1, dtype=torch.int32)
    starts[1:] = (counts + 1).cumsum(0)
    width = int(counts.max()) + 1 if len(counts) else 1
    out = torch.empty(len(counts), width, dtype=torch.int64, device=device)
    if len(counts):
        launch(out, arguments.to(device), starts.to(device, non_blocking=True))
    return out


def launch(out: Tensor, arguments: RejectionArguments, starts: Tensor) -> None:
    """Run the kernels, which write all of `out` [requests, max drafts + 1]. All tensors are on one
    device; `starts` as above.
    """
    target_logits, draft_token_ids, _, draft_logits, is_greedy, keys = arguments
    requests, width = out.shape
    rows, vocab = target_logits.shape
    device = out.device
    chunks = triton.cdiv(vocab, CHUNK)
    has_q = draft_logits is not None
    if draft_logits is None:
        draft_logits = target_logits  # a pointer that is not read
    scores, sums, largest = (torch.empty(n, rows, chunks, device=device) for n in (1, 2, 2))
    tokens = torch.empty(rows, chunks, dtype=torch.int32, device=device)
    rejected = torch.empty_like(starts[1:])
    normalizers = torch.empty(requests, 2, device=device)
    strides = target_logits.stride(0), draft_logits.stride(0)
    sizes = {"CHUNKS": chunks, "PADDED_CHUNKS": triton.next_power_of_2(chunks)}

    inputs = target_logits, draft_logits, draft_token_ids, starts, is_greedy, keys
    parts = scores, tokens, largest, sums
    reduce_rows_kernel[(requests, width, chunks)](
        *inputs, *parts, rows, *strides, VOCAB=vocab, CHUNK=CHUNK, HAS_Q=has_q, num_warps=8
    )
    walk_drafts_kernel[(requests,)](
        out, rejected, normalizers, *inputs, *parts, rows, *strides, width,
        PADDED_WIDTH=triton.next_power_of_2(width), VOCAB=vocab, HAS_Q=has_q, num_warps=1, **sizes,
    )  # fmt: skip
    if has_q:
        recover_kernel[(requests, chunks)](
            target_logits, draft_logits, rejected, normalizers, keys, scores, tokens, *strides,
            VOCAB=vocab, CHUNK=CHUNK, num_warps=8,
        )  # fmt: skip
        replace_kernel[(requests,)](out, rejected, starts, scores, tokens, width, num_warps=1, **sizes)
