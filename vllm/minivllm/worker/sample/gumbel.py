"""One random draw per row by the Gumbel-max trick, with noise that depends only on seed, position
and token id.

Adding Gumbel noise to every logit and taking the argmax draws from their softmax. Since each token
has its own noise, a small change in the logits changes the outcome only if two tokens were nearly
tied. Sampling by the cumulative distribution lacks this property: there a rounding error anywhere
shifts every later boundary, and a draw near a boundary falls to the adjacent token.

The noise is a hash, not a stateful generator: it does not depend on the rest of the batch, survives
preemption, and is the same on a GPU as on a CPU. A row's key is SplitMix64 of seed and position
(Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014); a 32-bit hash
of key and token id (`kernels/noise.py`) gives the token's uniform number v, and -log(-log(1 - v))
is its noise.

In vLLM v0.33.0: `vllm/v1/worker/gpu/sample/gumbel.py`.
"""

import numpy as np
import torch

from minivllm.kernels.cpu.cells import DrawCells
from minivllm.kernels.cpu.loops import loops
from minivllm.kernels.noise import waiting_times
from minivllm.platforms.device import on_device
from minivllm.platforms.threads import has_numba, run_programs

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_DRAFTS = np.uint64(0xD1B54A32D192ED03)


def row_keys(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return noise keys, uint32 [n, 2], made from uint64 `seeds` [n] and the `positions` [n] of the
    tokens to draw.
    """
    # SplitMix64, jumped to this position: a key does not depend on the draws before.
    state = _mix(seeds.astype(np.uint64)) + (positions.astype(np.uint64) + np.uint64(1)) * _GAMMA
    return _mix(state).view(np.uint32).reshape(-1, 2)  # two halves of 32 bits


def draft_keys(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return keys like `row_keys`, for drafts that a model draws for these positions.

    Whether a draft is accepted, and what replaces it, must not depend on the noise that it was
    drawn with.
    """
    return row_keys(seeds.astype(np.uint64) ^ _DRAFTS, positions)


def gumbel_max(logits: torch.Tensor, keys: np.ndarray) -> torch.Tensor:
    """Draw one token per row of logits [rows, vocab], float32, using the row's key; return int64
    [rows].

    A row whose logits are all -inf gets token 0, so a request that forbids every token does not
    affect the others.
    """
    if logits.device.type == "cpu" and has_numba():
        return _compiled(logits.contiguous(), keys)
    signed = on_device(keys.view(np.int32), logits.device)
    return (logits - waiting_times(signed, logits.shape[-1]).log_()).argmax(dim=-1)


def _compiled(logits: torch.Tensor, keys: np.ndarray) -> torch.Tensor:
    rows, vocab = logits.shape
    token_ids = torch.from_numpy(logits.numpy().argmax(-1))  # the loops replace them by the drawn tokens
    cells = DrawCells(0, rows, vocab, logits.data_ptr(), keys.ctypes.data, token_ids.data_ptr())
    run_programs(loops("gumbel_loops").compiled_programs(), cells, most_threads=rows)
    return token_ids


def _mix(state: np.ndarray) -> np.ndarray:
    state = (state ^ (state >> np.uint64(30))) * _FIRST
    state = (state ^ (state >> np.uint64(27))) * _SECOND
    return state ^ (state >> np.uint64(31))
