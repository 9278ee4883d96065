"""Matrix products of fp32 models on a CPU: which of two forms runs, and how it is called.

Compiled loops over weights in panels (`numba_linear.py`) on x86 processors where numba is installed, else `F.linear`.
The panels replace the plain weight.

In vLLM v0.33.0: `vllm/_custom_ops.py` (`create_onednn_mm`), called by `vllm/model_executor/layers/utils.py`.
"""

from __future__ import annotations

import functools
import platform
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.kernels.torch_threads import has_numba, run_programs


class PanelLinear:
    """`x @ weight.T + bias` for x `[rows, in]`, weight `[out, in]`, all float32.

    Gated, it is `silu(gate) * up` of the two halves of that, without a bias.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, gated: bool = False) -> None:
        assert not gated or bias is None
        self.parts = 2 if gated else 1
        self.panels = torch.stack([_panels(part) for part in weight.detach().chunk(self.parts)], dim=1)
        self.outputs, self.bias, self.nbytes = len(weight) // self.parts, bias, self.panels.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """`[rows, in]` to `[rows, out]`, of which a gated one has half."""
        x, out = x.contiguous(), torch.empty(len(x), self.outputs)
        addresses = (tensor.data_ptr() for tensor in (x, out, self.panels))
        run_programs(_loops().programs(), (*out.shape, x.shape[1], self.parts, *addresses))
        return out if self.bias is None else out.add_(self.bias)


def can_pack(weight: Tensor) -> bool:
    """Whether there are loops for this weight that gain something over `F.linear`: measured on x86 only."""
    return weight.device.type == "cpu" and weight.dtype is torch.float32 and _is_x86() and has_numba()


def _panels(weight: Tensor) -> Tensor:
    """`[out, in]` to `[panels, in, PANEL]`, the last outputs filled up with zeros."""
    width = _loops().PANEL
    filled = F.pad(weight, (0, 0, 0, -len(weight) % width))
    return filled.view(-1, width, weight.shape[1]).transpose(1, 2).contiguous()


def _is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")


@functools.cache
def _loops() -> Any:
    """numba takes a second to import, so only who needs it does."""
    from minivllm.kernels import numba_linear

    return numba_linear
