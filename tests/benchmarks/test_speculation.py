"""Test the speculation benchmark: the engine accepts its settings, and its costs are the engine's."""

import pytest
import torch
from repository import ROOT

from minivllm.config import EMBEDDED_MODEL, SpeculativeConfig
from minivllm.kernels.cpu.panel_linear import can_pack
from minivllm_lab.cli import warnings_only
from minivllm_lab.results import read_record


@pytest.mark.skipif(not can_pack(torch.zeros(1, 1)), reason="weights are kept in panels on x86 with numba only")
def test_memory_and_training_are_what_the_engine_and_the_card_say(load_benchmark):
    benchmark = load_benchmark("speculation")
    result = read_record(ROOT / "benchmarks/results/speculation.cpu.json", "speculation")["figures"]["costs"]
    with warnings_only():
        costs = benchmark.costs(str(EMBEDDED_MODEL), benchmark.available())
    assert result.keys() == costs.keys()
    for way, here in costs.items():  # panels are padded to the width of the processor's registers
        assert result[way] == {**here, "bytes": pytest.approx(here["bytes"], rel=0.02)}
    card = (ROOT / "vllm/models/README.md").read_text()
    for name in ("off", "draft model", "EAGLE-3"):
        assert f"1 CPU threads, {result[name]['minutes']:.0f} min" in card


def test_what_is_available_is_a_setting(load_benchmark):
    ways = load_benchmark("speculation").available()
    assert "n-gram" in ways
    for way in ways.values():
        assert SpeculativeConfig.of(way)
