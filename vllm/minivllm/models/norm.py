"""The norm that these models use. In vLLM v0.33.0: `vllm/model_executor/layers/layernorm.py`
(`RMSNorm`).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivllm.kernels.elementwise import add_rms_norm


class RMSNorm(nn.Module):
    """RMS norm: scaling to unit root mean square, in float32, then by a per-element weight (arXiv
    1910.07467).
    """

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Normalise `[..., width]`. With a residual, normalise the sum of both and store the sum
        in `residual`.
        """
        if residual is None:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return add_rms_norm(x, residual, self.weight, self.eps)
