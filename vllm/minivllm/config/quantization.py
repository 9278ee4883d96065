"""The integer formats for weights that are quantized at load time. `kernels/packed_weights.py`
explains them.
"""

QUANTIZATIONS = ("int8", "int4")
