"""Test that the measured rates of a device fit into the hardware table's format."""

import torch

from minivllm_lab import device_rates
from minivllm_simulate.hardware import Hardware


def test_rates_of_the_processor(monkeypatch):
    monkeypatch.setitem(device_rates.COPY_BYTES, "cpu", 2**20)
    monkeypatch.setitem(device_rates.MATRIX, "cpu", 64)
    rates = device_rates.measure_device(torch.device("cpu"), ("float32", "bfloat16"))
    machine = Hardware(**rates._asdict())
    assert machine.memory_bytes > 2**28
    assert set(machine.flops) == {"float32", "bfloat16"}
    assert machine.ridge("float32") > 0


def test_the_fastest_dtype_sets_the_ridge():
    """A processor without instructions for bfloat16 multiplies faster in float32."""
    for flops, fastest in (
        ({"bfloat16": 1e9, "float32": 60e9}, "float32"),
        ({"bfloat16": 4e11, "float32": 2e11}, "bfloat16"),
    ):
        rates = device_rates.DeviceRates("CPU", 2**30, 20e9, flops)
        assert rates.fastest == fastest
        assert rates.ridge == flops[fastest] / 20e9
