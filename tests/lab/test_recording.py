"""A recorded run has the steps of the engine, and a stopwatch counts nested parts once."""

import torch

from minivllm.config import EMBEDDED_MODEL, CacheConfig
from minivllm.lab.recording import bare_engine, record_run
from minivllm.lab.timing import Stopwatch


def test_a_run_is_recorded_step_by_step():
    core = bare_engine(EMBEDDED_MODEL, torch.device("cpu"), CacheConfig(num_gpu_blocks=20), max_model_len=64)
    run = record_run(core, [(8, 6)] * 2)
    assert [step.shape.num_tokens for step in run.steps] == [16, 2, 2, 2, 2, 2]
    assert run.output_tokens == 12
    assert 0 < run.decode_seconds <= max(step.seconds for step in run.steps)


def test_a_part_inside_another_is_counted_once():
    now = [0.0]

    def wait(seconds):
        now[0] += seconds

    watch = Stopwatch(lambda: now[0])
    inner = watch.watch("inner", lambda: wait(2.0))
    outer = watch.watch("outer", lambda: (wait(1.0), inner(), wait(4.0)))
    outer()
    inner()
    assert watch.seconds == {"outer": 5.0, "inner": 4.0}
