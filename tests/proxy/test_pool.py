"""Which server gets a request: by turns, or the one with the fewest prompt tokens under way."""

import asyncio
import random
import statistics
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.entrypoints.proxy.bodies import estimated_tokens
from minivllm.entrypoints.proxy.metrics import ProxyMetrics, Turn
from minivllm.entrypoints.proxy.pool import Pool
from minivllm.entrypoints.proxy.settings import POLICIES
from minivllm.errors import MinivllmError
from minivllm_lab.virtual_loop import run_virtual

URLS = ["http://a:1", "http://b:1/", "http://c:1"]


def test_by_turns():
    pool = Pool("prefill", URLS)
    assert [pool.choose().url[7] for _ in range(7)] == list("abcabca")  # type: ignore[union-attr]
    pool.upstreams[1].trouble = "gone"
    assert [pool.choose().url[7] for _ in range(4)] == list("caca")  # type: ignore[union-attr]
    assert pool.choose(tried=pool.healthy) is None


def test_the_least_loaded_one_by_tokens_then_requests_then_by_turns():
    pool = Pool("decode", URLS, "least_loaded")
    assert [pool.choose().url[7] for _ in range(4)] == list("abca")  # type: ignore[union-attr]
    a, b, c = pool.upstreams
    a.num_tokens, b.num_tokens, c.num_tokens = 900, 800, 800
    a.num_requests, b.num_requests, c.num_requests = 1, 40, 20
    assert pool.choose() is c
    assert pool.choose(tried=[c]) is b
    c.trouble = b.trouble = "gone"
    assert pool.choose() is a


def test_an_unknown_policy_is_refused():
    with pytest.raises(MinivllmError, match="round_robin, least_loaded"):
        Pool("decode", URLS, "random")


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9000), st.booleans()), max_size=40))
def test_what_is_under_way_is_counted_exactly(steps: list[tuple[int, int, bool]]):
    """Whatever begins and ends in whatever order, and ends twice."""
    pool = Pool("prefill", URLS)
    metrics = ProxyMetrics(pool.upstreams)
    running: list[tuple[int, int, Turn]] = []
    for server, tokens, ends in steps:
        running.append((server, tokens, Turn(pool.upstreams[server], tokens, metrics)))
        if ends:
            *_, ended = running.pop(tokens % len(running))
            ended.end()
            ended.end()
    requests, tokens_of = Counter(one[0] for one in running), Counter[int]()
    for server, tokens, _ in running:
        tokens_of[server] += tokens
    for index, upstream in enumerate(pool.upstreams):
        assert (upstream.num_requests, upstream.num_tokens) == (requests[index], tokens_of[index])


async def waits(policy: str, prompts: list[int], tokens_per_second: float, seconds: float) -> list[float]:
    """How long each of these prompts waits for its first token, by an M/G/3 queue with one queue a server."""
    pool = Pool("prefill", URLS, policy)
    metrics, free = ProxyMetrics(pool.upstreams), {one: asyncio.Lock() for one in pool.upstreams}
    rng, loop = random.Random(1), asyncio.get_running_loop()

    async def one(tokens: int) -> float:
        began, upstream = loop.time(), pool.choose()
        assert upstream is not None
        turn = Turn(upstream, tokens, metrics)
        async with free[upstream]:
            await asyncio.sleep(tokens / tokens_per_second)
        turn.end()
        return loop.time() - began

    async with asyncio.TaskGroup() as group:
        tasks = []
        for tokens in prompts:
            await asyncio.sleep(rng.expovariate(len(prompts) / seconds))
            tasks.append(group.create_task(one(tokens)))
    return [task.result() for task in tasks]


def test_few_long_prompts_among_short_ones_wait_less_on_the_least_loaded_server():
    """Nine of ten prompts have 100 tokens, one has 8,000, at 60 % load: by turns short ones queue behind long ones."""
    rng = random.Random(0)
    prompts = [8000 if rng.random() < 0.1 else 100 for _ in range(600)]
    per_second = 10_000.0
    seconds = sum(prompts) / per_second / len(URLS) / 0.6
    mean = {
        policy: statistics.mean(run_virtual(lambda p=policy: waits(p, prompts, per_second, seconds), "the pool"))
        for policy in POLICIES
    }
    assert mean["least_loaded"] < 0.75 * mean["round_robin"]


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"prompt": [5] * 300}, 300),
        ({"prompt": "a" * 4000}, 1000),
        ({"prompt": ""}, 1),
        ({"prompt": [[5] * 300, [6] * 100]}, 400),
        ({"prompt": ["a" * 40, "b" * 60]}, 25),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a" * 4000}]}]}, 1002),
        ({}, 1),
        ({"prompt": {"a": [None, 1.5]}}, 1),
    ],
)
def test_a_prompts_tokens_are_estimated(body, tokens):
    assert estimated_tokens(body) == tokens
