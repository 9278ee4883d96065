"""Memory, bandwidth and arithmetic rates of GPUs, from vendors' data sheets.

Rates are peaks, dense (without structured sparsity), so real kernels reach a part of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from minivllm.config.checks import require
from minivllm.config.units import TERA
from minivllm.memory import Device
from minivllm_simulate.memory.devices import get_device


@dataclass(frozen=True)
class Hardware(Device):
    """One accelerator. Units: bytes, bytes per second, (floating-point) operations per second."""

    bandwidth: float
    """Peak of reading and writing device memory."""
    flops: Mapping[str, float]
    """Peak of matrix products by dtype: float32 (ordinary cores, no TF32), float16, bfloat16,
    float8, int8. A dtype that the machine has no matrix units for is not there.
    """
    nvlink: float = 0.0
    """Bandwidth to the other GPUs of the machine, both directions together; 0 without links.
    (AMD: Infinity Fabric)
    """
    pcie: float = 0.0
    """Bandwidth to the host, both directions together."""
    source: str = "measured"

    def flops_of(self, dtype: str) -> float:
        """Return the peak operations per second for this dtype.

        Raises:
            MinivllmError: the machine has no matrix units for it.
        """
        require(dtype in self.flops, f"{self.name} has no {dtype} matrix units; it has {', '.join(self.flops)}")
        return self.flops[dtype]

    def ridge(self, dtype: str = "bfloat16") -> float:
        """Return the operations per byte above which a kernel is compute-bound (the knee of the
        roofline).
        """
        return self.flops_of(dtype) / self.bandwidth


def _gpu(
    name: str, bandwidth_gb: float, tflops: Mapping[str, float], nvlink_gb: float, pcie_gb: float, source: str
) -> Hardware:
    flops = MappingProxyType({dtype: rate * TERA for dtype, rate in tflops.items()})
    memory = get_device(name).memory_bytes
    return Hardware(name, memory, bandwidth_gb * 1e9, flops, nvlink_gb * 1e9, pcie_gb * 1e9, source)


HOPPER = {"float32": 67, "float16": 989.4, "bfloat16": 989.4, "float8": 1978.9, "int8": 1978.9}
AMPERE = {"float32": 19.5, "float16": 312, "bfloat16": 312, "int8": 624}

HARDWARE = {
    gpu.name: gpu
    for gpu in (
        _gpu("T4", 320, {"float32": 8.1, "float16": 65, "int8": 130}, 0, 32, "NVIDIA T4 data sheet"),
        _gpu(
            "L4", 300,
            {"float32": 30.3, "float16": 121, "bfloat16": 121, "float8": 242.5, "int8": 242.5},
            0, 64, "NVIDIA L4 data sheet (sparse figures halved)",
        ),
        _gpu(
            "A10G", 600, {"float32": 35, "float16": 70, "bfloat16": 70, "int8": 140},
            0, 64, "NVIDIA A10G data sheet (AWS G5)",
        ),
        _gpu(
            "RTX 4090", 1008,
            {"float32": 82.6, "float16": 165.2, "bfloat16": 165.2, "float8": 330.3, "int8": 660.6},
            0, 64, "NVIDIA Ada GPU architecture white paper, appendix A (fp32 accumulation)",
        ),
        _gpu("A100-40", 1555, AMPERE, 600, 64, "NVIDIA A100 data sheet, 40 GB SXM"),
        _gpu("A100-80", 2039, AMPERE, 600, 64, "NVIDIA A100 data sheet, 80 GB SXM"),
        _gpu("H100", 3350, HOPPER, 900, 128, "NVIDIA H100 data sheet, SXM (sparse figures halved)"),
        _gpu("H200", 4800, HOPPER, 900, 128, "NVIDIA H200 data sheet, SXM (sparse figures halved)"),
        _gpu(
            "B200", 8000,
            {"float32": 75, "float16": 2250, "bfloat16": 2250, "float8": 4500, "int8": 4500},
            1800, 128, "NVIDIA HGX B200 data sheet, one of eight GPUs (sparse figures halved)",
        ),
        _gpu(
            "MI300X", 5300,
            {"float32": 163.4, "float16": 1307.4, "bfloat16": 1307.4, "float8": 2614.9, "int8": 2614.9},
            896, 128, "AMD Instinct MI300X data sheet",
        ),
    )
}  # fmt: skip


def get_hardware(name: str) -> Hardware:
    """Return the entry with this name, in any spelling that `get_device` accepts.

    Raises:
        MinivllmError: unknown name; the message lists the known ones.
    """
    return HARDWARE[get_device(name).name]
