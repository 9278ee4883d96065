"""The core's loop: what arrives while it computes."""

from functools import partial

import pytest

from minivllm import LLM, SamplingParams
from minivllm.config import EMBEDDED_MODEL
from minivllm.engine.busy_loop import run_busy_loop
from minivllm.engine.core_proc import EngineCoreProc
from minivllm.engine.core_sockets import FolderSockets
from minivllm.engine.wire import Kind, encode
from minivllm_lab.inside import core_of


class Enough(Exception):
    pass


def test_an_abort_frees_its_blocks_within_two_steps(tmp_path):
    """It comes in the middle of a step; the other request goes on."""
    llm = LLM(EMBEDDED_MODEL, device="cpu", max_model_len=128, max_num_seqs=4, num_gpu_blocks_override=40)
    core, process = core_of(llm), EngineCoreProc(FolderSockets(str(tmp_path)))
    for name in ("stays", "leaves"):
        llm.llm_engine.add_request(name, "def f", SamplingParams(max_tokens=100, ignore_eos=True, temperature=0))
    seen: list[tuple[int, int]] = []
    step, pool = core.step, core.scheduler.kv_cache_manager.block_pool

    def observed():
        if len(seen) == 3:
            (leaving,) = [one for one in core.scheduler.requests if one.startswith("leaves")]
            process._to_do.put(partial(process._handle, Kind.ABORT, encode([leaving])))
        if len(seen) == 6:
            process._to_do.put(Enough())
        outputs = step()
        seen.append((len(outputs.outputs), pool.get_num_free_blocks()))
        return outputs

    core.step, process.core = observed, core
    with pytest.raises(Enough):
        run_busy_loop(core, process._to_do, process._put)
    (before, free_before), (after, free_after) = seen[3], seen[5]
    assert (before, after) == (2, 1)
    assert free_after > free_before
