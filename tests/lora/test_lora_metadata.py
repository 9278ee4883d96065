"""Test the sorted lists that tell the kernels which row of a step has which adapter."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.kernels.lora_metadata import LoRAKernelMeta

CPU = torch.device("cpu")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-1, 4), max_size=70))
def test_every_row_with_an_adapter_is_listed_with_those_of_its_slot(slots):
    meta = LoRAKernelMeta(16, 5, CPU)  # of which more rows make a larger one
    meta.prepare(np.array(slots, np.int32))
    active = [slot for slot in meta.active.tolist() if slot >= 0]
    assert active == sorted(set(slots) - {-1})
    assert meta.num_active == len(active)
    assert meta.counts[: len(active)].tolist() == [slots.count(slot) for slot in active]
    assert meta.most_rows == max([0, *(slots.count(slot) for slot in active)])
    for slot, start in zip(active, meta.starts.tolist(), strict=False):
        rows = meta.indices[start : start + slots.count(slot)].tolist()
        assert rows == [row for row, other in enumerate(slots) if other == slot], "stably sorted"
