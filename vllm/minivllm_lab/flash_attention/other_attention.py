"""Other attention implementations to compare a lesson's kernel with: stored scores, the engine's
kernel, PyTorch's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from minivllm.kernels.unified_attention import unified_attention
from minivllm_lab.proof import furthest
from minivllm_lab.timing import median_seconds

Kernel = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Causal attention over q, k, v, all [tokens, heads, head_dim]: the output, like q, and anything."""


def stored_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend causally and naively over many heads, storing the scores of all queries and keys.

    q [queries, heads, head_dim], k, v [keys, heads, head_dim] -> like q. The queries are the last
    positions.
    """
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
    ahead = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(len(k) - len(q) + 1)
    scores.masked_fill_(ahead, -math.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), v)


def compare_with_pool(device: torch.device) -> tuple[float, float]:
    """Run the engine's kernel on K and V in scattered blocks; return its error, and table bytes per
    byte of K and V.

    Tiles determine what moves during one attention; blocks determine where K and V are stored in
    between. The engine's kernel uses both.
    """
    q, k, v = torch.randn(3, 80, 2, 64, device=device)
    expected, order = stored_attention(q.double(), k.double(), v.double()), torch.randperm(8)[:5].tolist()
    caches = torch.zeros(2, 8, 16, 2, 64, device=device)
    caches[:, order] = torch.stack([k, v]).view(2, 5, 16, 2, 64)
    starts, lengths, blocks = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 80], [80], [order]))
    paged = unified_attention(q, *caches, starts, lengths, blocks, 64**-0.5, backend="triton")
    return furthest(paged, expected), blocks.nbytes / (k.nbytes + v.nbytes)


def attention_seconds(device: torch.device, length: int, heads: int, head_dim: int, kernel: Kernel) -> dict[str, float]:
    """Time one causal attention by stored scores, by `kernel` (on a GPU only) and by PyTorch's
    fused attentions.

    On a CPU there is only one fused attention, tiled like FlashAttention.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v = torch.randn(3, length, heads, head_dim, device=device, dtype=dtype)
    ways: dict[str, Callable[[], object]] = {"T × T stored": partial(stored_attention, q, k, v)}
    backends = [SDPBackend.FLASH_ATTENTION]
    if q.is_cuda:
        ways["our kernel"] = partial(kernel, q, k, v)
        backends.append(SDPBackend.CUDNN_ATTENTION)
    batch = [x.transpose(0, 1)[None] for x in (q, k, v)]
    ways |= {f"torch's {backend.name.split('_')[0].lower()}": partial(_fused, *batch, backend) for backend in backends}
    return {way: median_seconds(attend, device=device) for way, attend in ways.items()}


def _fused(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend) -> Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [1, heads, tokens, head_dim]
