"""The buffers that CUDA graphs read: a step in place, harmless padding after it, and nothing left
of the step before.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minivllm.worker.input_batch import StepInputs
from minivllm.worker.step_buffers import StepBuffers

SIZE, COLUMNS = 8, 5


@st.composite
def steps(draw, tokens_each: int) -> StepInputs:
    """Draw a step of at most `tokens_each` tokens per request, with any ids, positions, slots and
    tables.
    """
    counts = draw(st.lists(st.integers(1, tokens_each), min_size=1, max_size=SIZE))
    columns, tokens, requests = draw(st.integers(1, COLUMNS)), sum(counts), len(counts)
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    nothing = np.zeros(0, np.int64)
    return StepInputs(
        req_ids=[str(row) for row in range(requests)], rows=np.arange(requests),
        input_ids=random.integers(1, 4096, tokens).astype(np.int32),
        positions=random.integers(0, 16 * columns, tokens), slot_mapping=random.integers(0, 2**40, tokens),
        query_start_loc=np.cumsum([0, *counts]).astype(np.int32),
        seq_lens=random.integers(1, 16 * columns, requests).astype(np.int32),
        block_table=random.integers(1, 2**31, (requests, columns)).astype(np.int32), sampling=nothing,
        num_sampled=nothing, logits_indices=nothing, drafts={},
    )  # fmt: skip


def addresses_of(buffers: StepBuffers) -> list[int]:
    return [tensor.data_ptr() for tensor in (buffers.input_ids, buffers.positions, buffers.block_table)]


@pytest.mark.parametrize("tokens_each", [1, 4])
@given(data=st.data())
def test_the_last_step_is_in_place_and_padding_behind_it(tokens_each, data):
    buffers = StepBuffers(SIZE, COLUMNS, torch.device("cpu"), tokens_each)
    addresses = addresses_of(buffers)
    for step in data.draw(st.lists(steps(tokens_each), min_size=1, max_size=4)):
        buffers.load(step)
        tokens, requests = len(step.input_ids), len(step.req_ids)
        for name, padding in (("input_ids", 0), ("positions", 0), ("slot_mapping", -1)):
            buffer = getattr(buffers, name)
            assert buffer.tolist() == [*getattr(step, name), *[padding] * (SIZE * tokens_each - tokens)]
        assert buffers.seq_lens.tolist() == [*step.seq_lens, *[0] * (SIZE - requests)]
        assert buffers.query_start_loc.tolist() == [*step.query_start_loc, *[tokens] * (SIZE - requests)]
        assert buffers.block_table[:requests, : step.block_table.shape[1]].tolist() == step.block_table.tolist()
    assert addresses == addresses_of(buffers)
