"""Requests of many kinds: shared prefixes, greedy and seeded, penalties, several answers, stop
tokens.
"""

from dataclasses import replace
from random import Random
from typing import Any

from minivllm import LLM, SamplingParams
from minivllm_lab.engines.inside import core_of

SHARED = [(7 * position + 5) % 900 for position in range(40)]
PROMPTS = [SHARED, [*SHARED, 11, 12], SHARED[:17], [9], [*SHARED[:16], 1, 2, 3, 4], [5, 6, 5, 6, 5], SHARED[3:35]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
WISHES = [
    GREEDY,
    SamplingParams(temperature=0.9, seed=1, max_tokens=20),
    SamplingParams(temperature=0.7, top_p=0.8, seed=2, max_tokens=9, n=2),
    SamplingParams(temperature=0.0, max_tokens=12, repetition_penalty=1.4, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=5, max_tokens=11, prompt_logprobs=1),
    GREEDY,
    SamplingParams(temperature=0.0, max_tokens=30, stop_token_ids=[8, 9], min_tokens=3),
]


def random_prompts(seed: int, count: int, heads: tuple[int, int], tails: tuple[int, int]) -> list[dict[str, list[int]]]:
    """Draw prompts made of one of three heads and a tail; `heads` and `tails` are their minimum and
    maximum lengths.
    """
    draw = Random(seed)
    beginnings = [[draw.randrange(500) for _ in range(draw.randint(*heads))] for _ in range(3)]
    endings = [[draw.randrange(500) for _ in range(draw.randint(*tails))] for _ in range(count)]
    return [{"prompt_token_ids": draw.choice(beginnings) + ending} for ending in endings]


def greedy_answers(llm: LLM, prompts: list[Any], max_tokens: int, **options: Any) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False, **options)]


def completions_of(llm: LLM, prompts: list[Any] = PROMPTS, params: Any = WISHES) -> list[list[list[int]]]:
    """Return the token ids of each completion of each request."""
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


def reschedule(llm: LLM, budget: int, num_blocks: int | None = None, caching: bool = True) -> None:
    """Give the engine another scheduler for the same ranks."""
    core = core_of(llm)
    run_out(core)
    core.executor.collective_rpc("reset")
    config, cache = core.scheduler.config, core.scheduler.cache_config
    cache = replace(cache, enable_prefix_caching=caching, num_gpu_blocks=num_blocks or core.ledger.num_blocks)
    core.scheduler = type(core.scheduler)(replace(config, max_num_batched_tokens=budget), cache)


def run_out(engine: Any) -> list[Any]:
    """Step an engine, or a core, until no request is left; return all outputs."""
    outputs = []
    while engine.has_unfinished_requests():
        step = engine.step()
        outputs += getattr(step, "outputs", step)
    return outputs


def all_blocks_are_free(llm: Any) -> bool:
    pool = core_of(llm).scheduler.kv_cache_manager.block_pool
    return pool.get_num_free_blocks() == pool.num_usable_blocks
