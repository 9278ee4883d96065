"""A recorded run has the steps of the engine, on whatever device, and a stopwatch counts nested
parts once.
"""

import pytest
import torch
from simulate.linear_cost import LinearCost

from minivllm.config import EMBEDDED_MODEL, CacheConfig
from minivllm.core.scheduler import Scheduler
from minivllm.engine.arg_utils import EngineArgs
from minivllm_lab.engines.recording import bare_engine, record_run
from minivllm_lab.speculative_decoding.drafted_engine import answers_with_errors, drafted_engine, serve_with_drafts
from minivllm_simulate.virtual_clock import SimulatedRequest, simulate

COST = LinearCost(per_step=1.0)
CPU = torch.device("cpu")


def test_a_run_is_recorded_step_by_step():
    core = bare_engine(EMBEDDED_MODEL, CPU, CacheConfig(num_gpu_blocks=20), max_model_len=64)
    run = record_run(core, [(8, 6)] * 2)
    assert [step.shape.num_tokens for step in run.steps] == [16, 2, 2, 2, 2, 2]
    assert run.output_tokens == 12
    assert 0 < run.decode_seconds <= max(step.seconds for step in run.steps)


@pytest.fixture
def defaults_of_a_gpu(monkeypatch):
    """Let the engine choose its defaults here as with 80 GiB of GPU memory."""
    decide = EngineArgs.scheduler_config
    monkeypatch.setattr(EngineArgs, "scheduler_config", lambda args, config, _memory: decide(args, config, 80 * 2**30))


@pytest.mark.usefixtures("defaults_of_a_gpu")
def test_a_run_is_foretold_with_the_defaults_of_its_device():
    cache = CacheConfig(num_gpu_blocks=600, enable_prefix_caching=False)
    core = bare_engine(EMBEDDED_MODEL, CPU, cache, max_model_len=512, max_num_seqs=8)
    lengths = [(450, 10)] * 6
    run = record_run(core, lengths)
    assert run.steps[0].shape.num_tokens == 6 * 450, "more than a step may have on a CPU"
    configs = core.scheduler.config, core.scheduler.cache_config
    simulated = simulate([SimulatedRequest(*each) for each in lengths], Scheduler(*configs), COST)
    assert [step.scheduled for step in simulated.steps] == run.scheduled


@pytest.mark.usefixtures("defaults_of_a_gpu")
def test_supplied_drafts_are_verified_with_the_defaults_of_a_gpu():
    core = drafted_engine(EMBEDDED_MODEL, CPU, num_speculative_tokens=3, max_num_seqs=2)
    plain = serve_with_drafts(core, [[5] * 20, [9] * 20], 12)
    arguments = serve_with_drafts(core, [[5] * 20, [9] * 20], 9, answers_with_errors(plain.outputs, 1.0, 3, seed=0))
    assert arguments.acceptance_length == 4
    assert all(output == plain.outputs[name][:9] for name, output in arguments.outputs.items())
