"""Matrix products with weights that oneDNN has laid out once, for models in fp32 on a CPU.

`F.linear` calls MKL, which brings the weight into its own layout at every call; oneDNN multiplies 16 rows and more
faster with a weight that it packed before. For few rows its calls cost more than they save, so small weights are also
kept as they were. Measured on one core (AMD Zen 4, torch 2.15), µs a call, weight [1376, 256] / [4096, 256]:

    rows            1          16          128           1,024
    F.linear    45 / 129   168 / 550   1,069 / 4,389    9,927 / 31,409
    packed      51 / 101   132 / 348     895 / 2,999    7,608 / 21,618

In vLLM v0.33.0: `vllm/_custom_ops.py` (`create_onednn_mm`), called by `vllm/model_executor/layers/utils.py`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

PACKED_FROM = 8  # rows
KEEP_PLAIN_BELOW = 2**21  # elements; a larger weight is not held twice


class PackedLinear:
    """`x @ weight.T + bias` for x [rows, in] float32, weight [out, in]."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
        self.plain = weight if weight.numel() < KEEP_PLAIN_BELOW else None
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] to [rows, out]."""
        if self.plain is not None and len(x) < PACKED_FROM:
            return F.linear(x, self.plain, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


def can_pack(weight: Tensor) -> bool:
    """Whether this torch has oneDNN's packed products, and the weight a type that they gain from."""
    on_cpu = weight.device.type == "cpu" and weight.dtype is torch.float32
    return on_cpu and torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
