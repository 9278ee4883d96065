"""Serve random batches in pools that may be too small, alone, with drafts, and with host memory
below the pool: does any token differ?

    uv run python benchmarks/same_tokens.py --json benchmarks/results/same_tokens.cpu.json      # an hour
    uv run python benchmarks/same_tokens.py --batches 20

For each way, engines are set up at random (block size, token budget, a pool that may be too small
for the batch, prefix cache, steps ahead, an int8 cache, two ranks), and each serves some batches of
one to six requests: windows of held-out Python, many with a common beginning, greedy or drawn with
a seed. The engine that they are compared with has the same cache and number of ranks, on which the
rounding of sums depends; otherwise it is plain: no drafts, steps one after another, blocks for
every request. After each batch, every block must be free again, and no copy may be under way. The
table is followed by one line of JSON; the exit code is 1 if a token differs or a block is lost.
"""

import argparse
import random
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from speculation import WAYS as METHODS

from minivllm.config import EMBEDDED_MODEL
from minivllm.entrypoints.llm import LLM
from minivllm.models.tokenizer import load_tokenizer
from minivllm.sampling_params import SamplingParams
from minivllm_lab.cli import benchmark_parser, positive_int, run
from minivllm_lab.corpus import held_out_texts
from minivllm_lab.engines.inside import core_of
from minivllm_lab.progress import track
from minivllm_lab.results import record, report
from minivllm_lab.tables import table

ALONE, HOST = "no drafts", "host memory"
WAYS = (ALONE, HOST, *METHODS)
BATCHES_OF_AN_ENGINE = 10
SETTINGS = {"device": "cpu", "dtype": "float32", "max_model_len": 96}
SAME_NUMBERS = ("kv_cache_dtype", "block_size", "tensor_parallel_size")
"""Settings on which the last digits of logits depend: an int8 cache makes a digit into a step of
its scale.
"""
ENOUGH_BLOCKS = {"num_gpu_blocks_override": 400, "async_scheduling": False}

Batch = tuple[list[list[int]], list[SamplingParams]]


@dataclass
class Tally:
    """Counts for one way; `with_feature` counts batches by feature."""

    batches: int = 0
    requests: int = 0
    tokens: int = 0
    differing: int = 0
    accepted: int = 0
    loaded: int = 0
    preemptions: int = 0
    held_blocks: int = 0
    with_feature: Counter[str] = field(default_factory=Counter)


def random_settings(draw: random.Random) -> dict[str, Any]:
    """Draw an engine's settings; few have two ranks, whose processes take long to start."""
    block_size = draw.choice([4, 8, 16])
    tight = draw.random() < 0.5
    settings: dict[str, Any] = {
        "block_size": block_size,
        "max_num_batched_tokens": draw.choice([7, 24, 64, 512]),
        "max_num_seqs": draw.choice([2, 6]),
        "enable_prefix_caching": draw.random() < 0.7,
        "async_scheduling": draw.random() < 0.5,
        "num_gpu_blocks_override": 104 // block_size + 3 if tight else 400,
    }
    if draw.random() < 0.25:
        settings["kv_cache_dtype"] = "int8"
    if draw.random() < 0.06:
        settings["tensor_parallel_size"] = 2
    return settings


def random_way(draw: random.Random, name: str) -> dict[str, Any]:
    """Draw the settings that make an engine draft by this method, or have host memory."""
    if name == HOST:
        extra = {"num_cpu_blocks": draw.choice([4, 16, 60, 400]), "offload_prompt_only": draw.random() < 0.4}
        return {"kv_offloading_size": 1.0, "kv_transfer_config": {"kv_connector_extra_config": extra},
                "enable_prefix_caching": True}  # fmt: skip
    if name == ALONE:
        return {}
    return {"speculative_config": {**METHODS[name], "num_speculative_tokens": draw.randrange(1, 6)}}


def features(settings: dict[str, Any]) -> Iterator[str]:
    """Yield the names of the features that these settings test."""
    yield "small pool" if settings["num_gpu_blocks_override"] < 400 else "large pool"
    yield from (name for name in ("enable_prefix_caching", "async_scheduling") if settings[name])
    yield from (name for name in ("kv_cache_dtype", "tensor_parallel_size") if name in settings)
    if settings["max_num_batched_tokens"] < 64:
        yield "chunks"


