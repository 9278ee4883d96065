"""Test the figures of a pipeline's record. `tests/engine/test_pipeline_parallel.py` tests that an
engine is recorded.
"""

import pytest
from refusals import assert_refused

from minivllm import LLM
from minivllm.config import EMBEDDED_MODEL
from minivllm_lab.inside import core_of
from minivllm_lab.pipeline import PipelineRecord, record_pipeline


def test_one_step_in_flight_keeps_one_stage_of_two_at_work():
    record = PipelineRecord([[(5.0, 6.0), (7.0, 8.0)], [(6.0, 7.0), (8.0, 9.0)]], [1, 1])
    assert (record.seconds, record.fullness) == (4.0, 0.5)
    assert record.timeline(8) == ["00..11..", "..00..11"]


def test_two_steps_in_flight_leave_only_the_ends_empty():
    first = [(float(step), step + 1.0) for step in range(10)]
    record = PipelineRecord([first, [(start + 1.0, end + 1.0) for start, end in first]], [1, *[2] * 9])
    assert record.fullness == pytest.approx(10 / 11)
    assert record.timeline(11) == ["0123456789.", ".0123456789"]


def test_without_stages_there_is_nothing_to_record():
    core = core_of(LLM(EMBEDDED_MODEL, device="cpu", max_model_len=32, max_num_seqs=1))
    assert_refused("pipeline_parallel_size of 2 or more", record_pipeline, core, list, 2)
