"""Matrix products with weights that oneDNN has laid out once, for models in fp32 on a CPU.

`F.linear` calls MKL, which brings the weight into its own layout at every call; oneDNN takes one that was packed before.
The packed form replaces the plain one. Measured on two cores (AMD Zen 4, torch 2.15), µs for all 17 products of the
embedded model one after another, as in a step (a single one, repeated, stays in the core's own cache and tells less):

    rows            1          2          4          8
    F.linear      961      1,560      1,966      1,785
    packed        476        495        557        695

and on one core, µs a call, weight [1376, 256] / [4096, 256]:

    rows           16          128           1,024
    F.linear    168 / 550   1,069 / 4,389    9,927 / 31,409
    packed      132 / 348     895 / 2,999    7,608 / 21,618

In vLLM v0.33.0: `vllm/_custom_ops.py` (`create_onednn_mm`), called by `vllm/model_executor/layers/utils.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor


class PackedLinear:
    """`x @ weight.T + bias` for x [rows, in] float32, weight [out, in]."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
        self.bias, self.nbytes = bias, weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] to [rows, out]."""
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


def can_pack(weight: Tensor) -> bool:
    """Whether this torch has oneDNN's packed products, and the weight a type that they gain from."""
    on_cpu = weight.device.type == "cpu" and weight.dtype is torch.float32
    return on_cpu and torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