def random_batch(draw: random.Random, texts: list[list[int]]) -> Batch:
    """Draw one to six requests from one text, most of them with a common beginning."""
    whole = draw.choice(texts)
    first, prompts, params = draw.randrange(len(whole) - 60), [], []
    for index in range(draw.randrange(1, 7)):
        start = first + draw.choice([0, 0, draw.randrange(40)])
        prompts.append(whole[start : start + draw.randrange(1, 50)])
        temperature, most = draw.choice([0.0, 0.0, 0.8]), draw.randrange(1, 40)
        params.append(SamplingParams(temperature=temperature, seed=index, max_tokens=most, ignore_eos=True))
    return prompts, params


def generated(llm: LLM, batch: Batch) -> list[list[int]]:
    """Return each request's tokens."""
    return [list(one.outputs[0].token_ids) for one in llm.generate(*batch, use_tqdm=False)]


def compare(settings: dict[str, Any], batches: list[Batch], tally: Tally) -> None:
    """Serve the batches with these settings and with a plain engine, and count differences."""
    same_numbers = {name: settings[name] for name in SAME_NUMBERS if name in settings}
    plain = LLM(EMBEDDED_MODEL, **SETTINGS | same_numbers | ENOUGH_BLOCKS)
    tried = LLM(EMBEDDED_MODEL, **SETTINGS | settings)
    for batch in batches:
        expected, found = generated(plain, batch), generated(tried, batch)
        tally.requests += len(found)
        tally.tokens += sum(map(len, expected))
        tally.differing += sum(one != other for one, other in zip(expected, found, strict=True))
        tally.held_blocks += held_blocks(tried)
    stats, lookups = tried.llm_engine.stats, core_of(tried).scheduler.make_stats().connector_prefix_cache_stats
    tally.loaded += lookups.hits + lookups.preempted_hits if lookups else 0
    tally.batches += len(batches)
    tally.accepted += stats.spec_decoding_stats.num_accepted_tokens
    tally.preemptions += stats.num_preemptions
    tally.with_feature.update({name: len(batches) for name in features(settings)})
    for llm in (plain, tried):
        llm.shutdown()


def held_blocks(llm: LLM) -> int:
    """Count the blocks in the pool and in host memory that are held although no request is left,
    and the copies still under way.
    """
    scheduler = core_of(llm).scheduler
    while core_of(llm).has_unfinished_requests():  # copies to the host
        llm.llm_engine.step()
    pool = scheduler.kv_cache_manager.block_pool
    held = pool.num_usable_blocks - pool.get_num_free_blocks()
    if scheduler.remote is not None:
        side = scheduler.remote.connector  # pyright: ignore[reportAttributeAccessIssue]
        held += side.manager.block_pool.get_usage() + sum(side.tier_state()[name] for name in ("loading", "storing"))
    return held


def main(arguments: argparse.Namespace) -> None:
    """Compare the batches for each way, and exit with 1 if anything differs."""
    tokenizer, draw = load_tokenizer(str(EMBEDDED_MODEL)), random.Random(arguments.seed)
    texts = [ids for text in held_out_texts() if len(ids := tokenizer.encode(text).ids) > 100]
    tallies = {name: Tally() for name in WAYS}
    engines = -(-arguments.batches // BATCHES_OF_AN_ENGINE)
    for name in track([name for name in WAYS for _ in range(engines)], "comparing"):
        most = min(BATCHES_OF_AN_ENGINE, arguments.batches - tallies[name].batches)
        settings = random_settings(draw) | random_way(draw, name)
        compare(settings, [random_batch(draw, texts) for _ in range(most)], tallies[name])
    columns = ["way", "batches", "requests", "tokens", "accepted", "loaded", "preemptions", "differing", "blocks lost"]
    counts = ("batches", "requests", "tokens", "accepted", "loaded", "preemptions", "differing", "held_blocks")
    rows = [(name, *(f"{getattr(one, count):,}" for count in counts)) for name, one in tallies.items()]
    table("Random batches, compared with the plain engine", columns, rows)
    result = record("same_tokens", {name: vars(one) for name, one in tallies.items()}, seed=arguments.seed)
    report(result, arguments.json)
    if any(one.differing or one.held_blocks for one in tallies.values()):
        sys.exit(1)


def parser() -> argparse.ArgumentParser:
    flags = benchmark_parser(__doc__)
    flags.add_argument("--batches", type=positive_int, default=300, help="random batches for each way (default: 300)")
    flags.add_argument("--seed", type=int, default=0, help="seed for all random choices (default: 0)")
    return flags


if __name__ == "__main__":
    run(main, parser())
