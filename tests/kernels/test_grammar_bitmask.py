"""The mask of grammars: against bits read one by one, kernel against twin, compiled for every
target.
"""

import itertools
import math

import pytest
import torch
from kernels.harness import DTYPES, assert_compiles, assert_twin

from minivllm.kernels.grammar_bitmask import WORDS, apply_grammar_bitmask, apply_grammar_bitmask_kernel

VOCABULARIES = (1, 31, 32, 33, 4096, 32 * WORDS - 1, 32 * WORDS + 40)
SIGN = -(2**31)


def random_case(vocab, num_rows=5, rows=(3, 0), dtype=torch.float32):
    """Return logits, a bitmask for some rows, with random bits beyond the vocabulary too, and those
    rows.
    """
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn((num_rows, vocab), generator=generator).to(dtype)
    words = torch.randint(SIGN, -SIGN, (len(rows), math.ceil(vocab / 32)), generator=generator).to(torch.int32)
    return logits, words, torch.tensor(rows, dtype=torch.int32)


def masked(logits, bitmask, rows):
    """Return logits masked by testing every token's bit."""
    expected = logits.clone()
    for row, words in zip(rows.tolist(), bitmask.tolist(), strict=True):
        for token in range(logits.shape[1]):
            if not words[token // 32] >> (token % 32) & 1:
                expected[row, token] = -torch.inf
    return expected


def test_rows_without_a_grammar_keep_every_bit(device):
    """Rows beside a masked one stay untouched, even in a wider table; their NaN shows that nothing
    was computed.
    """
    wide = torch.full((4, 200), torch.nan)
    result = wide.to(device)[:, :100]
    nothing = torch.zeros(1, 4, dtype=torch.int32)
    apply_grammar_bitmask(result, nothing.to(device), torch.tensor([2], dtype=torch.int32).to(device), backend="triton")
    assert (result[2] == -torch.inf).all()
    assert result[[0, 1, 3]].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_and_twin_are_alike(device, dtype):
    for vocab, masks in itertools.product(VOCABULARIES, [(3, 0), ()]):
        logits, bitmask, rows = random_case(vocab, rows=masks, dtype=dtype)
        kernel, twin = logits.to(device), logits.clone()
        apply_grammar_bitmask(kernel, bitmask.to(device), rows.to(device), backend="triton")
        apply_grammar_bitmask(twin, bitmask, rows, backend="cpu")
        assert_twin(kernel, twin, scale=0)
        assert torch.equal(twin, masked(logits, bitmask, rows))


def test_compiled_for_every_target():
    arguments = {"logits": "*fp32", "bitmask": "*i32", "rows": "*i32", "row_stride": 128256}
    sizes = {"NUM_WORDS": 128256 // 32, "VOCAB": 128256, "WORDS": WORDS}
    assert_compiles(apply_grammar_bitmask_kernel, arguments | sizes)
