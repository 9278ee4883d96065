"""Test on random batches, with drafts and with host memory, that differing tokens and leaked blocks
are counted.
"""

import random

import pytest

from minivllm_lab.engines.inside import core_of


@pytest.fixture(params=["n-gram", "host memory"])
def compared(load_benchmark, request):
    same_tokens = load_benchmark("same_tokens")
    texts, draw = [[(7 * place + 5) % 900 for place in range(120)]], random.Random(1)
    batches = [same_tokens.random_batch(draw, texts) for _ in range(2)]
    settings = {**same_tokens.random_settings(draw), **same_tokens.random_way(draw, request.param)}
    settings |= {"num_gpu_blocks_override": 60, "block_size": 4}

    def compare():
        tally = same_tokens.Tally()
        same_tokens.compare(settings, batches, tally)
        return tally

    return same_tokens, compare


def test_no_token_differs_and_all_blocks_come_back(compared):
    _, compare = compared
    tally = compare()
    assert (tally.batches, tally.differing, tally.held_blocks) == (2, 0, 0)
    assert tally.tokens > 20
    assert tally.with_feature["small pool"] == 2


def test_what_differs_is_counted(compared, monkeypatch):
    same_tokens, compare = compared
    generated = same_tokens.generated

    def one_token_off(llm, batch):
        result = generated(llm, batch)
        if core_of(llm).scheduler.kv_cache_manager.block_pool.num_usable_blocks < 100:
            result[0][-1] += 1
        return result

    monkeypatch.setattr(same_tokens, "generated", one_token_off)
    assert compare().differing > 0
