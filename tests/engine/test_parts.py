"""Parts that a caller passes replace the engine's own, which are used otherwise."""

from minivllm import LLM, SamplingParams
from minivllm.config import EMBEDDED_MODEL, Parts
from minivllm.core.block_hash import hash_block_tokens
from minivllm.core.block_pool import BlockPool
from minivllm.core.policy import DEFAULT_POLICY, SchedulingPolicy
from minivllm.worker.paged_attention import PagedAttention
from minivllm_lab.inside import core_of, runner_of

ARGUMENTS = {"device": "cpu", "dtype": "float32", "max_model_len": 64, "num_gpu_blocks_override": 32}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPT = [list(range(40, 80))]


class OwnPool(BlockPool):
    pass


class OwnAttention(PagedAttention):
    pass


def test_every_part_is_used_and_the_tokens_stay():
    hashed = []

    def own_hash(parent, token_ids, extra_keys=b""):
        hashed.append(list(token_ids))
        return hash_block_tokens(parent, token_ids, extra_keys)

    policy = SchedulingPolicy(block_pool=OwnPool, hash_block_tokens=own_hash)
    parts = Parts(policy=policy, attention=OwnAttention)
    assert parts.names == ["hash_block_tokens", "block_pool", "attention"]
    llm = LLM(EMBEDDED_MODEL, parts=parts, **ARGUMENTS)
    plain = LLM(EMBEDDED_MODEL, **ARGUMENTS)
    tokens = [engine.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids for engine in (llm, plain)]
    assert tokens[0] == tokens[1]
    assert hashed[:2] == [PROMPT[0][:16], PROMPT[0][16:32]]
    scheduler = core_of(llm).scheduler
    assert scheduler.policy is policy
    assert type(scheduler.kv_cache_manager.block_pool) is OwnPool
    assert type(runner_of(llm).attention) is OwnAttention
    assert core_of(plain).scheduler.policy is DEFAULT_POLICY
    scheduler.start_over([])
    assert type(scheduler.kv_cache_manager.block_pool) is OwnPool, "also after a failed step"
