"""The noise of random draws: a hash of a row's key and a token id, in torch and in Triton.

`cpu/gumbel_loops.py` has it for numba. All of them give the same 32 bits, and the same float32 v from 0 to 1 of them. The
waiting time E = -log(1 - v) is then exponential, and -log(E) is Gumbel noise.

`DECISION` is the id of no token: the hash with it is a row's one number that is independent of the noise of its tokens.
"""

from __future__ import annotations

import torch

DECISION = -1


def waiting_times(keys: torch.Tensor, vocab: int) -> torch.Tensor:
    """-log(1 - v) of every token, float32 [rows, vocab]; the noise is minus its logarithm. `keys` is int32 [rows, 2]."""
    x = hashed(keys, torch.arange(vocab, dtype=torch.int32, device=keys.device))
    # Both halves are exact in float32, so their sum is rounded once, as it is where an unsigned number is converted.
    v = ((x >> 16) & 0xFFFF).float().mul_(65536.0).add_((x & 0xFFFF).float())
    return v.add_(0.5).mul_(-(2.0**-32)).log1p_().neg_()


def decision_numbers(keys: torch.Tensor) -> torch.Tensor:
    """One uniform number of each row, float32 [rows], a multiple of 2^-24 from 0 to below 1. `keys` is int32 [rows, 2]."""
    x = hashed(keys, torch.full((1,), DECISION, dtype=torch.int32, device=keys.device))
    return ((x[:, 0] >> 8) & 0xFFFFFF).float() * 2.0**-24


def hashed(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """The bits of each row and token, int32 [rows, tokens]; `keys` int32 [rows, 2], `token_ids` int32 [tokens].

    This is uint32 arithmetic done in int32, since torch does not support uint32 on all devices: products wrap around,
    and the sign bits that a right shift brings in are masked out.
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
