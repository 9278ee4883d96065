"""Lesson 11's measurements, tables, figure and command line.

Each `measure_*`, `compare_*` or `show_*` function prints its table and returns its figures; the
callables and classes that it takes are the lesson's own code.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from minivllm.config import EMBEDDED_MODEL
from minivllm.core.request import Request
from minivllm.entrypoints.llm import LLM
from minivllm.memory import kv_bytes_per_token
from minivllm.models.tokenizer import load_tokenizer
from minivllm.sampling_params import SamplingParams
from minivllm_lab import palette
from minivllm_lab.cli import lesson_parser, whole_number
from minivllm_lab.figures import SMALL_TEXT, dotted, panels
from minivllm_lab.inside import core_of
from minivllm_lab.paged_model import PagedModel, decoder_of
from minivllm_lab.preemption import cliff
from minivllm_lab.preemption.costs import COPY_SECONDS, LARGE, SHARE_OF_PEAK, SMALL, Crossover
from minivllm_lab.preemption.published_waste import AT_ONCE, PUBLISHED, REQUESTS, waste, workload
from minivllm_lab.progress import track
from minivllm_lab.proof import furthest, show_errors
from minivllm_lab.tables import Timed, closing, console, record_table, table
from minivllm_lab.timing import in_turns
from minivllm_simulate.hardware import get_hardware
from minivllm_simulate.known_models import known_model
from minivllm_simulate.kv_links import get_link
from minivllm_simulate.memory import num_parameters
from minivllm_simulate.virtual_clock import SimulatedRequest

BLOCK_SIZE, AMPLE = 4, 200
TEXTS = {
    "a": "def add(a, b):\n    return",
    "b": "class Stack:\n    def __init__(self",
    "c": "for i in range(10):\n    print(",
}
ANSWER = 20
"""Tokens of every answer."""
URGENT = {"a": 2, "b": 0, "c": 1}
"""Priorities by request; the smallest number is the most urgent."""
LessonCode = Callable[..., Any]
"""A function or class of the lesson's script."""


def paged_model(arguments: argparse.Namespace, num_blocks: int, block_size: int = BLOCK_SIZE) -> PagedModel:
    """Return the lesson's model in float32 with an empty cache of `num_blocks` usable blocks."""
    return PagedModel(decoder_of(arguments), num_blocks + 1, block_size)


