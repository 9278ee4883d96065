"""Measure what a host tier below the pool is worth: chats of several turns, more than it holds, with and without.

    uv run python benchmarks/kv_offload.py
    uv run python benchmarks/kv_offload.py --quick

Each chat begins with a document of its own; each turn adds an answer and a question. All chats take a turn, one after
another, then all take the next one: when a chat's turn comes, the pool has long been used by others. Two engines serve
the same turns, one after another in random order: a pool alone, and one with host memory below it. Texts must be equal.
Shown are the time to first token of the turns after the first, in the median and at the 99th percentile, output tokens
a second of these turns, and how many of a prompt's tokens were computed.

The second table: blocks of all layers between cache and host memory in one call (`kernels/copy_blocks.py`), as shares
of a plain copy of as many bytes, and through the connector's threads, from the order to the end. All that a row
compares is measured in turns; the share is the median of the turns' ratios.

The tables are followed by one line of JSON, which also goes to benchmarks/results/kv_offload.<cpu or the GPU's
name>.json (not with --quick, unless --json names a file).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from minivllm.config import EMBEDDED_MODEL
from minivllm.config.checks import require
from minivllm.entrypoints.llm import LLM
from minivllm.kernels.copy_blocks import BlockRegions
from minivllm.kv_connector.host_copies import HostCopies, host_buffer
from minivllm.models.tokenizer import load_tokenizer
from minivllm.platforms.device import DEVICES, pick_device
from minivllm.sampling_params import SamplingParams
from minivllm_lab.cli import Parser, positive_int, run
from minivllm_lab.corpus import held_out_texts
from minivllm_lab.disturbance import Control
from minivllm_lab.inside import core_of
from minivllm_lab.progress import track
from minivllm_lab.results import ensure_writable, record, write_record
from minivllm_lab.tables import table
from minivllm_lab.timing import in_turns

RESULTS = Path(__file__).resolve().parent / "results"
BLOCK_SIZE = 16
DOCUMENT, QUESTION, ANSWER = 320, 24, 16  # tokens
CHATS, TURNS = 12, 4
POOL_CHATS = 3
"""How many chats the pool holds."""
LONGEST = DOCUMENT + TURNS * (QUESTION + ANSWER)
SYSTEMS = ("pool alone", "host memory")
COPIES = ((1, 64), (16, 64), (64, 64))  # (blocks, KiB of a block in all layers)
LAYERS = 8


def engine(system: str, chats: int) -> LLM:
    """One of the two."""
    blocks_of_a_chat = -(-LONGEST // BLOCK_SIZE)
    extra = {"num_cpu_blocks": (chats + 1) * blocks_of_a_chat}
    tier = {"kv_offloading_size": 1.0, "kv_transfer_config": {"kv_connector_extra_config": extra}}
    return LLM(
        EMBEDDED_MODEL,
        max_model_len=LONGEST + BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=POOL_CHATS * blocks_of_a_chat + 2,
        **(tier if system != "pool alone" else {}),
    )


def documents(count: int, seed: int) -> list[tuple[list[int], list[list[int]]]]:
    """A document and the questions of each chat: windows of held-out Python.

    Raises:
        MinivllmError: there are not so many.
    """
    tokenizer, draw = load_tokenizer(str(EMBEDDED_MODEL)), random.Random(seed)
    text = [token for text in held_out_texts() for token in tokenizer.encode(text).ids]
    starts = range(0, len(text) - LONGEST, LONGEST)
    require(len(starts) >= count, f"there are {len(starts)} held-out documents, not {count}: ask for fewer --rounds")
    found = []
    for start in draw.sample(starts, count):
        rest = [start + DOCUMENT + QUESTION * turn for turn in range(TURNS)]
        found.append((text[start : start + DOCUMENT], [text[one : one + QUESTION] for one in rest]))
    return found


def one_turn(llm: LLM, prompt: list[int], name: str) -> tuple[float, float, list[int]]:
    """Seconds to the first token, and until nothing is left to do; the tokens."""
    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
    start, first = time.perf_counter(), 0.0
    llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)
    tokens: list[int] = []
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            tokens = list(output.outputs[0].token_ids)
            first = first or time.perf_counter() - start
    while core_of(llm).has_unfinished_requests():
        llm.llm_engine.step()  # until what is stored is there
    return first, time.perf_counter() - start, tokens


def chats(count: int, rounds: int, seed: int) -> dict[str, Any]:
    """All systems serve the same chats, `rounds` times; the systems take turns, turn by turn."""
    draw, figures = random.Random(seed), {name: {"ttft": [], "seconds": []} for name in SYSTEMS}
    computed = dict.fromkeys(SYSTEMS, 0)
    known, num_prompt_tokens, num_differing = documents(count * rounds, seed), 0, 0
    engines = {name: engine(name, count) for name in SYSTEMS}
    for round_number in track(range(rounds), "chatting"):
        mine = known[round_number * count : (round_number + 1) * count]
        histories = [list(document) for document, _ in mine]
        for turn in range(TURNS):
            for place, (_, questions) in enumerate(mine):
                histories[place] += questions[turn]
                told: list[list[int]] = []
                for name in draw.sample(SYSTEMS, len(SYSTEMS)):
                    before = cached_tokens(engines[name])
                    first, whole, tokens = one_turn(engines[name], histories[place], f"{round_number} {turn} {place}")
                    told.append(tokens)
                    if turn:
                        figures[name]["ttft"].append(first)
                        figures[name]["seconds"].append(whole)
                        computed[name] += len(histories[place]) - (cached_tokens(engines[name]) - before)
                num_differing += any(tokens != told[0] for tokens in told)
                num_prompt_tokens += len(histories[place]) * bool(turn)
                histories[place] += told[0]
    states = {name: core_of(llm).scheduler.remote for name, llm in engines.items()}
    tiers = {name: remote.connector.tier_state() for name, remote in states.items() if remote}
    for llm in engines.values():
        llm.shutdown()
    return {
        "systems": {name: summary(figures[name], computed[name], num_prompt_tokens) for name in SYSTEMS},
        "tiers": tiers,
        "turns": rounds * count * (TURNS - 1),
        "differing": num_differing,
    }


def cached_tokens(llm: LLM) -> int:
    """Tokens found in the pool and below it, since the start."""
    stats = core_of(llm).scheduler.make_stats()
    external = stats.connector_prefix_cache_stats
    return stats.prefix_cache_stats.hits + (external.hits if external else 0)


def summary(seen: dict[str, list[float]], computed: int, num_prompt_tokens: int) -> dict[str, float]:
    """One system's row."""
    return {
        "ttft_p50_ms": 1e3 * statistics.median(seen["ttft"]),
        "ttft_p99_ms": 1e3 * statistics.quantiles(seen["ttft"], n=100)[98],
        "tokens_per_second": ANSWER * len(seen["seconds"]) / sum(seen["seconds"]),
        "computed_share": computed / num_prompt_tokens,
    }


