"""Linears with slots for adapters: the base's product, plus the contribution of each row's adapter.

    y = base(x);  y += B_slot (A_slot x)   for each row that has an adapter

`LoRALinearMethod` wraps whatever method the linear had: plain, in panels, or quantized. Merged
projections keep one A and one B each (slices). In a tensor-parallel linear, a rank has the same
part as of the base. A linear divided by its outputs has all of A and its rows of B; one that is
divided by its inputs has its columns of A and all of B: its part of A x gives its part of B A x,
which the following all-reduce adds up together with the base's. So nothing more is exchanged.

In vLLM v0.33.0: `vllm/lora/layers/` (`MergedColumnParallelLinearWithLoRA`,
`QKVParallelLinearWithLoRA`, `RowParallelLinearWithLoRA`), `vllm/lora/punica_wrapper/punica_base.py`
(`PunicaWrapperBase.update_metadata`).
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minivllm.kernels.cpu.lora_calls import CompiledLoRALinear, has_loops
from minivllm.kernels.elementwise import silu_and_mul
from minivllm.kernels.lora_linear import lora_linear
from minivllm.kernels.lora_metadata import LoRAKernelMeta
from minivllm.models.linear import Linear, LinearMethod

# An adapter's share of one linear on one rank, in the layout of a slot: for each slice A `[rank,
# in]` and the transposed B `[rank, out]`, or None.
LoRALayerWeights = list[tuple[Tensor, Tensor] | None]


class LoRAStep:
    """The LoRA slot of each row of the current step. All linears read it; the runner sets it before
    each forward pass.

    The last layer continues with only some of the rows: then there are two sets of rows, which are
    told apart by their size.
    """

    def __init__(self) -> None:
        self.metas: tuple[LoRAKernelMeta, ...] = ()
        self.fixed_grid = False  # True: launch for any slots, as a CUDA graph must

    def meta_of(self, x: Tensor) -> LoRAKernelMeta | None:
        """Return the slots of x's rows, or None if none of them has an adapter."""
        rows = x.shape[0]
        # Sets of rows are told apart by their number: all tokens, or only those that the last layer
        # goes on with.
        for meta in self.metas:
            if meta.num_rows == rows:
                return meta if meta.num_active or self.fixed_grid else None
        assert not self.metas, "rows that the step does not know of"
        return None


@dataclass(frozen=True)
class Slice:
    """One stored projection of a linear: it fills outputs `first` to `last` on this rank, which
    holds `part` of it.

    `part` is (index, parts) of the inputs if `divides_inputs`, else of the outputs.
    """

    name: str
    first: int
    last: int
    part: tuple[int, int]
    divides_inputs: bool = False


class LoRALinearMethod(LinearMethod):
    """The method of one linear: its `base` method, and slots of stacked matrices in the layouts of
    `kernels/lora_linear.py`.
    """

    def __init__(
        self,
        base: LinearMethod,
        slices: list[Slice],
        in_features: int,
        *,
        step: LoRAStep,
        ranks: Tensor,
        max_rank: int,
        dtype: torch.dtype,
    ) -> None:
        """Allocate the slots; `ranks` `[slices, slots]`, int32, is on the device, and is written
        when a slot is filled.
        """
        self.base = base
        self.slices = slices
        self.step = step
        self.ranks = ranks
        device = ranks.device
        max_loras = ranks.shape[1]
        outputs = slices[-1].last
        self.lora_a = torch.zeros(len(slices), max_loras, max_rank, in_features, dtype=dtype, device=device)
        self.lora_b = torch.zeros(max_loras, max_rank, outputs, dtype=dtype, device=device)
        self.edges = (0, *(piece.last for piece in slices))  # slices lie side by side in the output
        self.bounds = torch.tensor(self.edges, dtype=torch.int32, device=device)
        # The addresses that the loops take are looked up once, here.
        on_cpu = device.type == "cpu" and has_loops(self.lora_a, self.lora_b, self.edges)
        self._compiled = CompiledLoRALinear(self.lora_a, self.lora_b, self.ranks, self.bounds) if on_cpu else None

    @property
    def nbytes(self) -> int:
        """Return the size of the slots in bytes."""
        return self.lora_a.nbytes + self.lora_b.nbytes

    def apply(self, linear: Linear, x: Tensor) -> Tensor:
        """Multiply by the base weights, and add the adapters' products."""
        y = self.base.apply(linear, x)
        meta = self.step.meta_of(x)
        if meta is not None:
            self._add(y, x, meta)
        return y

    def apply_gated(self, linear: Linear, x: Tensor) -> Tensor:
        """Multiply and apply the activation. The base may fuse the two only if no adapter comes in
        between.
        """
        meta = self.step.meta_of(x)
        if meta is None:
            return self.base.apply_gated(linear, x)
        y = self.base.apply(linear, x)
        self._add(y, x, meta)
        return silu_and_mul(y)

    def set_lora(self, slot: int, weights: LoRALayerWeights | None) -> np.ndarray:
        """Copy an adapter's matrices into a slot. Return the rank of each slice `[slices]`, 0
        for none.
        """
        # A slot keeps numbers of an earlier adapter beyond these ranks; nothing reads them.
        ranks = np.zeros(len(self.slices), np.int32)
        pairs = weights or [None] * len(self.slices)
        for index, (piece, pair) in enumerate(zip(self.slices, pairs, strict=True)):
            if pair is not None:
                a, b = pair
                ranks[index] = len(a)
                self.lora_a[index, slot, : len(a)].copy_(a, non_blocking=True)  # [rank, in]
                # [rank, slice's outputs]
                self.lora_b[slot, : len(b), piece.first : piece.last].copy_(b, non_blocking=True)
        return ranks

    def _add(self, y: Tensor, x: Tensor, meta: LoRAKernelMeta) -> None:
        if self._compiled is not None and x.dtype is self._compiled.dtype and meta.num_active:
            self._compiled(y, x, meta)
            return
        stacked = self.lora_a, self.lora_b, self.ranks, self.bounds
        lora_linear(y, x, *stacked, meta, edges=self.edges, fixed_grid=self.step.fixed_grid)
