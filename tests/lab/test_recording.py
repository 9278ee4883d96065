"""The parts of a step, and what an operator costs its host."""

import torch

from minivllm.config import EMBEDDED_MODEL, CacheConfig
from minivllm.lab.recording import STEP_PARTS, bare_engine, launch_seconds, record_run, step_parts
from minivllm.lab.timing import Stopwatch


def test_the_parts_of_a_step_are_timed_and_the_engine_is_as_before():
    core = bare_engine(EMBEDDED_MODEL, torch.device("cpu"), CacheConfig(num_gpu_blocks=20), max_model_len=64)
    parts = step_parts(core, [(8, 6)] * 2)
    assert set(parts) == set(STEP_PARTS)
    assert min(parts.values()) > 0
    assert parts["forward"] == max(parts.values())
    assert not any(part in vars(owner(core)) for part, owner in STEP_PARTS.items())
    run = record_run(core, [(8, 6)] * 2)
    assert 0 < run.decode_seconds <= max(step.seconds for step in run.steps)


def test_an_operator_takes_microseconds():
    assert 1e-7 < launch_seconds(layers=4) < 1e-3


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
