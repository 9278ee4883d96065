"""What makes a decoder quick on a CPU: linears with weights packed for oneDNN.

The other two parts are where the decoder calls them: passes over a layer's data that numba compiles
(`minivllm.kernels.elementwise`) and attention that walks the block tables (`minivllm.kernels.cpu_attention`).
"""

from minivllm.kernels.cpu_linear import PackedLinear, can_pack
from minivllm.models.decoder import Decoder, Linear


def pack_linears(model: Decoder) -> int:
    """Lets every linear of the model compute with packed weights, where that is possible; returns the bytes added.

    A weight too large to be held twice is given up for its packed form.
    """
    added = 0
    for module in model.modules():
        if not isinstance(module, Linear) or not can_pack(module.weight):
            continue
        product = PackedLinear(module.weight, module.bias)
        added += module.weight.nbytes
        module.forward = product
        if product.plain is None:
            module.register_parameter("weight", None)
    return added