class NoModel(PagedModel):
    """A stand-in for a model where only steps are counted: it predicts the same token every time."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size

    def forward(self, token_ids: Sequence[int], start: int, block_ids: Sequence[int]) -> Tensor:
        """Return logits over a vocabulary of two tokens."""
        return torch.tensor([0.0, 1.0])


@cache
def _prompts(model: str) -> dict[str, list[int]]:
    tokenizer = load_tokenizer(model)
    return {name: tokenizer.encode(text).ids for name, text in TEXTS.items()}


def _queue_all(engine: Any, model: str, priorities: Mapping[str, int], caching: bool = False) -> list[Request]:
    """Add the three requests to the engine, each arriving one second after the previous one."""
    requests = [
        Request(name, ids, max_tokens=ANSWER, priority=priorities.get(name, 0), arrival_time=float(at))
        for at, (name, ids) in enumerate(_prompts(model).items())
    ]
    for request in requests:
        if caching:
            request.enable_block_hashes(BLOCK_SIZE)
        engine.waiting.add_request(request)
    return requests


def recomputed(engine: Any, requests: Sequence[Request]) -> int:
    """Count the tokens that the engine computed more than once for these finished requests."""
    return engine.computed - sum(request.num_tokens - 1 for request in requests)


# ---- 1 and 2. step by step -----------------------------------------------------------------------


def show_trace(engine_class: LessonCode, arguments: argparse.Namespace) -> dict[str, Any]:
    """Show each step of a small pool in which a block table changes or a request is preempted."""
    engine = engine_class(NoModel(arguments.blocks + 1, BLOCK_SIZE))
    requests = _queue_all(engine, arguments.model, {})
    rows, steps, shown = [], [], None
    for number, (scheduled, preempted) in enumerate(engine.steps(), start=1):
        held = {request.request_id: len(engine.memory.ids(request)) for request in requests}
        steps.append({"given": scheduled, "preempted": preempted, "held": held})
        if held != shown or preempted:
            tokens = " ".join(f"{name} {count}" for name, count in scheduled.items())
            free = engine.memory.pool.get_num_free_blocks()
            waits = " ".join(request.request_id for request in engine.waiting)
            rows.append((number, tokens, *(count or "" for count in held.values()), free, " ".join(preempted), waits))
        shown = held
    lengths = ", ".join(f"{request.request_id} {request.num_prompt_tokens} + {ANSWER}" for request in requests)
    table(
        f"{arguments.blocks} blocks of {BLOCK_SIZE} slots; prompts and answers: {lengths}",
        ("step", "tokens", *TEXTS, "free", "preempted", "waits"),
        rows,
        "Blocks of each request after the step. Steps that change nothing here are left out.",
    )
    again = recomputed(engine, requests)
    console.print(f"{len(steps)} steps, {engine.computed} tokens computed, {again} of them a second time")
    return {"steps": steps, "computed": engine.computed, "again": again}


# ---- 3. the same tokens --------------------------------------------------------------------------

QUICK_WAYS = "ample memory", "recompute, fcfs", "recompute, blocks found", "V0's swap, block by block"


def compare_tokens(
    engine: LessonCode, swapping: LessonCode, space: LessonCode, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Run the same requests with ample memory and with too little, and with recomputed or swapped
    victims.

    Raises:
        AssertionError: a token differs.
    """

    def swaps(model: PagedModel, in_one_launch: bool) -> Any:
        return swapping(model, space(model.cache, AMPLE, in_one_launch))

    ways: dict[str, Callable[[PagedModel], Any]] = {
        "ample memory": engine,
        "recompute, fcfs": engine,
        "recompute, priority": partial(engine, policy="priority"),
        "recompute, in chunks of 8": partial(engine, token_budget=8),
        "recompute, blocks found": engine,
        "V0's swap, block by block": partial(swaps, in_one_launch=False),
        "the same, gathered": partial(swaps, in_one_launch=True),
    }
    records: dict[str, dict[str, Any]] = {}
    expected = None
    for name in QUICK_WAYS if arguments.quick else ways:
        running = ways[name](paged_model(arguments, AMPLE if name == "ample memory" else arguments.blocks))
        requests = _queue_all(running, arguments.model, URGENT, caching=name.endswith("blocks found"))
        steps = sum(1 for _ in running.steps())
        tokens = [request.output_token_ids for request in requests]
        expected = expected or tokens
        assert tokens == expected, f"{name}: the tokens differ from those with ample memory"
        assert running.memory.num_held == 0, f"{name}: a finished request still holds blocks"
        records[name] = {
            "steps": steps,
            "preemptions": sum(request.num_preemptions for request in requests),
            "computed": running.computed,
            "again": recomputed(running, requests),
            "copies": running.space.num_copies if hasattr(running, "space") else 0,
        }
    record_table(
        "Tokens are the same in all of these",
        {name: {**record, "copies": record["copies"] or ""} for name, record in records.items()},
        "{name} | steps {steps} | preemptions {preemptions} | computed {computed} | again {again} | copies {copies}",
    )
    return records


# ---- 4. the kernel -------------------------------------------------------------------------------

MOVES = {
    "one block": ([3], [0]),
    "scattered": ([9, 2, 7], [1, 4, 0]),
    "none": ([], []),
    "some stay": ([5, -1, 8], [2, 3, 0]),
}


