"""Run a storm of preemptions, with pools so small that most requests lose their blocks: does any
token differ, is any lost?

    uv run python benchmarks/preemption_storm.py --json benchmarks/results/preemption_storm.cpu.json
    uv run python benchmarks/preemption_storm.py --workloads 40        # the same, shorter

A workload is two to ten requests that arrive at random moments, many with a common beginning,
greedy or drawn with a seed; their tokens are read as they arrive, and some requests are aborted.
Engines are set up at random and serve eight workloads each. The settings vary: a pool that holds
the longest request and up to two blocks more, first come first served or by priority, chunks,
drafts, steps ahead, an int8 cache, two ranks, two stages, and below the pool nothing or host memory
(with a few blocks or many). Each engine must give the tokens of a plain engine that has blocks for
every request, and each position must arrive exactly once and in order. When a
workload is over, no block may be held and no copy may be under way; while a request is unfinished,
tokens must keep arriving. The table is followed by one line of JSON; the exit code is 1 if anything
differs, is lost or stalls.
"""

import argparse
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from same_tokens import ENOUGH_BLOCKS, SAME_NUMBERS, SETTINGS, generated, random_batch
from speculation import WAYS

from minivllm.config import EMBEDDED_MODEL
from minivllm.entrypoints.llm import LLM
from minivllm.models.tokenizer import load_tokenizer
from minivllm.sampling_params import RequestOutputKind, SamplingParams
from minivllm_lab.cli import Parser, positive_int, run
from minivllm_lab.corpus import held_out_texts
from minivllm_lab.inside import core_of
from minivllm_lab.progress import track
from minivllm_lab.results import record, write_record
from minivllm_lab.tables import table

WORKLOADS_OF_AN_ENGINE = 8
LONGEST = SETTINGS["max_model_len"]
TIERS = ("none", "host")
SECONDS_WITHOUT_PROGRESS = 60.0


@dataclass
class Tally:
    """Counts over the workloads with the same tier below the pool; `with_feature` counts workloads
    by feature.
    """

    workloads: int = 0
    requests: int = 0
    preempted: int = 0
    preemptions: int = 0
    aborted: int = 0
    tokens: int = 0
    loaded_tokens: int = 0
    differing: int = 0
    failed: int = 0
    stuck: int = 0
    held_blocks: int = 0
    with_feature: Counter[str] = field(default_factory=Counter)


@dataclass
class Ask:
    """A request: the step at which it arrives, and the number of tokens after which its client
    leaves, if it does.
    """

    name: str
    prompt: list[int]
    params: SamplingParams
    arrival: int
    priority: int
    leaves_after: int | None
    tokens: list[int] = field(default_factory=list)
    over: bool = False
    left: bool = False
    error: str | None = None


