"""The measured rates of a device fit into the hardware table's own form."""

import dataclasses

import pytest
import torch

from minivllm.errors import MinivllmError
from minivllm.lab import device_rates
from minivllm.simulate.hardware import Hardware


def test_rates_of_the_processor(monkeypatch):
    monkeypatch.setitem(device_rates.COPY_BYTES, "cpu", 2**20)
    monkeypatch.setitem(device_rates.MATRIX, "cpu", 64)
    rates = device_rates.measure_device(torch.device("cpu"), ("float32", "bfloat16"))
    machine = Hardware(**dataclasses.asdict(rates))
    assert machine.memory_bytes > 2**28
    assert set(machine.flops) == {"float32", "bfloat16"}
    assert machine.ridge("float32") > 0


def test_other_devices_are_refused():
    with pytest.raises(MinivllmError, match="meta"):
        device_rates.measure_device(torch.device("meta"))
