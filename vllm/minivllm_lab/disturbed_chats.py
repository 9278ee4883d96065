"""Chats that run in an engine's own loop while long prompts interrupt them: when each token
arrived, and in which step.

found = disturb(core, prompt_tokens=1800, prompts=4)
found.gaps, found.firsts, found.scheduled
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from itertools import pairwise

from minivllm.engine.core import EngineCore
from minivllm_lab.recording import add_greedy

LONG = "long"
"""The name of each long prompt's request; chats have others."""
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


def disturb(core: EngineCore, prompt_tokens: int, prompts: int, chats: int = 4, chat_prompt: int = 32) -> Disturbed:
    """Serve the chats, and `prompts` long prompts one after another, each answered by one token."""
    _warm_up(core, (prompt_tokens, chat_prompt))
    disturbed = Disturbed([[] for _ in range(chats)], [], [])
    times = dict(zip((f"chat {index}" for index in range(chats)), disturbed.chats, strict=True))
    for index, name in enumerate(times):
        add_greedy(core, name, random_prompt(chat_prompt, index), core.scheduler.config.max_model_len - chat_prompt)
    sent, quiet = 0.0, 0
    while len(disturbed.firsts) < prompts or quiet < AFTER:
        quiet += 1
        if quiet == QUIET and len(disturbed.firsts) < prompts:
            sent = time.perf_counter()
            add_greedy(core, LONG, random_prompt(prompt_tokens, 100 + len(disturbed.firsts)), 1)
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
