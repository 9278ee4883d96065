"""The engine with a learner's part beside ours: what is printed, and what counts as the same."""

from refusals import assert_refused

from minivllm.config import Parts
from minivllm.core.block_pool import BlockPool
from minivllm.core.policy import SchedulingPolicy
from minivllm.worker.paged_attention import PagedAttention
from minivllm_lab.checks.plugged import Plugged, compare

FEW = {"prompts": ["def add(a, b):\n    return", "import os\n"], "max_tokens": 4}
SMALL = {"num_gpu_blocks_override": 40}


def test_the_same_part_gives_the_same_tokens_and_both_columns(capsys):
    class Own(BlockPool):
        pass

    parts = Parts(policy=SchedulingPolicy(block_pool=Own))
    plugged = Plugged(parts=parts, engine_args=SMALL, says=lambda llm: {"a fact": type(llm).__name__}, **FEW)
    assert compare(plugged)
    out = capsys.readouterr().out
    assert "The engine with your block pool" in out
    assert "requests at once" in out
    assert "a fact" in out
    assert "the same 8 tokens as ours" in out


def test_wrong_text_is_told_though_nothing_raised(capsys):
    class Blind(PagedAttention):
        def attend(self, metadata, layer_index, q, k, v):
            return 0.0 * super().attend(metadata, layer_index, q, k, v)

    assert not compare(Plugged(parts=Parts(attention=Blind), engine_args=SMALL, **FEW))
    assert "request 0 differs from ours" in capsys.readouterr().out


def test_a_part_that_raises_is_named():
    def broken(scheduler, step):
        raise IndexError("no such request")

    plugged = Plugged(parts=Parts(policy=SchedulingPolicy(schedule=broken)), engine_args=SMALL, **FEW)
    assert_refused("the engine stopped in your part: IndexError: no such request", compare, plugged)
