"""The noise of random draws: a hash of a row's key and a token id, in torch and in Triton.

`cpu/gumbel_loops.py` is the numba version. All three give the same 32 bits and, from them, the same
float32 v between 0 and 1. The waiting time E = -log(1 - v) is then exponential, and -log(E) is
Gumbel noise.

`DECISION` is no token's id: hashing it gives a row one number that is independent of the
noise of its tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minivllm.platforms.triton_utils import tl, triton

DECISION = -1


def waiting_times(keys: Tensor, vocab: int) -> Tensor:
    """Return -log(1 - v) for every token, float32 [rows, vocab]; Gumbel noise is minus its
    logarithm. `keys` is int32 [rows, 2].
    """
    bits = hashed(keys, torch.arange(vocab, dtype=torch.int32, device=keys.device))
    return uniform_numbers(bits).neg_().log1p_().neg_()


def uniform_numbers(bits: Tensor) -> Tensor:
    """Return float32 v, from 0 to 1, for int32 `bits`.

    Both halves are exact in float32, so their sum is rounded only once, just as when an unsigned
    integer is converted.
    """
    v = ((bits >> 16) & 0xFFFF).float().mul_(65536.0).add_((bits & 0xFFFF).float())
    return v.add_(0.5).mul_(2.0**-32)


def decision_numbers(keys: Tensor) -> Tensor:
    """Return one uniform number per row, float32 [rows]: a multiple of 2^-24, from 0 to below 1.
    `keys` is int32 [rows, 2].
    """
    x = hashed(keys, torch.full((1,), DECISION, dtype=torch.int32, device=keys.device))
    return ((x[:, 0] >> 8) & 0xFFFFFF).float() * 2.0**-24


def hashed(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Return the hash bits of each row and token, int32 [rows, tokens]; `keys` is int32 [rows, 2],
    `token_ids` int32 [tokens].

    This is uint32 arithmetic done in int32, since torch does not support uint32 on all devices:
    products wrap around, and the sign bits that a right shift brings in are masked out.
    """
    x = token_ids * (0x9E3779B9 - 2**32)
    x = x ^ keys[:, :1]
    x ^= (x >> 16) & 0xFFFF
    x *= 0x7FEB352D
    x ^= keys[:, 1:]
    x ^= (x >> 15) & 0x1FFFF
    x *= 0x846CA68B - 2**32
    x ^= (x >> 16) & 0xFFFF
    return x


@triton.jit
def hashed_bits(token, first, second):
    """Compute `hashed` in a kernel: return uint32 for int32 token ids and the two int32 halves of a
    key.
    """
    x = (token.to(tl.uint32, bitcast=True) * 0x9E3779B9) ^ first.to(tl.uint32, bitcast=True)
    x ^= x >> 16
    x = (x * 0x7FEB352D) ^ second.to(tl.uint32, bitcast=True)
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def uniform_number(token, first, second):
    """Return a token's v, between 0 and 1."""
    return (hashed_bits(token, first, second).to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2^-32


@triton.jit
def waiting_time(token, first, second):
    """Return -log(1 - v), accurate to the last digit even where v is small."""
    v = uniform_number(token, first, second)
    rest = 1.0 - v  # rounded: `taken`, what was really subtracted, makes up for that
    taken = 1.0 - rest
    return tl.where(taken > 0.0, -tl.log(rest) * (v / tl.where(taken > 0.0, taken, 1.0)), v)


@triton.jit
def decision_number(first, second):
    """Compute `decision_numbers` in a kernel, for one row."""
    bits = hashed_bits(tl.full((), -1, tl.int32), first, second)
    return (bits >> 8).to(tl.float32) * 5.9604644775390625e-08  # 2^-24