def random_engine(draw: random.Random, tier: str, processes: bool) -> dict[str, Any]:
    """Draw an engine's settings; few have several processes, which take long to start."""
    block_size = draw.choice([4, 8, 16])
    settings: dict[str, Any] = {
        "block_size": block_size,
        "num_gpu_blocks_override": -(-LONGEST // block_size) + 1 + draw.choice([0, 0, 1, 2]),
        "max_num_batched_tokens": draw.choice([8, 24, 64, 512]),
        "max_num_seqs": draw.choice([3, 6, 8]),
        "scheduling_policy": draw.choice(["fcfs", "priority"]),
        "scheduler_reserve_full_isl": draw.random() < 0.3,
        "async_scheduling": draw.random() < 0.4,
    }
    if draw.random() < 0.25:
        settings["kv_cache_dtype"] = "int8"
    if draw.random() < 0.4:
        way = WAYS[draw.choice(list(WAYS))]
        settings["speculative_config"] = {**way, "num_speculative_tokens": draw.randrange(1, 4)}
        settings["num_gpu_blocks_override"] += 1
    if processes and draw.random() < 0.06:
        settings["tensor_parallel_size"] = 2
    elif processes and draw.random() < 0.04 and "speculative_config" not in settings:
        settings |= {"pipeline_parallel_size": 2, "async_scheduling": False}
    return settings | random_tier(draw, tier)


def random_tier(draw: random.Random, tier: str) -> dict[str, Any]:
    """Draw the settings of the tier below the engine's pool."""
    if tier == "none":
        return {"enable_prefix_caching": draw.random() < 0.7}
    extra: dict[str, Any] = {"num_cpu_blocks": draw.choice([4, 16, 60, 400])}
    extra["offload_prompt_only"] = draw.random() < 0.4
    return {"kv_offloading_size": 1.0, "kv_transfer_config": {"kv_connector_extra_config": extra}}


def features(settings: dict[str, Any]) -> list[str]:
    """Return the names of the features that these settings test."""
    tried = {
        "priority": settings["scheduling_policy"] == "priority",
        "steps ahead": settings["async_scheduling"],
        "int8": "kv_cache_dtype" in settings,
        "drafts": "speculative_config" in settings,
        "chunks": settings["max_num_batched_tokens"] < 64,
        "two ranks": "tensor_parallel_size" in settings,
        "two stages": "pipeline_parallel_size" in settings,
    }
    return [name for name, is_tried in tried.items() if is_tried]


def random_asks(draw: random.Random, texts: list[list[int]], first: int) -> list[Ask]:
    """Draw two to ten requests."""
    asks: list[Ask] = []
    while len(asks) < 2:
        for prompt, params in (pair for _ in range(2) for pair in zip(*random_batch(draw, texts), strict=True)):
            most = min(draw.randrange(20, LONGEST), LONGEST - 1 - len(prompt))
            params = replace(params, max_tokens=most, output_kind=RequestOutputKind.DELTA)
            leaves = draw.randrange(0, 20) if draw.random() < 0.15 else None
            name, arrival = f"r{first + len(asks)}", draw.choice([0, 0, draw.randrange(30)])
            asks.append(Ask(name, prompt, params, arrival, draw.randrange(3), leaves))
    return asks[:10]


def serve(llm: LLM, asks: list[Ask], preempted: set[str]) -> bool:
    """Step until all requests have ended, reading tokens as they arrive; return False if progress
    stops.

    The core's ids of requests that were preempted are added to `preempted`.
    """
    engine, by_name, step = llm.llm_engine, {ask.name: ask for ask in asks}, 0
    waiting = sorted(asks, key=lambda ask: ask.arrival)
    until = time.monotonic() + SECONDS_WITHOUT_PROGRESS
    while waiting or engine.has_unfinished_requests() or core_of(llm).has_unfinished_requests():
        while waiting and (waiting[0].arrival <= step or not engine.has_unfinished_requests()):
            ask = waiting.pop(0)
            engine.add_request(ask.name, {"prompt_token_ids": ask.prompt}, ask.params, priority=ask.priority)
        for output in engine.step():
            ask = by_name[output.request_id]
            assert not ask.over, "an output after the last one"
            ask.tokens += output.outputs[0].token_ids
            ask.over, until = output.finished, time.monotonic() + SECONDS_WITHOUT_PROGRESS
            ask.error = str(output.outputs[0].error) if output.outputs[0].finish_reason == "error" else None
        known = core_of(llm).scheduler.requests.values()
        preempted.update(request.request_id for request in known if request.num_preemptions)
        for ask in asks:
            here = not ask.over and ask not in waiting
            if here and ask.leaves_after is not None and len(ask.tokens) >= ask.leaves_after:
                engine.abort_request([ask.name])
                ask.over = ask.left = True
        step += 1
        if time.monotonic() > until:
            return False
    return True


def held_blocks(llm: LLM) -> int:
    """Count the blocks in the pool and the tier that are held although no request is left, and the
    copies still in flight.
    """
    scheduler = core_of(llm).scheduler
    pool = scheduler.kv_cache_manager.block_pool
    held = pool.num_usable_blocks - pool.get_num_free_blocks()
    if scheduler.remote is not None:
        side = scheduler.remote.connector  # pyright: ignore[reportAttributeAccessIssue]
        held += side.manager.num_pinned_blocks + sum(side.tier_state()[name] for name in ("loading", "storing"))
    return held


class PlainEngines:
    """Engines with enough blocks for all requests, one for each combination of settings that
    changes numbers; one with several ranks is not kept.
    """

    def __init__(self) -> None:
        self._kept: dict[str, LLM] = {}

    def expected(self, settings: dict[str, Any], batches: list[list[Ask]]) -> list[list[list[int]]]:
        """Return the tokens that each request should get; each workload is one batch."""
        same = {name: settings[name] for name in SAME_NUMBERS if name in settings}
        key = json.dumps(same)
        llm = self._kept.pop(key, None) or LLM(EMBEDDED_MODEL, **SETTINGS | same | ENOUGH_BLOCKS)
        found = [
            generated(llm, ([ask.prompt for ask in asks], [self._whole(ask.params) for ask in asks]))
            for asks in batches
        ]
        if "tensor_parallel_size" in same:
            llm.shutdown()
        else:
            self._kept[key] = llm
        return found

    def _whole(self, params: SamplingParams) -> SamplingParams:
        return replace(params, output_kind=RequestOutputKind.CUMULATIVE)


def compare(
    tier: str, draw: random.Random, texts: list[list[int]], count: int, plain: PlainEngines, processes: bool
) -> Tally:
    """Serve `count` workloads with one random engine, and count what differs from a plain one."""
    tally = Tally()
    settings = random_engine(draw, tier, processes)
    batches = [random_asks(draw, texts, 10 * number) for number in range(count)]
    expected = plain.expected(settings, batches)
    llm = LLM(EMBEDDED_MODEL, **SETTINGS | settings)
    try:
        for asks, tokens in zip(batches, expected, strict=True):
            if not count_workload(llm, asks, tokens, tally):
                break
        stats = core_of(llm).scheduler.make_stats()
    finally:
        llm.shutdown()
    tally.preemptions = stats.num_preemptions
    lookups = stats.connector_prefix_cache_stats
    tally.loaded_tokens = lookups.hits + lookups.preempted_hits if lookups else 0
    tally.with_feature.update(dict.fromkeys(features(settings), tally.workloads))
    if tally.differing or tally.failed or tally.stuck or tally.held_blocks:
        print(f"{settings}: {vars(tally)}", file=sys.stderr)
    return tally


def count_workload(llm: LLM, asks: list[Ask], expected: list[list[int]], tally: Tally) -> bool:
    """Serve one workload and add its counts to `tally`; return whether it ended."""
    preempted: set[str] = set()
    ended = serve(llm, asks, preempted)
    tally.workloads += 1
    tally.requests += len(asks)
    tally.preempted += len(preempted)
    tally.stuck += not ended
    tally.held_blocks += held_blocks(llm) if ended else 0
    for ask, tokens in zip(asks, expected, strict=True):
        tally.tokens += len(ask.tokens)
        tally.aborted += ask.left
        tally.failed += ask.error is not None
        tally.differing += ask.tokens != (tokens[: len(ask.tokens)] if ask.left else tokens)
    return ended


def added(tallies: list[Tally]) -> Tally:
    """Return the sum of several tallies."""
    total = Tally()
    for one in tallies:
        for name, value in vars(one).items():
            setattr(total, name, getattr(total, name) + value)
    return total


def storm(workloads: int, seed: int, processes: bool = True) -> dict[str, Tally]:
    """Serve this many workloads, half of them with a host tier; return the tallies by tier."""
    tokenizer, plain = load_tokenizer(str(EMBEDDED_MODEL)), PlainEngines()
    texts = [ids for text in held_out_texts() if len(ids := tokenizer.encode(text).ids) > 100]
    found: dict[str, list[Tally]] = {tier: [] for tier in TIERS}
    engines = -(-workloads // WORKLOADS_OF_AN_ENGINE)
    for number in track(range(engines), "serving"):
        draw, tier = random.Random(f"{seed} {number}"), TIERS[number % len(TIERS)]
        count = min(WORKLOADS_OF_AN_ENGINE, workloads - number * WORKLOADS_OF_AN_ENGINE)
        found[tier].append(compare(tier, draw, texts, count, plain, processes))
    return {tier: added(tallies) for tier, tallies in found.items()}


def main(arguments: argparse.Namespace) -> None:
    """Serve the workloads, and exit with 1 if anything differs."""
    torch.set_num_threads(1)  # steps are small, and threads would wait for each other
    began = time.process_time()
    tallies = storm(40 if arguments.quick else arguments.workloads, arguments.seed)
    columns = ["below the pool", "workloads", "requests", "preempted", "preemptions", "tokens", "loaded"]
    names = ("workloads", "requests", "preempted", "preemptions", "tokens", "loaded_tokens", "differing", "failed")
    rows = [
        (tier, *(f"{getattr(one, name):,}" for name in (*names, "stuck", "held_blocks")))
        for tier, one in tallies.items()
    ]
    table("Workloads in pools that are too small, compared with the plain engine",
          [*columns, "differing", "failed", "stuck", "blocks lost"], rows)  # fmt: skip
    figures = {tier: vars(one) for tier, one in tallies.items()}
    result = record("preemption_storm", figures, seed=arguments.seed, cpu_seconds=time.process_time() - began)
    if arguments.json:
        write_record(arguments.json, result)
    print(json.dumps(result))
    if any(one.differing or one.failed or one.stuck or one.held_blocks for one in tallies.values()):
        sys.exit(1)


def parser() -> argparse.ArgumentParser:
    flags = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--workloads", type=positive_int, default=1000, help="random workloads (default: 1000)")
    flags.add_argument("--quick", action="store_true", help="only 40 workloads")
    flags.add_argument("--seed", type=int, default=0, help="seed for all random choices (default: 0)")
    flags.add_argument("--json", metavar="FILE", help="also write the figures to FILE")
    return flags


if __name__ == "__main__":
    run(main, parser())
