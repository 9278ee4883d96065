"""Chats that run in an engine's own loop while long prompts interrupt them: when each token
arrived, and in which step.

found = disturb(arguments, prompts=4, max_num_batched_tokens=512)
found.gaps, found.firsts, found.scheduled
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from minivllm.config import CacheConfig
from minivllm.engine.core import EngineCore
from minivllm_lab.engines.recording import add_greedy, bare_engine
from minivllm_simulate.virtual_clock import percentile

LONG = "long"
"""The name of each long prompt's request; chats have others."""
CHATS, CHAT_PROMPT, MAX_MODEL_LEN = 4, 32, 2048
BLOCKS = CacheConfig(block_size=16, num_gpu_blocks=600, enable_prefix_caching=False)
QUIET, AFTER, UNCOUNTED = 16, 24, 8
"""Steps before the next long prompt, steps after the last one, and each chat's first tokens,
which do not count.
"""


@dataclass
class Disturbed:
    """The moments at which chats and long prompts got their tokens, in seconds of
    `time.perf_counter()`.

    - `chats`: when each chat's tokens arrived. `firsts`: seconds to first token of each long prompt.
    - `scheduled`: each step's tokens, by request.
    """

    chats: list[list[float]]
    firsts: list[float]
    scheduled: list[dict[str, int]]

    @property
    def gaps(self) -> list[float]:
        """The gaps in seconds between successive tokens of a chat, over all chats."""
        return [later - earlier for times in self.chats for earlier, later in pairwise(times)]


def random_prompt(length: int, seed: int) -> list[int]:
    """Return token ids that share no prefix with those of another seed."""
    draw = random.Random(seed)
    return [draw.randrange(300, 4000) for _ in range(length)]


def latencies(gaps: Sequence[float], firsts: Sequence[float]) -> dict[str, float]:
    """Summarize, in milliseconds, the chats' gaps and, if there were any, the long prompts' times
    to first token.
    """
    figures = {"itl_p50_ms": statistics.median(gaps), "itl_p99_ms": percentile(gaps, 0.99), "itl_max_ms": max(gaps)}
    if firsts:
        figures["ttft_ms"] = statistics.median(firsts)
    return {name: 1e3 * seconds for name, seconds in figures.items()}


def disturb(arguments: argparse.Namespace, prompts: int, **settings: Any) -> Disturbed:
    """Serve the chats, and long prompts of `arguments.prompt` tokens one after another, each answered
    by one token, on an engine with these settings.
    """
    sizes = {"dtype": "float32", "max_model_len": MAX_MODEL_LEN, "max_num_seqs": 8, **settings}
    core = bare_engine(arguments.model, arguments.device, BLOCKS, **sizes)
    _warm_up(core, (arguments.prompt, CHAT_PROMPT))
    disturbed = Disturbed([[] for _ in range(CHATS)], [], [])
    times = dict(zip((f"chat {index}" for index in range(CHATS)), disturbed.chats, strict=True))
    for index, name in enumerate(times):
        add_greedy(core, name, random_prompt(CHAT_PROMPT, index), MAX_MODEL_LEN - CHAT_PROMPT)
    sent, quiet = 0.0, 0
    while len(disturbed.firsts) < prompts or quiet < AFTER:
        quiet += 1
        if quiet == QUIET and len(disturbed.firsts) < prompts:
            sent = time.perf_counter()
            add_greedy(core, LONG, random_prompt(arguments.prompt, 100 + len(disturbed.firsts)), 1)
        step = core.scheduler.schedule()
        outputs = core.scheduler.update_from_output(step, core.executor.start_model(step).result())
        disturbed.scheduled.append(dict(step.num_scheduled_tokens))
        for output in outputs:
            if output.request_id == LONG:
                disturbed.firsts.append(time.perf_counter() - sent)
                quiet = 0
            elif core.scheduler.requests[output.request_id].num_output_tokens > UNCOUNTED:
                times[output.request_id].append(time.perf_counter())
    core.abort_requests(list(times))
    return disturbed


def _warm_up(core: EngineCore, lengths: tuple[int, ...]) -> None:
    for length in lengths:
        add_greedy(core, "warm-up", random_prompt(length, 99), 4)
        while core.has_unfinished_requests():
            core.step()
