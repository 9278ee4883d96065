"""Memory, bandwidth and arithmetic rates of GPUs, from vendors' data sheets.

Rates are peaks, dense (without structured sparsity), so real kernels reach a part of them. Memory is
what a program sees (`torch.cuda.get_device_properties(0).total_memory`): a little less than the
advertised size, because error correction and the driver reserve the rest. It differs by a few MiB
between drivers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from minivllm.config.checks import require
from minivllm.config.units import GIB, TERA
from minivllm.memory import Device


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
    name: str, memory_gib: float, bandwidth_gb: float, tflops: Mapping[str, float], nvlink_gb: float, pcie_gb: float,
    source: str,
) -> Hardware:  # fmt: skip
    flops = MappingProxyType({dtype: rate * TERA for dtype, rate in tflops.items()})
    return Hardware(name, round(memory_gib * GIB), bandwidth_gb * 1e9, flops, nvlink_gb * 1e9, pcie_gb * 1e9, source)


HOPPER = {"float32": 67, "float16": 989.4, "bfloat16": 989.4, "float8": 1978.9, "int8": 1978.9}
AMPERE = {"float32": 19.5, "float16": 312, "bfloat16": 312, "int8": 624}

HARDWARE = {
    gpu.name: gpu
    for gpu in (
        _gpu("T4", 14.563, 320, {"float32": 8.1, "float16": 65, "int8": 130}, 0, 32, "NVIDIA T4 data sheet"),
        _gpu(
            "L4", 22.161, 300,
            {"float32": 30.3, "float16": 121, "bfloat16": 121, "float8": 242.5, "int8": 242.5},
            0, 64, "NVIDIA L4 data sheet (sparse figures halved)",
        ),
        _gpu(
            "A10G", 22.06, 600, {"float32": 35, "float16": 70, "bfloat16": 70, "int8": 140},
            0, 64, "NVIDIA A10G data sheet (AWS G5)",
        ),
        _gpu(
            "RTX 4090", 23.527, 1008,
            {"float32": 82.6, "float16": 165.2, "bfloat16": 165.2, "float8": 330.3, "int8": 660.6},
            0, 64, "NVIDIA Ada GPU architecture white paper, appendix A (fp32 accumulation)",
        ),
        _gpu("A100-40", 39.494, 1555, AMPERE, 600, 64, "NVIDIA A100 data sheet, 40 GB SXM"),
        _gpu("A100-80", 79.151, 2039, AMPERE, 600, 64, "NVIDIA A100 data sheet, 80 GB SXM"),
        _gpu("H100", 79.179, 3350, HOPPER, 900, 128, "NVIDIA H100 data sheet, SXM (sparse figures halved)"),
        _gpu("H200", 139.81, 4800, HOPPER, 900, 128, "NVIDIA H200 data sheet, SXM (sparse figures halved)"),
        _gpu(
            "B200", 178.35, 8000,
            {"float32": 75, "float16": 2250, "bfloat16": 2250, "float8": 4500, "int8": 4500},
            1800, 128, "NVIDIA HGX B200 data sheet, one of eight GPUs (sparse figures halved)",
        ),
        _gpu(
            "MI300X", 191.98, 5300,
            {"float32": 163.4, "float16": 1307.4, "bfloat16": 1307.4, "float8": 2614.9, "int8": 2614.9},
            896, 128, "AMD Instinct MI300X data sheet",
        ),
    )
}  # fmt: skip

OTHER_NAMES = {
    "4090": "RTX 4090",
    "a100": "A100-80",
    "a10040gb": "A100-40",
    "a10080gb": "A100-80",
    "h10080gb": "H100",
    "h100sxm": "H100",
    "h200sxm": "H200",
}


def get_hardware(name: str) -> Hardware:
    """Return the GPU of that name; case, spaces and dashes are ignored ("a100-80", "rtx4090").

    Raises:
        MinivllmError: unknown GPU; the message lists the known ones.
    """
    # "NVIDIA H100 80GB" is "h10080gb".
    plain = _plain(name).removeprefix("nvidia").removeprefix("amd").removeprefix("geforce")
    known = {_plain(gpu): gpu for gpu in HARDWARE} | OTHER_NAMES
    require(plain in known, f"no figures for the GPU {name!r}; known: {', '.join(HARDWARE)}")
    return HARDWARE[known[plain]]


def _plain(name: str) -> str:
    return "".join(character for character in str(name).lower() if character.isalnum())
