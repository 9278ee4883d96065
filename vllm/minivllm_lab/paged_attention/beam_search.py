"""Blocks saved by sharing: beam search and parallel samples of one prompt, on lesson 02's block
tables.

At each step of a beam search, some beams have several children and others have none. The children
share the blocks of their common prefix, which is most of the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from minivllm_lab.paged_attention.paged_cache import PagedCache, blocks_held
from minivllm_lab.paged_attention.report import Plan
from minivllm_lab.progress import track
from minivllm_simulate.workloads import WORKLOADS, RequestLengths


@dataclass
class Beam:
    """One candidate: the tokens after the prompt, their log-probability, and the block table of the
    whole text.
    """

    tokens: list[int]
    score: float
    table: Any


# region: beam_search
def beam_search(
    cache: PagedCache, prompt: list[int], width: int, steps: int, fork: Callable[[Any], Any]
) -> tuple[list[Beam], list[int]]:
    """Find the `width` likeliest continuations of `steps` tokens; return them and the blocks held
    after each step.

    `fork` makes a child's table from its parent's.
    """
    beams, held = [Beam([], 0.0, cache.table())], []
    new = [prompt]
    for _ in range(steps):
        logits = cache.step([beam.table for beam in beams], new)
        held.append(blocks_held(cache.pool))
        scores = logits.log_softmax(-1) + torch.tensor([[beam.score] for beam in beams], device=logits.device)
        best, places = scores.flatten().topk(width)
        parents, tokens = places // logits.shape[-1], places % logits.shape[-1]
        children = [
            Beam([*beams[parent].tokens, token], score, fork(beams[parent].table))
            for parent, token, score in zip(parents.tolist(), tokens.tolist(), best.tolist(), strict=True)
        ]
        for beam in beams:
            beam.table.free()
        beams, new = children, [beam.tokens[-1:] for beam in children]
    return beams, held


# endregion


def full_copy(cache: PagedCache, parent: Any) -> Any:
    """Make a child that shares nothing and has its own copies of all blocks."""
    child = cache.table()
    child.append(parent.num_tokens)
    cache.copy(zip(parent.block_ids(), child.block_ids(), strict=True))
    return child


def beams_both_ways(
    cache_of: Callable[[], PagedCache], prompt: list[int], widths: Iterable[int], steps: int
) -> dict[str, dict]:
    """Search twice with each width: once with children that share blocks, once with children that
    copy them. `cache_of` makes an empty cache.

    Returns:
        By width, `saved`, the fraction of blocks saved on average over the steps, and the maximum number of
        blocks held at once either way.

    Raises:
        AssertionError: the two searches found different beams.
    """
    results = {}
    for width in track(widths, "beam search"):
        sharing, shared = beam_search(cache_of(), prompt, width, steps, lambda parent: parent.fork())
        cache = cache_of()
        copying, alone = beam_search(cache, prompt, width, steps, lambda parent, cache=cache: full_copy(cache, parent))
        same = [(beam.tokens, beam.score) for beam in sharing] == [(beam.tokens, beam.score) for beam in copying]
        assert same, "sharing changed the beams"
        saved = 1 - sum(shared) / sum(alone)
        results[str(width)] = {"saved": saved, "most_alone": max(alone), "most_shared": max(shared)}
    return results


def saved_by_samples(
    requests: Iterable[RequestLengths], samples: int, block_size: int, new_table: Callable[[int, int], Any]
) -> float:
    """Return the fraction of blocks saved when each request's `samples` outputs share the blocks of
    its prompt.

    `new_table` makes an empty table in a new pool, given the number of blocks and the block size.
    """
    shared = alone = 0
    for lengths in requests:
        tables = [new_table(2 + samples * (1 + lengths.total // block_size), block_size)]
        tables[0].append(lengths.prompt_tokens)
        tables += [tables[0].fork() for _ in range(samples - 1)]
        for _ in range(lengths.output_tokens):
            for table in tables:
                table.append(1)
            shared += blocks_held(tables[0].pool)
            alone += sum(len(table.blocks) for table in tables)
    return 1 - shared / alone


def measure_sharing(
    cache_of: Callable[[], PagedCache], new_table: Callable[[int, int], Any], prompt: list[int], plan: Plan
) -> dict:
    """Count the blocks that sharing saves, for parallel samples of `plan.samples` requests of each
    kind and for beam searches.
    """
    samples: dict[str, dict[str, float]] = {"alpaca": {}, "sharegpt": {}}
    for name, count in track([(name, count) for name in samples for count in (2, 4, 6)], "parallel samples"):
        requests = WORKLOADS[name].sample(plan.samples, plan.seed)
        samples[name][str(count)] = saved_by_samples(requests, count, plan.block_size, new_table)
    return {"samples": samples, "beams": beams_both_ways(cache_of, prompt, plan.widths, plan.beam_steps)}
