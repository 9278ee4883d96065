"""What makes a decoder quick on a CPU: linears with weights in panels, gates computed where they are multiplied.

The other two parts are where the decoder calls them: passes over a layer's data that numba compiles
(`minivllm.kernels.elementwise`) and attention that walks the block tables (`minivllm.kernels.cpu.attention_calls`).
"""

from typing import TypeGuard

from torch import nn

from minivllm.kernels.cpu.panel_linear import PanelLinear, can_pack
from minivllm.models.decoder import Decoder, GatedMLP, Linear


def pack_linears(model: Decoder) -> int:
    """Lets every linear of the model compute with packed weights, where that is possible; returns the packed bytes.

    A weight is given up for its packed form, unless something else holds it too (tied embeddings).
    """
    for module in model.modules():
        if isinstance(module, GatedMLP) and _is_plain(module.gate_up_proj):
            module.gate = _packed(module.gate_up_proj, gated=True)
        elif _is_plain(module):
            module.forward = _packed(module)
    return sum(form.nbytes for form in packed_forms(model))


def packed_forms(model: nn.Module) -> list[PanelLinear]:
    """What `pack_linears` put in the place of weights, in a model or in a part of it."""
    return [form for module in model.modules() for form in vars(module).values() if isinstance(form, PanelLinear)]


def _is_plain(module: nn.Module) -> TypeGuard[Linear]:
    return isinstance(module, Linear) and module.weight is not None and can_pack(module.weight)


def _packed(linear: Linear, gated: bool = False) -> PanelLinear:
    """The packed form of a linear, which gives up its weight."""
    packed = PanelLinear(linear.weight, linear.bias, gated)
    linear.register_parameter("weight", None)
    return packed
