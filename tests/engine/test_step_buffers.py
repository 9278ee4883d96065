"""The buffers that CUDA graphs read: a step in place, harmless padding behind it, and nothing of the step before."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from minivllm.worker.input_batch import StepInputs
from minivllm.worker.step_buffers import StepBuffers

SIZE, COLUMNS = 8, 5


@st.composite
def steps(draw) -> StepInputs:
    """A decode step: any ids, positions, slots and tables."""
    count, columns = draw(st.integers(1, SIZE)), draw(st.integers(1, COLUMNS))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    positions = random.integers(0, 16 * columns, count)
    nothing = np.zeros(0, np.int64)
    return StepInputs(
        req_ids=[str(row) for row in range(count)],
        rows=np.arange(count),
        input_ids=random.integers(1, 4096, count).astype(np.int32),
        positions=positions,
        slot_mapping=random.integers(0, 2**40, count),
        query_start_loc=np.arange(count + 1, dtype=np.int32),
        seq_lens=(positions + 1).astype(np.int32),
        block_table=random.integers(1, 2**31, (count, columns)).astype(np.int32),
        sampling=nothing,
        num_sampled=nothing,
        logits_indices=nothing,
        drafts={},
    )


@given(st.lists(steps(), min_size=1, max_size=4))
def test_the_last_step_is_in_place_and_padding_behind_it(loaded):
    buffers = StepBuffers(SIZE, COLUMNS, torch.device("cpu"))
    addresses = [tensor.data_ptr() for tensor in (buffers.input_ids, buffers.positions, buffers.block_table)]
    for step in loaded:
        buffers.load(step)
        count = len(step.input_ids)
        for name, padding in (("input_ids", 0), ("positions", 0), ("slot_mapping", -1), ("seq_lens", 0)):
            there = getattr(buffers, name)
            assert there.tolist() == [*getattr(step, name), *[padding] * (SIZE - count)]
        assert buffers.query_start_loc.tolist() == [*range(count + 1), *[count] * (SIZE - count)]
        assert buffers.block_table[:count, : step.block_table.shape[1]].tolist() == step.block_table.tolist()
    assert addresses == [tensor.data_ptr() for tensor in (buffers.input_ids, buffers.positions, buffers.block_table)]


@given(steps(), st.integers(1, SIZE))
def test_metadata_of_some_rows_are_views(step, rows):
    buffers = StepBuffers(SIZE, COLUMNS, torch.device("cpu"))
    metadata = buffers.metadata(rows, 77)
    buffers.load(step)
    assert metadata.max_seq_len == 77
    assert metadata.query_start_loc.tolist() == buffers.query_start_loc[: rows + 1].tolist()
    assert metadata.seq_lens.tolist() == buffers.seq_lens[:rows].tolist()
    assert metadata.slot_mapping.tolist() == buffers.slot_mapping[:rows].tolist()
    assert metadata.block_table.shape == (rows, COLUMNS)
    assert metadata.block_table.data_ptr() == buffers.block_table.data_ptr()