def copies(blocks: int, block_kib: int, rounds: int, device: torch.device) -> dict[str, float]:
    """GB/s between cache and host memory, and shares of a plain copy of as many bytes between the same memories."""
    region = block_kib * 1024 // (2 * LAYERS)
    cache = [torch.full((4 * blocks, region), 1, dtype=torch.uint8, device=device) for _ in range(2 * LAYERS)]
    regions = BlockRegions.of(cache)
    pinned = device.type == "cuda"
    host, other = (host_buffer(4 * blocks, regions.record_bytes, pinned).fill_(1) for _ in range(2))
    draw = random.Random(0)
    block_ids = draw.sample(range(1, 4 * blocks), blocks)
    in_order, scattered = list(range(blocks)), draw.sample(range(4 * blocks), blocks)
    mover, nbytes = HostCopies(regions), blocks * regions.record_bytes
    there = torch.ones(nbytes, dtype=torch.uint8, device=device)

    def plain() -> None:
        other[:nbytes].copy_(there, non_blocking=True)
        if pinned:
            torch.cuda.synchronize()

    functions: dict[str, Callable[[], object]] = {
        "copy": plain,
        "store": lambda: mover.to_host(block_ids, host, in_order),
        "store_scattered": lambda: mover.to_host(block_ids, host, scattered),
        "load": lambda: mover.from_host(block_ids, host, in_order),
        "load_scattered": lambda: mover.from_host(block_ids, host, scattered),
    }
    seconds = in_turns(functions, rounds)
    found = {f"{name}_gb_s": nbytes / statistics.median(seconds[name]) / 1e9 for name in functions}
    for name in functions:
        ratios = [copied / taken for copied, taken in zip(seconds["copy"], seconds[name], strict=True)]
        found[f"{name}_share"] = statistics.median(ratios)
    return found


def show(figures: dict[str, Any]) -> None:
    """Prints both tables."""
    rows = [
        (
            name,
            f"{one['ttft_p50_ms']:.1f}",
            f"{one['ttft_p99_ms']:.1f}",
            f"{one['tokens_per_second']:.0f}",
            f"{one['computed_share']:.0%}",
        )
        for name, one in figures["chats"]["systems"].items()
    ]
    columns = ["below the pool", "TTFT p50, ms", "TTFT p99, ms", "tokens/s", "of prompts computed"]
    table(f"{figures['chats']['turns']} turns of chats, of which the pool holds {POOL_CHATS}", columns, rows)
    kinds = ("copy", "store", "store_scattered", "load", "load_scattered")
    rows = [
        (name, f"{one['copy_gb_s']:.1f}", *(f"{one[f'{kind}_share']:.0%}" for kind in kinds[1:]))
        for name, one in figures["copies"].items()
    ]
    columns = ["blocks of all layers", "plain copy, GB/s", "store", "scattered", "load", "scattered"]
    table("Between cache and host memory, as shares of a plain copy", columns, rows)


def main(arguments: argparse.Namespace) -> None:
    """Measures, prints, writes; exits with 1 if a text differs."""
    device = pick_device(arguments.device)
    name = "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device).replace(" ", "_")
    path = arguments.json or (None if arguments.quick else RESULTS / f"kv_offload.{name}.json")
    if path:
        ensure_writable(path)
    control = Control()
    with control.watch():
        figures = {
            "chats": chats(CHATS // 2 if arguments.quick else CHATS, 1 if arguments.quick else arguments.rounds, 0)
        }
    torch.set_num_threads(1)  # a tier has one thread for each direction
    with control.watch():
        figures["copies"] = {
            f"{blocks} of {kib} KiB": copies(blocks, kib, 10 if arguments.quick else 200, device)
            for blocks, kib in COPIES
        }
    show(figures)
    result = record("kv_offload", figures, disturbance=control.record())
    if path:
        write_record(path, result)
    print(json.dumps(result))
    if figures["chats"]["differing"]:
        sys.exit(1)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    flags = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--device", choices=DEVICES, default="auto", help="of the copies and the engines")
    flags.add_argument("--rounds", type=positive_int, default=3, help="so many times, with other chats (default: 3)")
    flags.add_argument("--quick", action="store_true", help="fewer chats, one round")
    flags.add_argument("--json", metavar="FILE", help="write the figures to FILE")
    return flags


if __name__ == "__main__":
    run(main, parser())
