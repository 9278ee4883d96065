"""Triton kernels, one file for each family; in `cpu/` their compiled twins."""
