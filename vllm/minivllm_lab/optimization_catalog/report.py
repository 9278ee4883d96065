"""Lesson 05's measurements on the engine, its tables, its figure and its command line.

Each `measure_*` function measures, prints its table and returns its figures; its callables are the
lesson's own code.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from minivllm.entrypoints.llm import LLM
from minivllm.sampling_params import SamplingParams
from minivllm_lab.cli import lesson_parser, whole_number
from minivllm_lab.optimization_catalog.shared_prefixes import WORK, serve
from minivllm_lab.pictures.figures import curves, panels
from minivllm_lab.progress import track
from minivllm_lab.tables import Timed, closing, console, table

CAPTURED = (1, 2, 4, 8, 16)
"""Rows of the graphs in the example of padding."""


# ---- prefix caching ------------------------------------------------------------------------------


def measure_prefixes(llm: LLM, without: LLM, text: Sequence[int], users: int, rounds: int) -> dict:
    """Serve each workload with and without the prefix cache; measure the hit rate and the gain in
    time to first token.
    """
    results, rows = {}, []
    for name, work in track(WORK.items(), "sharing prefixes"):
        runs = [[serve(engine, work, text, users) for engine in (llm, without)] for _ in range(rounds)]
        sooner = statistics.median(off.first_token_seconds / on.first_token_seconds for on, off in runs)
        on, off = runs[0]
        hit = on.hits / on.queries
        same = statistics.mean(a == b for a, b in zip(on.answers, off.answers, strict=True))
        results[name] = {"tokens": on.queries, "skipped": on.hits, "hit": hit, "sooner": sooner, "same": same}
        rows.append((name, f"{on.queries:,}", f"{on.hits:,}", f"{hit:.1%}", f"{sooner:.1f} ×", f"{same:.0%}"))
    columns = ("work", "prompt tokens", "not computed", "hit rate", "first token sooner", "same answers")
    table(f"Prefix caching, {users} users", columns, rows)
    return results


def show_thrashing(rates: Mapping[str, float], rounds: int) -> None:
    """Print hit rates by the number of prefixes that are requested in turn."""
    title = f"A pool of 63 blocks, and prefixes of 8 blocks requested in turn, {rounds} times"
    table(title, ("prefixes", *rates), [("hit rate", *(f"{rate:.0%}" for rate in rates.values()))])


def measure_salted(llm: LLM, prompt: list[int]) -> dict:
    """Count the cached tokens of one prompt sent by users with different salts, one after the
    other.
    """
    cached, params = {}, SamplingParams(max_tokens=1)
    llm.reset_prefix_cache()
    for user, salt in (("Ann", "a"), ("Bob", "b"), ("Ann again", "a")):
        outputs = llm.generate({"prompt_token_ids": prompt, "cache_salt": salt}, params, use_tqdm=False)
        cached[user] = outputs[0].num_cached_tokens
    table(f"Found in the cache, of the same {len(prompt)} tokens", list(cached), [list(cached.values())])
    return cached


# ---- CUDA graphs ---------------------------------------------------------------------------------


def replay_wrongly(
    buffers_of: Callable[[int, int], Any], padded_size: Callable[[int, Sequence[int]], int | None]
) -> dict:
    """Replay a graph without padding, and a graph that is too small; print what goes wrong.

    `buffers_of(largest, cache_slots)` makes the lesson's buffers.
    """
    results: dict = {"graphs": {str(batch): padded_size(batch, CAPTURED) for batch in (1, 3, 5, 9, 17)}}
    for name, pad in (("padded", True), ("not padded", False)):
        buffers = buffers_of(8, 16)
        buffers.replay(4, [1, 2, 3, 4], [10, 11, 12, 13])
        buffers.cache[13] = 99  # the fourth request has ended; its slot belongs to another request
        buffers.replay(4, [5, 6, 7], [10, 11, 12], pad)
        results[name] = buffers.cache[13]
    buffers = buffers_of(8, 16)
    buffers.replay(8, [1, 2, 3, 4, 5], [1, 2, 3, 4, 5])
    too_small, right = buffers.replay(4, [6, 7, 8, 9, 11], [1, 2, 3, 4, 5]), [60, 70, 80, 90, 110]
    after = f"another request's 99 is then {results['padded']} with padding, {results['not padded']} without"
    console.print(f"A graph of 4 rows replayed for 3 requests: {after}.")
    console.print(f"Replayed for 5, it returns {too_small} instead of {right}.")
    return results | {"right": right, "too small": too_small}


# ---- the whole lesson ----------------------------------------------------------------------------


def close(results: dict, disturbance: str) -> None:
    """Print the conclusions; leave out those from timings if there was a `disturbance`."""
    prefix, kv = results["prefix"], results["kv"]
    closing(
        f"The prefix cache spared an agent {prefix['an agent']['hit']:.0%} of its prefill, users behind one "
        f"instruction {prefix['one system prompt']['hit']:.0%}, and strangers {prefix['strangers']['hit']:.0%}. With "
        f"10 prefixes in turn in a pool for 7 it spared {results['thrash']['10']:.0%}.",
        f"An int8 cache holds {kv['capacity']['int8']:.2f} times Llama-3.1-8B's tokens and added {kv['added']:+.4f} to "
        f"the loss; int4 weights without groups, with one outlier channel, added "
        f"{results['weights']['ways']['int4, a scale per row']['added_50']:+.2f}.",
        Timed(
            f"The first token arrived {prefix['an agent']['sooner']:.1f} × as fast for the agent, "
            f"{prefix['one system prompt']['sooner']:.1f} × behind one instruction, "
            f"{prefix['strangers']['sooner']:.1f} × for strangers."
        ),
        disturbance=disturbance,
    )


def draw(results: dict, path: str) -> None:
    """Plot hit rates when prefixes outgrow the pool."""
    with panels(path, 1, width=5) as (axes,):
        curves(axes, {"hits": results["thrash"]}, factor=100)
        axes.set(title="Prefixes outgrow the pool", xlabel="prefixes of 8 blocks, pool of 63", ylabel="% hits", ylim=-2)


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Build the parser: the common flags and the lesson's own; --help shows `doc`."""
    flags = lesson_parser(doc)
    users = whole_number(2, 32)
    flags.add_argument("--users", type=users, default=8, help="users sharing prefixes, 2 to 32 (default: 8; quick: 4)")
    groups = (16, 32, 64, 128, 256)
    flags.add_argument("--group", type=int, choices=groups, default=64, help="weights that share an int4 scale")
    return flags
