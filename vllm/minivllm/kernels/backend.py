"""The choice between a kernel and its CPU counterpart."""

from __future__ import annotations

from torch import Tensor

from minivllm.errors import MinivllmError


def choose_backend(backend: str | None, tensor: Tensor) -> str:
    """Return "triton" or "cpu": as requested, else according to the tensor's device."""
    if backend is None:
        return "triton" if tensor.is_cuda else "cpu"
    if backend not in ("triton", "cpu"):
        raise MinivllmError(f'unknown backend {backend!r}: use "triton" or "cpu"')
    return backend
