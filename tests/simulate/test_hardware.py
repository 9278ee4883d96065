"""The hardware table."""

import pytest
from refusals import assert_refused

from minivllm.config.units import GIB
from minivllm_simulate.hardware import HARDWARE, get_hardware

# (GB on the box, TB/s, dense bfloat16 TFLOP/s, operations per byte at the ridge), from the data
# sheets.
DATA_SHEETS = {
    "A100-40": (40, 1.555, 312, 201),
    "A100-80": (80, 2.039, 312, 153),
    "H100": (80, 3.35, 989, 295),
    "H200": (141, 4.8, 989, 206),
    "B200": (180, 8.0, 2250, 281),
    "RTX 4090": (24, 1.008, 165, 164),
    "MI300X": (192, 5.3, 1307, 247),
    "L4": (24, 0.3, 121, 403),
    "A10G": (24, 0.6, 70, 117),
}


@pytest.mark.parametrize(("name", "figures"), DATA_SHEETS.items())
def test_figures_are_those_of_the_data_sheets(name, figures):
    gigabytes, bandwidth, tflops, ridge = figures
    gpu = get_hardware(name)
    assert gigabytes * 0.97e9 < gpu.memory_bytes < gigabytes * 1.08 * GIB
    assert gpu.bandwidth == pytest.approx(bandwidth * 1e12)
    assert gpu.flops_of("bfloat16") == pytest.approx(tflops * 1e12, rel=2e-3)
    assert gpu.ridge() == pytest.approx(ridge, rel=0.01)


@pytest.mark.parametrize("gpu", HARDWARE.values(), ids=HARDWARE)
def test_every_entry_is_whole(gpu):
    assert gpu.source
    assert gpu.pcie > 0
    assert set(gpu.flops) <= {"float32", "float16", "bfloat16", "float8", "int8"}
    assert gpu.flops["float32"] < gpu.flops["float16"] <= gpu.flops["int8"]


def test_dtype_without_matrix_units():
    assert_refused("T4 has no bfloat16", get_hardware("T4").ridge, "bfloat16")


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("h100", "H100"), ("rtx4090", "RTX 4090"), ("4090", "RTX 4090"), ("a100 80", "A100-80"),
        ("A100", "A100-80"), ("A100-40GB", "A100-40"), ("NVIDIA L4", "L4"), ("mi300x", "MI300X"),
    ],
)  # fmt: skip
def test_spelling_does_not_matter(spelling, name):
    assert get_hardware(spelling).name == name


@pytest.mark.parametrize("name", ["H900", "", "gpu", "A10"])
def test_unknown_gpu_lists_the_known(name):
    assert_refused(r"H100.*MI300X", get_hardware, name)
