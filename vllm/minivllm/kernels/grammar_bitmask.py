"""Masking the tokens that a grammar does not allow.

    apply_grammar_bitmask    logits[rows[i], t] = −inf    where bit t of bitmask[i] is 0

Layouts
    logits    [rows, vocab], float, rows contiguous; changed in place
    bitmask   int32 [masked, ceil(vocab / 32)]: bit i of word w is token 32 w + i; those beyond the vocabulary are ignored
    rows      int32 [masked]: the row of logits that each row of the bitmask is for, none twice

Grid: a program for each (masked row, 2,048 tokens), which are 64 words. It loads its words and
writes the −inf; logits are not read, and rows that have no grammar are neither read nor written.

Must move: masked × vocab / 8 bytes of bitmask, and 4 bytes for each token that is not allowed: at
most 1/32 of the logits read and the logits written once. A mask of bytes would be eight times as
large, and it crosses from host to device in each step.

On a CPU numpy unpacks the words.

In vLLM v0.33.0: `vllm/v1/worker/gpu/structured_outputs.py` (`_apply_grammar_bitmask_kernel`).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from minivllm.kernels.backend import choose_backend
from minivllm.platforms.triton_utils import tl, triton

WORDS = 64  # per program


@triton.jit
def apply_grammar_bitmask_kernel(
    logits, bitmask, rows, row_stride, NUM_WORDS: tl.constexpr, VOCAB: tl.constexpr, WORDS: tl.constexpr
):
    """Grid (masked rows, chunks of words)."""
    masked = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + masked).to(tl.int64)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    bits = tl.load(bitmask + masked * NUM_WORDS + word, mask=word < NUM_WORDS, other=-1)
    place = tl.arange(0, 32)
    token = word[:, None] * 32 + place[None, :]
    allowed = ((bits[:, None] >> place[None, :]) & 1) == 1
    nothing = tl.full((WORDS, 32), float("-inf"), logits.dtype.element_ty)
    tl.store(logits + row * row_stride + token, nothing, mask=(token < VOCAB) & ~allowed)


def apply_grammar_bitmask(logits: Tensor, bitmask: Tensor, rows: Tensor, *, backend: str | None = None) -> None:
    """Set the logits of tokens that are not allowed to minus infinity, in place.

    logits [rows, vocab]; bitmask [masked, ceil(vocab / 32)], int32; rows [masked], int32, each at
    most once.
    """
    masked, num_words = bitmask.shape
    if not masked:
        return
    if choose_backend(backend, logits) == "triton":
        apply_grammar_bitmask_kernel[(masked, triton.cdiv(num_words, WORDS))](
            logits, bitmask, rows, logits.stride(0), NUM_WORDS=num_words, VOCAB=logits.shape[1], WORDS=WORDS
        )
        return
    words = bitmask.numpy().astype("<i4", copy=False).view(np.uint8)  # [masked, 4 × words]
    for row, packed in zip(rows.tolist(), words, strict=True):
        allowed = np.unpackbits(packed, count=logits.shape[1], bitorder="little")
        logits[row].masked_fill_(torch.from_numpy(allowed == 0), -torch.inf)
