"""Weight-only quantization of linears to 8 or 4 bits: activations and sums keep their types (w8a16,
w4a16).

Only the projections inside the layers are quantized. A step reads one row of the embedding per
token, so fewer bits would save no time; the head's error would go straight into the logits, and the
head is often the same tensor as the embedding. Norms are just vectors. Quantized checkpoints leave
the same tensors unquantized.

An ordinary checkpoint is rounded tensor by tensor while it is read (`Rounding`), before a rank
takes its part: so the scales are those of whole rows, the same for any number of ranks, and the
full-precision weights are never all in memory at once.

In vLLM v0.33.0: `QuantizationConfig` in `vllm/model_executor/layers/quantization/base_config.py`,
which chooses a layer's `LinearMethodBase` (`vllm/model_executor/layers/linear.py`): it creates the
weights and computes with them.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from minivllm.errors import MinivllmError
from minivllm.kernels.packed_weights import (
    SMALLEST_GROUP,
    check_group_size,
    default_group_size,
    quantize_weight,
)
from minivllm.kernels.quantized_linear import quantized_linear
from minivllm.models.linear import Linear, LoadableLinearMethod, parameter


@dataclass(frozen=True)
class QuantizedLinearMethod(LoadableLinearMethod):
    """The linear method for 8- or 4-bit weights in the format of `minivllm.kernels.packed_weights`:
    `packed` and `scales`.

    - `group_size`: the number of weights of a row that share a scale; None for the whole row, or
      for the default of int4 where the weights are `rounded` at load time.
    - `scale_dtype`: None for torch's default dtype when the linear is created.
    """

    bits: int
    group_size: int | None = None
    scale_dtype: torch.dtype | None = None
    rounded: bool = False

    def create_weights(self, linear: Linear, in_features: int, out_features: int, input_parts: int) -> None:
        """Create the packed integers and their scales.

        Raises:
            MinivllmError: the group size does not fit the rows, or their division over the ranks.
        """
        group_size = self.group_size_on_rank(in_features, input_parts)
        # Two numbers in a byte, or one.
        kind, width = (torch.uint8, in_features // 2) if self.bits == 4 else (torch.int8, in_features)
        linear.packed = parameter(torch.empty(out_features, width, dtype=kind))
        linear.scales = parameter(torch.empty(out_features, in_features // group_size, dtype=self.scale_dtype))

    def apply(self, linear: Linear, x: Tensor) -> Tensor:
        """Multiply by the packed weight."""
        return quantized_linear(x, linear.packed, linear.scales, linear.bias)

    def group_size_of(self, width: int) -> int:
        """Return the group size for undivided rows of `width` weights."""
        if self.rounded and self.bits == 4:
            return default_group_size(width)
        return self.group_size or width

    def group_size_on_rank(self, in_features: int, input_parts: int) -> int:
        """Return the group size in a rank's part of a row; if the division splits a group, all its
        pieces keep the group's scale.

        Raises:
            MinivllmError: the group size is invalid, or the pieces would be too small.
        """
        width = in_features * input_parts
        group_size = self.group_size_of(width)
        check_group_size(group_size, width)
        if group_size == width:
            return in_features
        part = math.gcd(group_size, in_features)  # the largest piece that no boundary between ranks cuts
        if part < SMALLEST_GROUP:
            raise MinivllmError(
                f"rows of {width} weights in groups of {group_size} cannot be divided over {input_parts} ranks: that "
                f"leaves pieces of {part}, but the minimum is {SMALLEST_GROUP}; use fewer ranks, or int8"
            )
        return part


@dataclass(frozen=True)
class Rounding:
    """A quantization that rounds the linears of an ordinary checkpoint; `quantization` is "int8" or
    "int4".
    """

    quantization: str

    @property
    def method(self) -> QuantizedLinearMethod:
        """Return the method of every linear inside the layers."""
        if self.quantization == "int8":
            return QuantizedLinearMethod(8, scale_dtype=torch.float32, rounded=True)
        return QuantizedLinearMethod(4, scale_dtype=torch.bfloat16, rounded=True)

    def convert(self, tensors: Iterable[tuple[str, Tensor]], like: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors with the linears' weights rounded, after casting those to the model's
        dtype.
        """
        for name, tensor in tensors:
            linear = name.removesuffix(".weight")
            # Only the projections inside the layers; norms, embedding and head stay as they are.
            if linear == name or not linear.endswith("_proj") or tensor.dim() != 2:
                yield name, tensor
                continue
            packed, scales = quantize_weight(tensor.to(like.device, like.dtype), self.quantization)
            yield f"{linear}.packed", packed
            yield f"{linear}.scales", scales