def swap_case(words: int, device: torch.device) -> tuple[list[Tensor], Tensor]:
    """Return a cache of four separately allocated tensors, and an empty staging buffer."""
    tensors = [torch.randn(11, words, device=device) for _ in range(4)]
    return tensors, torch.zeros(6, len(tensors), words, dtype=torch.int32, device=device)


def verify_kernel(launch: Callable[..., Tensor], device: torch.device) -> dict[str, float]:
    """Copy out to the staging buffer and back into an empty cache, and compare bit by bit.

    Raises:
        AssertionError: a word is wrong, or one has moved that should not have.
    """
    errors = dict.fromkeys(MOVES, 0.0)
    for words in track((1, 8, 129), "verifying the kernel"):
        for name, (blocks, slots) in MOVES.items():
            tensors, staging = swap_case(words, device)
            ids = [torch.tensor(numbers, dtype=torch.int32, device=device) for numbers in (blocks, slots)]
            launch(tensors, *ids, staging, True)
            back, expected = ([torch.zeros_like(tensor) for tensor in tensors] for _ in range(2))
            expected_staging = torch.zeros_like(staging)
            moves = [(block, slot) for block, slot in zip(blocks, slots, strict=True) if block >= 0]
            for (block, slot), index in itertools.product(moves, range(len(tensors))):
                expected_staging[slot, index] = tensors[index][block].view(torch.int32)
                expected[index][block] = tensors[index][block]
            launch(back, *ids, staging, False)
            pairs = [(staging, expected_staging), *zip(back, expected, strict=True)]
            errors[name] = max(errors[name], *(furthest(got.double(), right.double()) for got, right in pairs))
    return {"largest_error": show_errors("There and back", errors, 1e-30, "moves")}


# ---- 5. recompute against swap -------------------------------------------------------------------

CROSSOVER_BLOCK = 16
SLOW = {"double": 2.0, "half": 0.5, "eighth": 0.125}
"""Bandwidths of a slow host tier, as shares of the break-even bandwidth."""


