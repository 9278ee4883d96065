"""Kernels of lesson scripts run where all kernels do: see `device` in tests/kernels/conftest.py."""

from kernels.conftest import device

__all__ = ["device"]
