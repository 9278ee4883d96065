"""Workloads with shared prefixes: their cache hits can be counted by hand, and nothing else
changes.
"""

import pytest

from minivllm import LLM
from minivllm.config import EMBEDDED_MODEL
from minivllm_lab.optimization_catalog.shared_prefixes import ANSWER_TOKENS, WORK, serve

USERS, BLOCK = 2, 16
TEXT = [(17 * place * place + 5 * place) % 4000 + 1 for place in range(4000)]


@pytest.fixture(scope="module")
def engines():
    settings = {"device": "cpu", "max_model_len": 1024, "num_gpu_blocks_override": 400}
    return [LLM(EMBEDDED_MODEL, **settings, enable_prefix_caching=caching) for caching in (True, False)]


def whole_blocks(tokens):
    return tokens // BLOCK * BLOCK


def turns_of(first, more, turns):
    """Count one conversation's cached tokens: each turn hits the full blocks of what the turn
    before computed.
    """
    lengths = [first + turn * (more + ANSWER_TOKENS) for turn in range(turns)]
    return sum(whole_blocks(length + ANSWER_TOKENS - 1) for length in lengths[:-1])


EXPECTED = {
    "one system prompt": (USERS - 1) * 384,
    "chats of 5 turns": USERS * turns_of(96, 24, 5),
    "an agent": turns_of(256, 24, 2 * USERS),
    "strangers": 0,
}


@pytest.mark.parametrize("name", WORK)
def test_hits_are_what_counting_says(engines, name):
    on, off = (serve(llm, WORK[name], TEXT, USERS) for llm in engines)
    assert on.hits == EXPECTED[name]
    assert on.answers == off.answers
    assert off.hits == 0
    assert min(on.first_token_seconds, off.first_token_seconds) > 0
    assert serve(engines[0], WORK[name], TEXT, USERS).hits == on.hits, "each run begins with an empty cache"
