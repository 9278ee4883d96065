"""Linears whose weights are integers of 8 or 4 bits: activations and sums stay as they are (w8a16, w4a16).

Only the projections inside the layers are quantized. Of the embedding, a step reads one row a token, so fewer bits
would spare no time; the head's error would go straight into the logits, and often it is the same tensor. Norms are
vectors. Quantized checkpoints leave out the same ones.

In vLLM v0.33.0: `vllm/model_executor/layers/quantization/` (`QuantizationConfig`, whose `LinearMethodBase` makes the
weights of a layer and computes with them).
"""

import torch
from torch import Tensor, nn

from minivllm.errors import MinivllmError
from minivllm.kernels.packed_weights import quantize_weight
from minivllm.kernels.quantized_linear import quantized_linear
from minivllm.models.decoder import Decoder, Linear


class QuantizedLinear(nn.Module):
    """Stands where a `Linear` stood. `packed` and `scales` are as in `minivllm.kernels.packed_weights`."""

    def __init__(self, packed: Tensor, scales: Tensor, bias: Tensor | None):
        super().__init__()
        self.packed = nn.Parameter(packed, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[rows, in]` to `[rows, out]`."""
        return quantized_linear(x, self.packed, self.scales, self.bias)


@torch.no_grad()
def quantize_linears(model: Decoder, quantization: str, group_size: int | None = None) -> None:
    """Replaces the linears of all layers, one by one, by quantized ones; "int8" or "int4".

    Raises:
        MinivllmError: an unknown quantization, a group size that does not fit the model's rows, or a model whose
            checkpoint was quantized already.
    """
    stored_as = model.config.quantization
    if stored_as:
        raise MinivllmError(
            f"the checkpoint is already quantized ({stored_as}), its weights cannot be quantized to {quantization!r} "
            "again: leave quantization out, or give the ordinary checkpoint"
        )
    for parent in list(model.layers.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Linear):
                packed = quantize_weight(child.weight, quantization, group_size)
                setattr(parent, name, QuantizedLinear(*packed, child.bias))
