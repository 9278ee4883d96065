"""Workloads whose prompts share prefixes, as in real use of an engine, and how much a prefix cache
saves.

Each workload asks the engine for answers and puts them into its next prompts. All text comes from
one stream of tokens, so the only repetitions are the workload's own.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

from minivllm.entrypoints.llm import LLM
from minivllm.errors import MinivllmError
from minivllm.sampling_params import SamplingParams

ANSWER_TOKENS = 8
Ask = Callable[[list[list[int]]], list[list[int]]]
"""Answers a batch of prompts."""
Take = Callable[[int], list[int]]
"""Takes the given number of tokens of unseen text."""


def system_prompt(ask: Ask, take: Take, users: int) -> None:
    """Have each user ask a short question after one long shared instruction."""
    instruction = take(384)
    ask([instruction + take(32) for _ in range(users)])


def chats(ask: Ask, take: Take, users: int) -> None:
    """Hold conversations of five turns, each of which sends the whole conversation so far."""
    talks = [take(96) for _ in range(users)]
    for _ in range(5):
        talks = [talk + answer + take(24) for talk, answer in zip(talks, ask(talks), strict=True)]


def agent(ask: Ask, take: Take, users: int) -> None:
    """Run one agent's loop, two rounds per user: instructions, and all tool output so far."""
    talk = take(256)
    for _ in range(2 * users):
        talk = talk + ask([talk])[0] + take(24)


def strangers(ask: Ask, take: Take, users: int) -> None:
    """Serve users who share no text."""
    ask([take(416) for _ in range(users)])


WORK = {"one system prompt": system_prompt, "chats of 5 turns": chats, "an agent": agent, "strangers": strangers}


class Served(NamedTuple):
    """Results of a workload: the prompt tokens looked up and found in the cache, the mean seconds
    to the first token, and the answers.
    """

    queries: int
    hits: int
    first_token_seconds: float
    answers: tuple[tuple[int, ...], ...]


def serve(llm: LLM, work: Callable[[Ask, Take, int], None], text: Sequence[int], users: int) -> Served:
    """Run the workload, starting with an empty prefix cache.

    Raises:
        MinivllmError: the text is too short, or the engine rejects a prompt.
    """
    stream, waits, answers = iter(text), [], []
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True)

    def take(count: int) -> list[int]:
        tokens = list(islice(stream, count))
        if len(tokens) < count:
            raise MinivllmError(f"{len(text)} tokens of text are not enough for {users} users")
        return tokens

    def ask(prompts: list[list[int]]) -> list[list[int]]:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        for output in outputs:
            assert output.metrics is not None
            assert output.metrics.first_token_time is not None
            waits.append(output.metrics.first_token_time - output.metrics.arrival_time)
            answers.append(tuple(output.outputs[0].token_ids))
        return [list(answer) for answer in answers[-len(prompts) :]]

    llm.reset_prefix_cache()
    before = llm.llm_engine.stats.prefix_cache_stats
    work(ask, take, users)
    counts = llm.llm_engine.stats.prefix_cache_stats
    queries, hits = counts.queries - before.queries, counts.hits - before.hits
    return Served(queries, hits, statistics.mean(waits), tuple(answers))
