"""Triton kernels and their CPU twins, one file a family."""
