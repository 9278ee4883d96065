"""A real engine that verifies the caller's drafts: it reaches any acceptance, and drafting costs
nothing.

    core = drafted_engine(model, device, num_speculative_tokens=3, max_num_seqs=8)
    plain = serve_with_drafts(core, prompts, 64)
    oracle = answers_with_errors(plain.outputs, acceptance=0.7, k=3, seed=0)
    faster = serve_with_drafts(core, prompts, 64, oracle).throughput / plain.throughput

The engine verifies as usual, so the tokens are the same whatever the drafts are. vLLM's
`rejection_sample_method` "synthetic" also accepts at a given rate, but then the tokens are not the
model's.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from minivllm.config import CacheConfig
from minivllm.engine.core import EngineCore
from minivllm_lab.engines.recording import add_greedy, bare_engine, own_clock

BLOCK_SIZE = 16
NEVER = 100
"""Length of the n-grams that the engine's own proposer looks up, so that it finds none."""
Drafts = Callable[[str, int], list[int]]
"""Return the drafts that follow a request's output tokens, from its id and their number."""


class DraftedRun(NamedTuple):
    """A run: each request's output tokens, and the seconds and tokens of the steps that computed no
    prompt.

    In `num_drafts` verifications there were drafts; together they accepted `num_accepted` of them.
    """

    outputs: dict[str, list[int]]
    seconds: list[float]
    num_tokens: int
    num_drafts: int
    num_accepted: int

    @property
    def throughput(self) -> float:
        """Output tokens per second, over the steps that computed no prompt."""
        return self.num_tokens / sum(self.seconds)

    @property
    def step_seconds(self) -> float:
        """Seconds of the median step."""
        return statistics.median(self.seconds)

    @property
    def acceptance_length(self) -> float:
        """Mean number of tokens per verification."""
        return 1 + self.num_accepted / max(1, self.num_drafts)


def drafted_engine(
    model: str | Path, device: torch.device, *, num_speculative_tokens: int, max_num_seqs: int, max_model_len: int = 256
) -> EngineCore:
    """Make an engine that drafts nothing itself and whose pool holds all its requests."""
    cache = CacheConfig(num_gpu_blocks=1 + max_num_seqs * (max_model_len // BLOCK_SIZE + 1), block_size=BLOCK_SIZE)
    looked_up = {"prompt_lookup_min": NEVER, "prompt_lookup_max": NEVER}
    return bare_engine(
        model, device, cache, max_model_len=max_model_len, max_num_seqs=max_num_seqs,
        speculative_config={"method": "ngram", "num_speculative_tokens": num_speculative_tokens, **looked_up},
    )  # fmt: skip


def serve_with_drafts(
    core: EngineCore, prompts: Sequence[Sequence[int]], max_tokens: int, drafts: Drafts | None = None
) -> DraftedRun:
    """Serve these prompts greedily, all at once; verify `drafts` in every step but a request's
    first.
    """
    outputs: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
    before, seconds, num_tokens = core.scheduler.spec_decoding_stats.copy(), [], 0
    clock, requests = own_clock(core), core.scheduler.requests
    for name, prompt in zip(outputs, prompts, strict=True):
        add_greedy(core, name, list(prompt), max_tokens)
    while core.has_unfinished_requests():
        for name, output in outputs.items():
            if drafts and output and name in requests:
                requests[name].spec_token_ids = drafts(name, len(output))
        generating = all(output for name, output in outputs.items() if name in requests)
        start = clock()
        step = core.scheduler.schedule()
        results = core.scheduler.update_from_output(step, core.executor.start_model(step).result())
        if generating:
            seconds.append(clock() - start)
            num_tokens += sum(len(result.new_token_ids) for result in results)
        for result in results:
            outputs[result.request_id].extend(result.new_token_ids)
    after = core.scheduler.spec_decoding_stats
    verified, accepted = after.num_drafts - before.num_drafts, after.num_accepted_tokens - before.num_accepted_tokens
    return DraftedRun(outputs, seconds, num_tokens, verified, accepted)


def answers_with_errors(outputs: Mapping[str, Sequence[int]], acceptance: float, k: int, seed: int) -> Drafts:
    """Return a function that drafts from known answers; each token is right with this probability
    and replaced otherwise.
    """
    draw = random.Random(seed)

    def drafts(name: str, num_output_tokens: int) -> list[int]:
        right = outputs[name][num_output_tokens : num_output_tokens + k]
        return [token if draw.random() < acceptance else (token + 1) % 1000 for token in right]

    return drafts
