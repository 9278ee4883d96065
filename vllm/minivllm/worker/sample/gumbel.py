"""One random draw per row by the Gumbel-max trick, with noise that depends only on seed, position and token id.

Adding Gumbel noise to every logit and taking the argmax draws from their softmax. Since each token has its own noise,
a small change in the logits changes the outcome only if two tokens were nearly tied. Sampling by the cumulative
distribution lacks this property: there a rounding error anywhere shifts every later boundary, and a draw near a
boundary falls to the adjacent token.

The noise is a hash, not a stateful generator: it does not depend on the rest of the batch, survives preemption, and is
the same on a GPU as on a CPU. A row's key is SplitMix64 of seed and position (Steele, Lea, Flood, "Fast splittable
pseudorandom number generators", OOPSLA 2014); a 32-bit hash of key and token id gives the token's uniform number v,
and -log(-log(1 - v)) is its noise.

In vLLM v0.33.0: `vllm/v1/worker/gpu/sample/gumbel.py`.
"""

import functools
from typing import Any

import numpy as np
import torch

from minivllm.platforms.threads import has_numba, run_programs

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def row_keys(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Keys, uint32 [n, 2], from uint64 `seeds` [n] and `positions` [n] of the tokens to be drawn."""
    state = _mix(seeds.astype(np.uint64)) + (positions.astype(np.uint64) + np.uint64(1)) * _GAMMA
    return _mix(state).view(np.uint32).reshape(-1, 2)


def gumbel_max(logits: torch.Tensor, keys: np.ndarray) -> torch.Tensor:
    """Draws one token per row of logits [rows, vocab], float32, using the row's key; returns int64 [rows].

    A row whose logits are all -inf gets token 0, so a request that forbids every token does not affect the others.
    """
    if logits.device.type == "cpu" and has_numba():
        return _compiled(logits.contiguous(), keys)
    signed = torch.from_numpy(keys.view(np.int32)).to(logits.device)
    return (logits - waiting_times(signed, logits.shape[-1]).log_()).argmax(dim=-1)


def waiting_times(keys: torch.Tensor, vocab: int) -> torch.Tensor:
    """-log(1 - v) of every token, float32 [rows, vocab]; the noise is minus its logarithm. `keys` is int32 [rows, 2].

    This is uint32 arithmetic done in int32, since torch does not support uint32 on all devices: products wrap around,
    and the sign bits that a right shift brings in are masked out.
    """
    x = torch.arange(vocab, dtype=torch.int32, device=keys.device) * (0x9E3779B9 - 2**32)
    x = x ^ keys[:, :1]
    x ^= (x >> 16) & 0xFFFF
    x *= 0x7FEB352D
    x ^= keys[:, 1:]
    x ^= (x >> 15) & 0x1FFFF
    x *= 0x846CA68B - 2**32
    x ^= (x >> 16) & 0xFFFF
    v = x.float()
    v += (x < 0) * 2.0**32
    return v.add_(0.5).mul_(-(2.0**-32)).log1p_().neg_()


def _compiled(logits: torch.Tensor, keys: np.ndarray) -> torch.Tensor:
    from minivllm.worker.sample.gumbel_loops import DrawCells

    rows, vocab = logits.shape
    token_ids = torch.from_numpy(logits.numpy().argmax(-1))
    cells = DrawCells(rows, vocab, logits.data_ptr(), keys.ctypes.data, token_ids.data_ptr())
    run_programs(_programs(), cells, most_threads=rows)
    return token_ids


@functools.cache
def _programs() -> Any:
    from minivllm.worker.sample.gumbel_loops import compiled_programs

    return compiled_programs()


def _mix(state: np.ndarray) -> np.ndarray:
    state = (state ^ (state >> np.uint64(30))) * _FIRST
    state = (state ^ (state >> np.uint64(27))) * _SECOND
    return state ^ (state >> np.uint64(31))
