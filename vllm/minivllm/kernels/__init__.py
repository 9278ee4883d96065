"""Triton kernels, one file per family; `cpu/` has their compiled CPU counterparts."""