def measure_crossover(
    space: LessonCode, break_even: Callable[..., float], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Time the return of preempted requests: recomputed, copied in small pieces, and copied through
    one buffer.
    """
    rounds, sizes = (1, (64, 256)) if arguments.quick else (5, (64, 256, 1024))
    model = paged_model(arguments, 2 * max(sizes) // CROSSOVER_BLOCK, CROSSOVER_BLOCK)
    ids = [1 + index % 4000 for index in range(max(sizes))]
    figures: dict[str, Any] = {"tokens": {}, "bytes_per_token": model.bytes_per_token}
    rows = []
    for size in track(sizes, "bringing requests back"):
        blocks = random.Random(size).sample(range(1, model.num_blocks), size // CROSSOVER_BLOCK)
        spaces = {name: space(model.cache, model.num_blocks, name == "gathered") for name in ("small", "gathered")}
        calls: dict[str, Callable[[], object]] = {"recompute": partial(model.forward, ids[:size], 0, blocks)}
        calls |= {name: partial(_there_and_back, each, blocks) for name, each in spaces.items()}
        times = in_turns(calls, rounds, arguments.device)
        us = {name: 1e6 * min(seconds) / size for name, seconds in times.items()}
        copies = {name: each.num_copies // (rounds + 1) for name, each in spaces.items()}
        figures["tokens"][str(size)] = {"us": us, "copies": copies}
        small, gathered = (cell for name in spaces for cell in ((f"{us[name]:.2f}", copies[name]),))
        rows.append((size, f"{us['recompute']:.2f}", *small, *gathered, f"{us['recompute'] / us['gathered']:.0f} ×"))
    slow_size = 64 if arguments.quick else 256
    parameters = num_parameters(decoder_of(arguments).config)
    flops = 2 * parameters / (figures["tokens"][str(slow_size)]["us"]["recompute"] / 1e6)
    least = figures["break_even"] = break_even(model.bytes_per_token, parameters, flops)
    table(
        "Bringing a request back, on this machine",
        ("tokens", "recompute", "small pieces", "copies", "gathered", "copies", "cheaper by"),
        rows,
        f"µs for each token, out and back. {model.bytes_per_token:,} bytes a token, so the break-even is "
        f"{least / 1e6:.0f} MB/s.",
    )
    figures["slow"] = _measure_slow_tier(space, model, ids[:slow_size], least, arguments)
    return figures


def _there_and_back(space: Any, blocks: list[int], pause: float = 0.0) -> None:
    space.swap_out("request", blocks)
    space.swap_in("request", blocks)
    if pause:
        time.sleep(2 * pause)


def _measure_slow_tier(
    space: LessonCode, model: PagedModel, ids: list[int], least: float, arguments: argparse.Namespace
) -> dict[str, float]:
    """Time the same copies over links at twice, half and an eighth of the break-even bandwidth."""
    blocks = list(range(1, 1 + len(ids) // CROSSOVER_BLOCK))
    records = {}
    for name, factor in SLOW.items():
        pause = len(ids) * model.bytes_per_token / (factor * least)
        calls = {
            "recompute": partial(model.forward, ids, 0, blocks),
            "swap": partial(_there_and_back, space(model.cache, model.num_blocks, True), blocks, pause),
        }
        times = in_turns(calls, 1 if arguments.quick else 3, arguments.device)
        ms = {way: 1e3 * min(seconds) for way, seconds in times.items()}
        records[name] = {"factor": factor, "mb": factor * least / 1e6, **ms, "ratio": ms["swap"] / ms["recompute"]}
    console.print()
    record_table(
        f"A host tier behind a slow link: {len(ids)} tokens out and back",
        records,
        "of the break-even {factor:g} × | MB/s {mb:.1f} | recompute, ms {recompute:.1f} | "
        "swap, ms {swap:.1f} | swap takes {ratio:.2f} ×",
    )
    return {name: record["ratio"] for name, record in records.items()}


GPUS = (
    ("Meta-Llama-3-8B", "H100", "PCIe 5"),
    ("Meta-Llama-3-8B", "A100-80", "PCIe 4"),
    ("Meta-Llama-3-8B", "L4", "PCIe 4"),
    ("opt-13b", "A100-40", "PCIe 4"),
    ("Meta-Llama-3-70B", "H100", "PCIe 5"),
)


def short(name: str) -> str:
    """Shorten a model's name for a table."""
    return name.replace("Meta-", "").replace("Llama-3", "Llama 3").replace("opt", "OPT")


def show_gpus(recompute: LessonCode, swap: LessonCode, break_even: LessonCode, effective: LessonCode) -> dict[str, Any]:
    """Compare recompute and swap by the lesson's formulas, with the small pieces of 2023 and with
    today's large ones.

    Raises:
        AssertionError: the simulator's cost model disagrees.
    """
    records: dict[str, dict[str, Any]] = {}
    for model_name, gpu_name, link_name in GPUS:
        model, gpu, link = known_model(model_name), get_hardware(gpu_name), get_link(link_name)
        size, flops = kv_bytes_per_token(model), SHARE_OF_PEAK * gpu.flops_of("bfloat16")
        parameters, piece = num_parameters(model), SMALL.bytes_of_copy(model)
        least = break_even(size, parameters, flops)
        record: dict[str, Any] = {"recompute_us": 1e6 * recompute(1, parameters, flops), "break_even_gb": least / 1e9}
        for name, pieces in (("small", SMALL), ("large", LARGE)):
            rate = effective(pieces.bytes_of_copy(model), link.bandwidth, COPY_SECONDS)
            us = 1e6 * swap(1, size, rate)
            modelled = Crossover.of(model, gpu, link, pieces, directions=2)
            assert abs(modelled.swap * 1e6 / us - 1) < 1e-9, f"{model_name}: the cost model disagrees"
            record[name] = {"us": us}
        record["copy_us"] = 1e6 * (piece / least - piece / link.bandwidth)
        records[f"{model_name}, {gpu_name}"] = record
    console.print()
    record_table(
        "Modelled: GPUs and links",
        {short(name): record for name, record in records.items()},
        "{name} | recompute {recompute_us:.0f} | small {small[us]:.1f} | large {large[us]:.1f} | "
        "break-even, GB/s {break_even_gb:.1f} | µs a copy {copy_us:.1f}",
        f"µs for each token, out and back, by data sheets: {SHARE_OF_PEAK:.0%} of the peak, and "
        f"{1e6 * COPY_SECONDS:.1f} µs to issue a copy. Links: 50 GB/s for the H100, 25 for the others. "
        "Small: a layer's keys or values of a block; large: a block of all layers. Last: how long issuing a "
        "small copy may take at most, if swap is to win.",
    )
    return records


# ---- 6. tokens computed twice --------------------------------------------------------------------


def show_waste(arguments: argparse.Namespace) -> dict[str, Any]:
    """Show the share of recomputed tokens by pool: as published, and ours by admission rule and
    victim rule.
    """
    pools, requests = ((400,), 60) if arguments.quick else (tuple(PUBLISHED), REQUESTS)
    records: dict[str, dict[str, Any]] = {}
    for blocks in track(pools, "replaying"):
        replay = partial(waste, blocks, requests=requests)
        first, least = replay(whole=False), replay(whole=False, victim="least computed")
        records[str(blocks)] = {
            "published": PUBLISHED[blocks].wasted,
            "first_chunk": first.share,
            "least": least.share,
            "whole": replay(whole=True).share,
            "found": replay(whole=True, caching=True).share,
            "published_less": PUBLISHED[blocks].less,
            "preemptions": first.preemptions,
            "less": 1 - least.recomputed / first.recomputed if first.recomputed else None,
        }
    record_table(
        f"Share of computed tokens that are recomputed: {requests} requests, {AT_ONCE} at once",
        records,
        "blocks {name} | published {published:.1%} | first chunk {first_chunk:.1%} | least {least:.1%} | "
        "whole {whole:.1%} | found {found:.1%}",
        "Published: vllm#54644. First chunk: a waiting request is admitted if its first chunk fits. Least: the same, "
        "and the victim is the request with the fewest computed tokens. Whole: a request is admitted if all its tokens "
        "fit, as in vLLM now. Found: the same with prefix caching.",
    )
    return records


def show_pools(arguments: argparse.Namespace) -> dict[str, Any]:
    """Show the modelled p99 latency of answers and first tokens by pool, under one open load."""
    pools = (800, 500) if arguments.quick else cliff.POOLS
    records = {str(blocks): asdict(cliff.pool_of(blocks)) for blocks in track(pools, "sweeping pools")}
    console.print()
    record_table(
        f"{REQUESTS} requests, {cliff.RATE} a second, by pool",
        records,
        "blocks {name} | full {mean:.0%} | at most {most:.0%} | preemptions {preemptions} | "
        "first, p99 {ttft:.2f} | answer, p50 {p50:.2f} | p99 {p99:.2f}",
        "Full: of the pool, on average; at most: at the peak. Seconds until the first token and the whole answer: "
        "p50 for the median request, p99 for the slowest in a hundred. Modelled: Llama-3.1-8B on an H100.",
    )
    return records


# ---- 7. break it ---------------------------------------------------------------------------------


def break_it(engine: LessonCode, arguments: argparse.Namespace) -> dict[str, Any]:
    """Show thrashing, an urgent request that has to wait, and what a host tier saves."""
    return {"thrash": _thrash(arguments), "inversion": _inversion(engine, arguments), "tier": _tier(arguments)}


def _thrash(arguments: argparse.Namespace) -> dict[str, Any]:
    """Show modelled output tokens per second by `max_num_seqs`, in a pool for about twelve
    requests.
    """
    limits_tried, requests = ((16, 32), 50) if arguments.quick else ((4, 8, 16, 32, 64), 100)
    work = [SimulatedRequest(8 * each.prompt_tokens, each.output_tokens) for each in workload(requests=requests)]
    useful = sum(each.prompt_tokens + each.output_tokens - 1 for each in work)
    records: dict[str, dict[str, Any]] = {}
    for at_once in track(limits_tried, "thrashing"):
        record = records[str(at_once)] = {}
        for name, whole in (("first_chunk", False), ("whole", True)):
            limits = {"max_num_seqs": at_once, "max_num_batched_tokens": 4096, "scheduler_reserve_full_isl": whole}
            run = cliff.on_h100(work, 3200, **limits)
            again = 1 - useful / sum(step.shape.num_tokens for step in run.steps)
            record[name] = {"rate": run.throughput, "preemptions": run.num_preemptions, "again": again}
    record_table(
        f"{len(work)} requests with long prompts, 3,200 blocks",
        records,
        "at once, at most {name} | first chunk {first_chunk[rate]:,.0f}, {first_chunk[again]:.0%} | "
        "whole {whole[rate]:,.0f}, {whole[again]:.0%}",
        "Output tokens a second, and the share of recomputed tokens. Modelled: Llama-3.1-8B on an H100.",
    )
    return records


def _inversion(engine_class: LessonCode, arguments: argparse.Namespace) -> dict[str, Any]:
    """Count the steps to the first token of an urgent request that arrives while two others hold
    the pool.
    """
    ids = _prompts(arguments.model)
    records = {}
    for name, policy, blocks in (
        ("fcfs, small pool", "fcfs", 11),
        ("priority, small pool", "priority", 11),
        ("priority, ample", "priority", AMPLE),
    ):
        engine = engine_class(NoModel(blocks + 1, BLOCK_SIZE), policy=policy)
        for at, other in enumerate(("a", "c")):
            request = Request(other, ids[other], max_tokens=ANSWER, priority=5, arrival_time=float(at))
            engine.waiting.add_request(request)
        for _ in range(6):
            engine.step()
        urgent = Request("urgent", ids["b"], max_tokens=ANSWER, priority=0, arrival_time=9.0)
        engine.waiting.add_request(urgent)
        first = last = 0
        while not urgent.status.is_finished:
            engine.step()
            last += 1
            first = first or last * bool(urgent.num_output_tokens)
        records[name] = {"first": first, "last": last, "preemptions": urgent.num_preemptions}
    console.print()
    columns = "{name} | steps to its first token {first} | last {last} | preempted {preemptions}"
    record_table("An urgent request arrives when two others hold the pool", records, columns)
    return records


def _tier(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the engine under memory pressure with and without a host tier, and count the recomputed
    tokens.

    Raises:
        AssertionError: a token differs.
    """
    prompts = [[7 + index, *([20 + index] * 39)] for index in range(6)]
    sampling = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    transfer = {"kv_connector_extra_config": {"offload_prompt_only": False}}
    ways: dict[str, dict[str, Any]] = {
        "ample memory": {"num_gpu_blocks_override": 100, "enable_prefix_caching": False},
        "recompute": {"enable_prefix_caching": False},
        "recompute, blocks found": {},
        "with a host tier": {"kv_offloading_size": 0.01, "kv_transfer_config": transfer},
    }
    if arguments.quick:
        del ways["ample memory"], ways["recompute, blocks found"]
    records: dict[str, dict[str, int]] = {}
    expected = None
    for name, settings in track(ways.items(), "serving"):
        llm = LLM(
            arguments.model, device="cpu", dtype="float32", max_model_len=96, block_size=16, max_num_seqs=8,
            skip_tokenizer_init=True, **{"num_gpu_blocks_override": 13, **settings},
        )  # fmt: skip
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        expected = expected or tokens
        assert tokens == expected, f"{name}: the tokens differ from those of the first run"
        scheduler = core_of(llm).scheduler
        lookups = scheduler.make_stats().connector_prefix_cache_stats
        records[name] = {
            "preemptions": scheduler.num_preemptions,
            "again": scheduler.num_recomputed_tokens,
            "loaded": lookups.hits + lookups.preempted_hits if lookups else 0,
        }
    console.print()
    record_table(
        "The engine, 12 blocks of 16 slots: 6 requests of 40 + 40 tokens",
        records,
        "{name} | preemptions {preemptions} | computed again {again} | from the host {loaded}",
        "Tokens. The answers are the same in all of these.",
    )
    return records


# ---- the whole lesson ----------------------------------------------------------------------------


def close(figures: dict, disturbance: str) -> None:
    """Print the conclusions; `disturbance` says what else kept the machine busy, if anything."""
    again, small = figures["tokens"]["recompute, fcfs"]["again"], figures["waste"]["400"]
    us = list(figures["crossover"]["tokens"].values())[-1]["us"]
    closing(
        f"Preempted requests generated the same tokens as undisturbed ones: {again} tokens were recomputed, or none "
        "if their blocks were copied.",
        f"With 400 blocks, {small['first_chunk']:.0%} of all computed tokens were recomputed if a first chunk is "
        f"enough for admission, {small['whole']:.0%} if all tokens must fit.",
        Timed(
            f"Here, recomputing a token takes {us['recompute']:.0f} µs, and copying it out and back "
            f"{us['gathered']:.1f}."
        ),
        disturbance=disturbance,
    )


RULES = (palette.GREY, palette.VERMILLION, palette.ORANGE, palette.BLUE, palette.GREEN)
"""The colours of the rules in the figure."""


def draw(figures: dict, path: str) -> None:
    """Plot the waste by pool for each rule, and what a victim's token costs by GPU."""
    labels = {
        "published": "published for vLLM",
        "first_chunk": "admitted by first chunk",
        "least": "the same, other victim",
        "whole": "admitted whole",
        "found": "the same, prefix cache",
    }
    with panels(path, 2, height=4.4) as (left, right):
        for (field, label), colour in zip(labels.items(), RULES, strict=True):
            shares = {int(pool): 100 * record[field] for pool, record in figures["waste"].items()}
            style = "x--" if field == "published" else "o-"
            left.plot(list(shares), list(shares.values()), style, color=colour, label=label)
        left.set(title="Computed a second time", xlabel="blocks of the pool", ylabel="% of all computed tokens")
        left.legend(fontsize=SMALL_TEXT, loc="upper center", bbox_to_anchor=(0.4, -0.16))
        rows = {
            _two_lines(name): {
                "recompute": gpu["recompute_us"],
                "copy in small pieces": gpu["small"]["us"],
                "in large ones": gpu["large"]["us"],
            }
            for name, gpu in figures["gpus"].items()
        }
        dotted(right, rows, (palette.INK, palette.PURPLE, palette.SKY))
        right.set(title="A victim's token (modelled)", xlabel="µs, logarithmic", xlim=(3, 1000))
        right.set_xticks((3, 10, 30, 100, 300, 1000), ("3", "10", "30", "100", "300", "1,000"))
        right.minorticks_off()
        right.legend(fontsize=SMALL_TEXT, loc="upper center", bbox_to_anchor=(0.4, -0.16))


def _two_lines(name: str) -> str:
    return short(name).replace(", ", "\n")


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Add the lesson's own flags to the common ones; `--help` shows `doc`."""
    flags = lesson_parser(doc or "", EMBEDDED_MODEL)
    most = whole_number(11, AMPLE)
    flags.add_argument("--blocks", type=most, default=14, help="blocks of the small pool (11 to 200; default: 14)")
    return flags
