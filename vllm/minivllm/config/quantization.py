"""Which integers weights can be quantized to at load time. `kernels/packed_weights.py` says how."""

QUANTIZATIONS = ("int8", "int4")
