"""Matmuls on a CPU with weights in panels: the layout, and how the loops are called.

The loops (`panel_linear_loops.py`) are for fp32 and bf16, on x86 processors where numba is
installed. `linear_choice.py` decides by measurement which linears use them. Measured on two cores
(AMD Zen 4, torch 2.15), the fastest of calls in turns, µs, weight [1376, 256] / [4096, 4096]:

    rows                           1               16               128              512
    fp32, packed for oneDNN    35 / 2,523      78 / 3,377     434 / 20,116   1,708 / 78,278
    fp32, panels               22 / 1,402      65 / 2,890     436 / 20,596   1,764 / 80,892
    bf16, F.linear             32 /   985      74 / 3,008     259 / 11,218     950 / 40,860
    bf16, panels               17 /   972      39 / 1,619     227 / 10,634     895 / 40,853

With many rows this is about as fast, and with few rows it is faster, especially in small matmuls.

In vLLM v0.33.0: `vllm/_custom_ops.py` (`create_onednn_mm`), called by
`vllm/model_executor/layers/utils.py`.
"""

from __future__ import annotations

import platform
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.kernels.cpu.cells import PanelLinearCells
from minivllm.kernels.cpu.loops import ELEMENTS, loops
from minivllm.platforms.threads import has_numba, run_programs


class PanelLinear:
    """Computes `x @ weight.T + bias` for x `[rows, in]` and a weight `[out, in]` that `can_pack`
    accepts.

    A gated one computes `silu(gate) * up` of the matmul's two halves.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, gated: bool = False) -> None:
        self.parts = 2 if gated else 1
        self.outputs = len(weight) // self.parts
        bias = torch.zeros(len(weight)) if bias is None else bias.detach().float()
        self.panels = _pairs(_panels(weight.detach(), self.parts))
        self.bias = _panels(bias.unsqueeze(1), self.parts)

    def __call__(self, x: Tensor, activate: bool = True) -> Tensor:
        """Multiply: `[rows, in]` to `[rows, out]`, or `[rows, out / 2]` if gated and with the
        activation.
        """
        gated = activate and self.parts == 2
        rows, width = x.shape
        x = x.contiguous()
        out = torch.empty(rows, self.outputs if gated else self.outputs * self.parts, dtype=x.dtype)
        addresses = (x.data_ptr(), out.data_ptr(), self.panels.data_ptr(), self.bias.data_ptr())
        cells = PanelLinearCells(0, rows, self.outputs, width, self.parts, gated, *addresses)
        run_programs(_loops().programs_for(ELEMENTS[x.dtype]), cells)
        return out


def can_pack(weight: Tensor) -> bool:
    """Return whether the loops support this weight and are faster than `F.linear`, as measured
    on x86.
    """
    if weight.device.type != "cpu" or platform.machine().lower() not in ("x86_64", "amd64") or not has_numba():
        return False
    in_pairs = weight.dtype is torch.bfloat16 and weight.shape[1] % 2 == 0
    return weight.dtype is torch.float32 or in_pairs


def _panels(weight: Tensor, parts: int) -> Tensor:
    """Lay out `[out, in]` as `[panels, parts, in, PANEL]`, each part padded with zero outputs."""
    size = _loops().PANEL
    width = weight.shape[1]
    # [parts, outputs, in], padded to whole panels.
    filled = F.pad(weight.view(parts, -1, width), (0, 0, 0, -len(weight) // parts % size))
    return filled.view(parts, -1, size, width).permute(1, 0, 3, 2).contiguous()


def _pairs(panels: Tensor) -> Tensor:
    """Interleave bfloat16 panels so that two inputs of an output are adjacent: `[panels, parts,
    in / 2, PANEL, 2]`.
    """
    if panels.dtype is not torch.bfloat16:
        return panels
    return panels.unflatten(2, (-1, 2)).transpose(3, 4).contiguous()


def _loops() -> Any:
    return loops("panel_linear_loops")
