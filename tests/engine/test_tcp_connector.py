"""Two engines that exchange keys and values over TCP answer like one: same tokens, and every block
free again.
"""

from dataclasses import replace

from engine.mixed_requests import greedy_answers, random_prompts
from patience import eventually

from minivllm import LLM, SamplingParams
from minivllm.config import EMBEDDED_MODEL
from minivllm_lab.inside import core_of

TO_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}
BLOCKS = 200


def engine(role=None, **extra):
    settings = None
    if role is not None:
        extra["secret"] = "known to both of them"
        settings = {"kv_connector": "TCPConnector", "kv_role": role, "kv_connector_extra_config": extra}
    return LLM(
        EMBEDDED_MODEL, device="cpu", max_model_len=256, num_gpu_blocks_override=BLOCKS, kv_transfer_config=settings
    )


def answered(llm, prompts, max_tokens, transfers):
    base = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    params = [replace(base, extra_args={"kv_transfer_params": transfer}) for transfer in transfers]
    return llm.generate(prompts, params, use_tqdm=False)


def free_blocks(llm):
    return core_of(llm).scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


def test_the_same_tokens_as_one_engine():
    """Many prompts share a beginning, so either side may already have parts of them."""
    plain, prefill, decode = engine(), engine("kv_producer"), engine("kv_consumer")
    for number in range(3):
        prompts = random_prompts(number % 2, 9, heads=(1, 100), tails=(1 + number, 60))
        prefilled = answered(prefill, prompts, 1, [TO_DECODE] * len(prompts))
        for _ in range(2):  # a server's core goes on stepping by itself
            prefill.llm_engine.step()
        result = answered(decode, prompts, 6, [output.kv_transfer_params for output in prefilled])
        assert [output.outputs[0].token_ids for output in result] == greedy_answers(plain, prompts, 6)

    def is_free() -> bool:
        prefill.llm_engine.step()
        return free_blocks(prefill) == BLOCKS - 1

    assert eventually(is_free, pause=0.005)
    assert free_blocks(decode) == BLOCKS - 1
