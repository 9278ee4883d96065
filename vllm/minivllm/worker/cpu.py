"""What makes a decoder quick on a CPU: linears with weights packed for oneDNN.

The other two parts are where the decoder calls them: passes over a layer's data that numba compiles
(`minivllm.kernels.elementwise`) and attention that walks the block tables (`minivllm.kernels.cpu_attention`).
"""

from minivllm.kernels.cpu_linear import PackedLinear, can_pack
from minivllm.models.decoder import Decoder, Linear


def pack_linears(model: Decoder) -> int:
    """Lets every linear of the model compute with packed weights, where that is possible; returns the packed bytes.

    A weight is given up for its packed form, unless something else holds it too (tied embeddings).
    """
    packed_bytes = 0
    for module in model.modules():
        if not isinstance(module, Linear):
            continue
        if not isinstance(module.forward, PackedLinear) and can_pack(module.weight):
            module.forward = PackedLinear(module.weight, module.bias)
            module.register_parameter("weight", None)
        if isinstance(module.forward, PackedLinear):
            packed_bytes += module.forward.nbytes
    return packed_bytes
