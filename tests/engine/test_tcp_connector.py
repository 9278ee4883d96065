"""Two engines that exchange keys and values over TCP answer as one: same tokens, and every block free again."""

import random
import time

import pytest
from patience import PATIENCE

from minivllm import LLM, SamplingParams
from minivllm.config import EMBEDDED_MODEL
from minivllm_lab.inside import core_of

TO_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}
BLOCKS, ROUNDS, PROMPTS = 200, 4, 15


def engine(role=None, **extra):
    settings = None
    if role is not None:
        extra["secret"] = "known to both of them"
        settings = {"kv_connector": "TCPConnector", "kv_role": role, "kv_connector_extra_config": extra}
    return LLM(
        EMBEDDED_MODEL, device="cpu", max_model_len=512, num_gpu_blocks_override=BLOCKS, kv_transfer_config=settings
    )


def params(max_tokens, kv_transfer_params=None):
    extra = {"kv_transfer_params": kv_transfer_params} if kv_transfer_params else None
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra)


def free_blocks(llm):
    return core_of(llm.llm_engine).scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


@pytest.mark.parametrize("seed", [0, 1])
def test_the_same_tokens_as_one_engine(seed):
    """Random prompts, many with a beginning that others have too, so that either side may have parts of them."""
    plain, prefill, decode = engine(), engine("kv_producer"), engine("kv_consumer")
    chance = random.Random(seed)
    beginnings = [[chance.randrange(4, 1000) for _ in range(200)] for _ in range(3)]
    for _ in range(ROUNDS):
        prompts = []
        for _ in range(PROMPTS):
            ending = [chance.randrange(4, 1000) for _ in range(chance.randrange(1, 60))]
            prompts.append({"prompt_token_ids": chance.choice(beginnings)[: chance.randrange(200)] + ending})
        wanted = plain.generate(prompts, params(12), use_tqdm=False)
        there = prefill.generate(prompts, params(1, TO_DECODE), use_tqdm=False)
        for _ in range(2):  # a server's core goes on stepping by itself
            prefill.llm_engine.step()
        told = [params(12, output.kv_transfer_params) for output in there]
        found = decode.generate(prompts, told, use_tqdm=False)
        assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in wanted]
    until = time.monotonic() + PATIENCE
    while free_blocks(prefill) < BLOCKS - 1 and time.monotonic() < until:
        prefill.llm_engine.step()
        time.sleep(0.005)
    assert free_blocks(prefill) == free_blocks(decode) == BLOCKS - 1
