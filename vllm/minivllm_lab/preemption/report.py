"""Lesson 11's measurements, its tables, its figure and its command line.

A function `measure_*`, `compare_*` or `show_*` prints its table and returns its figures; what it takes as a callable or
a class is code of the lesson.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minivllm.config import EMBEDDED_MODEL, CacheConfig, SchedulerConfig
from minivllm.core.request import Request
from minivllm.entrypoints.llm import LLM
from minivllm.memory import kv_bytes_per_token, num_parameters
from minivllm.models.tokenizer import load_tokenizer
from minivllm.sampling_params import SamplingParams
from minivllm_lab import palette
from minivllm_lab.cli import lesson_parser, whole_number
from minivllm_lab.figures import panels
from minivllm_lab.inside import core_of
from minivllm_lab.paged_model import PagedModel, decoder_of
from minivllm_lab.paged_model import load as load
from minivllm_lab.preemption.costs import COPY_SECONDS, LARGE, SHARE_OF_PEAK, SMALL, Crossover
from minivllm_lab.preemption.published_waste import AT_ONCE, PUBLISHED, REQUESTS, waste, workload
from minivllm_lab.progress import track
from minivllm_lab.proof import furthest, refusal, show_errors
from minivllm_lab.tables import Timed, closing, console, table
from minivllm_lab.timing import in_turns
from minivllm_simulate.cost_model import RooflineCost
from minivllm_simulate.hardware import get_hardware
from minivllm_simulate.known_models import known_model
from minivllm_simulate.kv_links import get_link
from minivllm_simulate.virtual_clock import SimulatedRequest, percentile, simulate

BLOCK_SIZE, AMPLE = 4, 200
TEXTS = {
    "a": "def add(a, b):\n    return",
    "b": "class Stack:\n    def __init__(self",
    "c": "for i in range(10):\n    print(",
}
ANSWER = 20
"""Tokens of every answer."""
URGENT = {"a": 2, "b": 0, "c": 1}
"""Priorities by request; the least is the most urgent."""
Make = Callable[..., Any]


def paged_model(arguments: argparse.Namespace, num_blocks: int, block_size: int = BLOCK_SIZE) -> PagedModel:
    """The lesson's model in float32 with an empty cache of its own; block 0 is nobody's."""
    return PagedModel(decoder_of(arguments), num_blocks + 1, block_size)


class NoModel(PagedModel):
    """Stands in for a model where only steps are counted: the same token for ever."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size

    def forward(self, token_ids: Sequence[int], start: int, block_ids: Sequence[int]) -> Tensor:
        """Logits of a vocabulary of two."""
        return torch.tensor([0.0, 1.0])


@cache
def _prompts(model: str) -> dict[str, list[int]]:
    tokenizer = load_tokenizer(model)
    return {name: tokenizer.encode(text).ids for name, text in TEXTS.items()}


def requests(arguments: argparse.Namespace, priorities: Mapping[str, int] | None = None) -> list[Request]:
    """Three requests, which come one after the other."""
    return [
        Request(name, ids, max_tokens=ANSWER, priority=(priorities or {}).get(name, 0), arrival_time=float(at))
        for at, (name, ids) in enumerate(_prompts(arguments.model).items())
    ]


def ms(seconds: float) -> str:
    """Seconds, as a table shows milliseconds."""
    return f"{1e3 * seconds:.2f}" if seconds < 0.01 else f"{1e3 * seconds:.1f}"


# ---- 1 and 2. step by step -------------------------------------------------------------------------------------------


def show_trace(engine: Make, arguments: argparse.Namespace) -> dict[str, Any]:
    """Every step in which a table of blocks changes or somebody is preempted, with a small pool."""
    made = engine(paged_model(arguments, arguments.blocks))
    all_ = [made.add(request) for request in requests(arguments)]
    rows, steps, shown = [], [], None
    for number, (given, preempted) in enumerate(made.steps(), start=1):
        held = {one.request_id: len(made.memory.ids(one)) for one in all_}
        steps.append({"given": given, "preempted": preempted, "held": held})
        if held != shown or preempted:
            tokens = " ".join(f"{name} {count}" for name, count in given.items())
            free = made.memory.pool.get_num_free_blocks()
            waits = " ".join(request.request_id for request in made.waiting)
            rows.append((number, tokens, *(count or "" for count in held.values()), free, " ".join(preempted), waits))
        shown = held
    knows = ", ".join(f"{one.request_id} {one.num_prompt_tokens} + {ANSWER}" for one in all_)
    title = f"{arguments.blocks} blocks of {BLOCK_SIZE} slots; prompts and answers: {knows}"
    columns = ("step", "tokens", *TEXTS, "free", "preempted", "waits")
    table(title, columns, rows, "Blocks by request after the step. Steps that change nothing of this are left out.")
    again = made.computed - sum(one.num_tokens - 1 for one in all_)
    console.print(f"{len(steps)} steps, {made.computed} tokens computed, {again} of them a second time")
    return {"steps": steps, "computed": made.computed, "again": again}


def show_policies(engine: Make, arguments: argparse.Namespace) -> dict[str, Any]:
    """Who is preempted under either policy, and when each answer ends."""
    found, rows = {}, []
    for policy in ("fcfs", "priority"):
        made = engine(paged_model(arguments, arguments.blocks), policy=policy)
        all_ = [made.add(request) for request in requests(arguments, URGENT)]
        ends: dict[str, int] = {}
        for number, _ in enumerate(made.steps(), start=1):
            ends |= {one.request_id: number for one in all_ if one.status.is_finished and one.request_id not in ends}
        one = found[policy] = {"preempted": {one.request_id: one.num_preemptions for one in all_}, "ends": ends}
        rows.append((policy, *(f"{one['preempted'][name]} times, ends at {ends[name]}" for name in TEXTS)))
    console.print()
    columns = ("policy", *(f"{name}, priority {URGENT[name]}" for name in TEXTS))
    table("The same three by either policy; the least number is the most urgent", columns, rows, words=True)
    return found


# ---- 3. the same tokens ----------------------------------------------------------------------------------------------


def compare_tokens(engine: Make, swapping: Make, space: Make, arguments: argparse.Namespace) -> dict[str, Any]:
    """The same requests with ample memory and with too little, computed again or swapped.

    Raises:
        AssertionError: a token differs.
    """
    blocks, found, rows = arguments.blocks, {}, []

    def swaps(in_one_launch: bool) -> Any:
        model = paged_model(arguments, blocks)
        return swapping(model, space(model.cache, AMPLE, in_one_launch))

    ways: dict[str, Callable[[], Any]] = {
        "ample memory": lambda: engine(paged_model(arguments, AMPLE)),
        "recompute, fcfs": lambda: engine(paged_model(arguments, blocks)),
        "recompute, priority": lambda: engine(paged_model(arguments, blocks), policy="priority"),
        "recompute, in chunks of 8": lambda: engine(paged_model(arguments, blocks), token_budget=8),
        "recompute, blocks found": lambda: _with_names(engine(paged_model(arguments, blocks))),
        "V0's swap, block by block": lambda: swaps(False),
        "the same, gathered": lambda: swaps(True),
    }
    expected = None
    for name, make in ways.items():
        made = make()
        all_ = [made.add(request) for request in requests(arguments, URGENT)]
        steps = sum(1 for _ in made.steps())
        tokens = [one.output_token_ids for one in all_]
        expected = expected or tokens
        assert tokens == expected, f"{name}: other tokens than with ample memory"
        assert made.memory.pool.get_num_free_blocks() == made.memory.pool.num_usable_blocks, f"{name}: a block is held"
        copies = made.space.num_copies if hasattr(made, "space") else 0
        one = found[name] = {"steps": steps, "preemptions": sum(one.num_preemptions for one in all_)}
        one |= {
            "computed": made.computed,
            "again": made.computed - sum(r.num_tokens - 1 for r in all_),
            "copies": copies,
        }
        rows.append((name, steps, one["preemptions"], one["computed"], one["again"], copies or ""))
    columns = ("", "steps", "preemptions", "computed", "again", "copies")
    table("Tokens are the same in all of these", columns, rows)
    return found


def _with_names(engine: Any) -> Any:
    """The engine with lesson 05's names for blocks: what was freed can be found for as long as nobody has taken it."""
    engine.caching = True
    return engine


def show_groups(v0_mode: Callable[[int], str], space: Make, arguments: argparse.Namespace) -> dict[str, Any]:
    """Three samples of one prompt, which share its blocks, swapped out and in: shared blocks move once.

    Raises:
        AssertionError: an answer goes on otherwise than without the swap.
    """
    model, ids = paged_model(arguments, AMPLE), _prompts(arguments.model)["b"]
    ids = (ids * 4)[: 4 * BLOCK_SIZE]
    shared, samples = list(range(1, 5)), [[5], [6], [7]]
    model.forward(ids, 0, shared)
    firsts = [11, 12, 13]
    for own, token in zip(samples, firsts, strict=True):
        model.forward([token], len(ids), shared + own)
    before = [model.forward([99], len(ids) + 1, shared + own) for own in samples]
    swap, held = space(model.cache, AMPLE), sorted({block for own in samples for block in shared + own})
    swap.swap_out("group", held)
    model.cache.fill_(float("nan"))
    model.cache[:, 0] = 0
    there = dict(zip(held, range(20, 20 + len(held)), strict=True))
    swap.swap_in("group", [there[block] for block in held])
    after = [model.forward([99], len(ids) + 1, [there[one] for one in shared + own]) for own in samples]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True)), (
        "the swap has changed a token"
    )
    alone = sum(len(shared) + len(own) for own in samples)
    found = {"moved": len(held), "alone": alone, "modes": {str(n): v0_mode(n) for n in (1, 3)}}
    found["full"] = refusal(lambda: space(model.cache, len(held) - 1).swap_out("group", held))
    console.print(
        f"\nThree samples of one prompt of {len(ids)} tokens hold {len(held)} blocks; each alone would hold "
        f"{alone // 3}. V0 swapped such a group: {len(held)} blocks out and in, still shared, the same logits."
    )
    console.print(f"One slot too few: {found['full']}", markup=False)
    return found


# ---- 4. the kernel ---------------------------------------------------------------------------------------------------

AWKWARD = {
    "one block": ([3], [0]),
    "scattered": ([9, 2, 7], [1, 4, 0]),
    "none": ([], []),
    "some stay": ([5, -1, 8], [2, 3, 0]),
}


def swap_case(
    words: int, num_tensors: int = 4, num_blocks: int = 11, num_slots: int = 6
) -> tuple[list[Tensor], Tensor]:
    """The tensors of a cache, each allocated by itself, and an empty staging buffer."""
    tensors = [torch.randn(num_blocks, words) for _ in range(num_tensors)]
    return tensors, torch.zeros(num_slots, num_tensors, words, dtype=torch.int32)


def verify_kernel(launch: Callable[..., Tensor], device: torch.device) -> dict[str, float]:
    """Out to the staging buffer and back into an empty cache, bit for bit.

    Raises:
        AssertionError: a word is wrong, or one has moved that should not have.
    """
    errors: dict[str, float] = {}
    for words in track((1, 8, 129), "verifying the kernel"):
        for name, (blocks, slots) in AWKWARD.items():
            parts, empty_staging = swap_case(words)
            tensors, staging = [one.to(device) for one in parts], empty_staging.to(device)
            ids = [torch.tensor(one, dtype=torch.int32, device=device) for one in (blocks, slots)]
            launch(tensors, *ids, staging, True)
            expected, empty = torch.zeros_like(staging), [torch.zeros_like(one) for one in tensors]
            back = [torch.zeros_like(one) for one in tensors]
            for block, slot in zip(blocks, slots, strict=True):
                for index, tensor in enumerate(tensors):
                    if block >= 0:
                        expected[slot, index] = tensor[block].view(torch.int32)
                        empty[index][block] = tensor[block]
            launch(back, *ids, staging, False)
            off = [furthest(staging.double(), expected.double())]
            off += [furthest(one.double(), other.double()) for one, other in zip(back, empty, strict=True)]
            errors[name] = max(errors.get(name, 0.0), *off)
    return {"largest_error": show_errors("There and back", errors, 1e-30, "moves")}


# ---- 5. recompute against swap ---------------------------------------------------------------------------------------

CROSSOVER_BLOCK = 16


def measure_crossover(space: Make, break_even: Callable[..., float], arguments: argparse.Namespace) -> dict[str, Any]:
    """Bringing a request back, by its tokens: computed again, or copied out and back, in small pieces and gathered."""
    rounds, sizes = (1, (64, 256)) if arguments.quick else (5, (64, 256, 1024))
    model = paged_model(arguments, 2 * max(sizes) // CROSSOVER_BLOCK, CROSSOVER_BLOCK)
    ids = [1 + index % 4000 for index in range(max(sizes))]
    found: dict[str, Any] = {"tokens": {}, "bytes_per_token": model.bytes_per_token}
    rows = []
    for size in track(sizes, "bringing requests back"):
        blocks = random.Random(size).sample(range(1, model.num_blocks), size // CROSSOVER_BLOCK)
        spaces = {name: space(model.cache, model.num_blocks, gathered) for name, gathered in PIECES.items()}
        calls: dict[str, Callable[[], object]] = {"recompute": lambda n=size, b=blocks: model.forward(ids[:n], 0, b)}
        calls |= {name: lambda one=one, b=blocks: _there_and_back(one, b) for name, one in spaces.items()}
        seconds = {name: min(times) / size for name, times in in_turns(calls, rounds, arguments.device).items()}
        copies = {name: one.num_copies // (rounds + 1) for name, one in spaces.items()}
        found["tokens"][str(size)] = {"us": {name: 1e6 * one for name, one in seconds.items()}, "copies": copies}
        us = [f"{1e6 * seconds[name]:.2f}" for name in ("recompute", *PIECES)]
        cheaper = f"{seconds['recompute'] / seconds['gathered']:.0f} ×"
        rows.append((size, us[0], us[1], copies["small"], us[2], copies["gathered"], cheaper))
    each = found["tokens"][str(_slow_tokens(arguments))]["us"]["recompute"] / 1e6
    least = found["break_even"] = 2 * model.bytes_per_token / each
    columns = ("tokens", "recompute", "small pieces", "copies", "gathered", "copies", "cheaper by")
    size = model.bytes_per_token
    caption = f"µs for each token, out and back. {size:,} bytes a token, so the break-even is {least / 1e6:.0f} MB/s."
    table("A request is brought back, on this machine", columns, rows, caption)
    found["slow"] = _slow_tier(space, model, ids, least, arguments)
    return found


PIECES = {"small": False, "gathered": True}


def _there_and_back(space: Any, blocks: list[int]) -> None:
    space.swap_out("one", blocks)
    space.swap_in("one", blocks)


SLOW = {"double": 2.0, "half": 0.5, "eighth": 0.125}
"""Bandwidths of a host tier, as shares of the break-even."""


def _slow_tokens(arguments: argparse.Namespace) -> int:
    """Tokens behind the slow links; the break-even is that of a request of as many."""
    return 64 if arguments.quick else 256


def _slow_tier(space: Make, model: PagedModel, ids: list[int], least: float, arguments: argparse.Namespace) -> dict:
    """The same copies over links that are slower than memory: twice the break-even, half of it, an eighth."""
    size = _slow_tokens(arguments)
    blocks = list(range(1, 1 + size // CROSSOVER_BLOCK))
    found, rows = {}, []
    for name, factor in SLOW.items():
        one = space(model.cache, model.num_blocks, True)
        pause = size * model.bytes_per_token / (factor * least)

        def move(_pause: float = pause, _space: Any = one) -> None:
            _there_and_back(_space, blocks)
            time.sleep(2 * _pause)

        calls = {"recompute": lambda: model.forward(ids[:size], 0, blocks), "swap": move}
        turns = in_turns(calls, 1 if arguments.quick else 3, arguments.device)
        seconds = {way: min(times) for way, times in turns.items()}
        ratio = found[name] = seconds["swap"] / seconds["recompute"]
        both = ms(seconds["recompute"]), ms(seconds["swap"])
        rows.append((f"{factor:g} ×", f"{factor * least / 1e6:.1f}", *both, f"{ratio:.2f} ×"))
    console.print()
    columns = ("of the break-even", "MB/s", "recompute, ms", "swap, ms", "swap takes")
    table(f"A host tier behind a slow link: {size} tokens out and back", columns, rows)
    return found


GPUS = (
    ("Meta-Llama-3-8B", "H100", "PCIe 5"),
    ("Meta-Llama-3-8B", "A100-80", "PCIe 4"),
    ("Meta-Llama-3-8B", "L4", "PCIe 4"),
    ("opt-13b", "A100-40", "PCIe 4"),
    ("Meta-Llama-3-70B", "H100", "PCIe 5"),
)


def short(name: str) -> str:
    """A model's name in a table."""
    return name.replace("Meta-", "").replace("Llama-3", "Llama 3").replace("opt", "OPT")


def show_gpus(
    recompute: Callable[..., float],
    swap: Callable[..., float],
    break_even: Callable[..., float],
    effective: Callable[..., float],
) -> dict[str, Any]:
    """Recompute and swap by model, GPU and link, by the lesson's formulas; small pieces of 2023, large ones of now.

    Raises:
        AssertionError: the simulator's cost model says otherwise.
    """
    found, rows = {}, []
    for model_name, gpu_name, link_name in GPUS:
        model, gpu, link = known_model(model_name), get_hardware(gpu_name), get_link(link_name)
        size, flops = kv_bytes_per_token(model), SHARE_OF_PEAK * gpu.flops_of("bfloat16")
        parameters = num_parameters(model)
        one: dict[str, Any] = {"recompute_us": 1e6 * recompute(1, parameters, flops)}
        for pieces in (SMALL, LARGE):
            rate = effective(pieces.bytes_of_copy(model), link.bandwidth, COPY_SECONDS)
            name = "small" if pieces is SMALL else "large"
            one[name] = {"kib": pieces.bytes_of_copy(model) / 1024, "gb": rate / 1e9, "us": 1e6 * swap(1, size, rate)}
            modelled = Crossover.of(model, gpu, link, pieces, directions=2)
            assert abs(modelled.swap * 1e6 / one[name]["us"] - 1) < 1e-9, f"{model_name}: the cost model disagrees"
        one["break_even_gb"] = break_even(size, parameters, flops) / 1e9
        piece, least = SMALL.bytes_of_copy(model), 1e9 * one["break_even_gb"]
        one["copy_us"] = 1e6 * (piece / least - piece / link.bandwidth)
        one["one_way"] = one["recompute_us"] / (one["large"]["us"] / 2)
        found[f"{model_name}, {gpu_name}"] = one
        small, large = one["small"], one["large"]
        rows.append((short(f"{model_name}, {gpu_name}"), f"{one['recompute_us']:.0f}", f"{small['us']:.1f}",
                     f"{large['us']:.1f}", f"{one['break_even_gb']:.1f}", f"{one['copy_us']:.1f}"))  # fmt: skip
    columns = ("", "recompute", "small", "large", "break-even, GB/s", "µs a copy")
    caption = (
        f"µs for each token, out and back, by data sheets: {SHARE_OF_PEAK:.0%} of the peak, and "
        f"{1e6 * COPY_SECONDS:.1f} µs to issue a copy. Small: a layer's keys or values of a block; large: a block of "
        "all layers. Last: how long issuing a small copy may take at most, if swap is to win."
    )
    console.print()
    table("Modelled: GPUs and links", columns, rows, caption)
    return found


# ---- 6. what is computed twice ---------------------------------------------------------------------------------------

QUICK_POOLS, QUICK_REQUESTS = (400,), 100


def show_waste(arguments: argparse.Namespace) -> dict[str, Any]:
    """Tokens computed again by the size of the pool: published, and ours by rule of admission and by victim."""
    found: dict[str, Any] = {}
    rows = []
    pools, requests = (QUICK_POOLS, QUICK_REQUESTS) if arguments.quick else (PUBLISHED, REQUESTS)
    replay = partial(waste, requests=requests)
    for blocks in track(list(pools), "replaying"):
        first, least = replay(blocks, whole=False), replay(blocks, False, "least computed")
        one = found[str(blocks)] = {
            "published": PUBLISHED[blocks].wasted, "first_chunk": first.share, "least": least.share,
            "whole": replay(blocks, True).share, "found": replay(blocks, True, caching=True).share,
        }  # fmt: skip
        rows.append((blocks, *(f"{share:.1%}" for share in one.values())))
        one |= {"published_less": PUBLISHED[blocks].less, "preemptions": first.preemptions}
        one["less"] = 1 - least.recomputed / first.recomputed if first.recomputed else None
    columns = ("blocks", "published", "first chunk", "least", "whole", "found")
    caption = (
        "Published: vllm#54644. First chunk: who waits is admitted if its first chunk fits. Least: the same, and the "
        "victim has computed least. Whole: who waits is admitted if all that it knows fits, as now. Found: the same "
        "with prefix caching."
    )
    table(f"Of all computed tokens, a second time: {requests} requests, {AT_ONCE} at once", columns, rows, caption)
    return found


RATE, OPEN_POOLS, QUICK_OPEN_POOLS = 10, (2000, 1000, 800, 600, 500, 400), (800, 500)
"""Requests a second, and the pools that they come to."""


def show_pools(arguments: argparse.Namespace) -> dict[str, Any]:
    """p99 of answers and first tokens by pool, under an open load that would fill 436 blocks. Modelled: 8B, H100."""
    cost, draw, now, work = (
        RooflineCost.of(known_model("Llama-3.1-8B"), get_hardware("H100")),
        random.Random(1),
        0.0,
        [],
    )
    for one in workload():
        now += draw.expovariate(RATE)
        work.append(SimulatedRequest(one.prompt_tokens, one.output_tokens, now))
    limits = SchedulerConfig(max_model_len=3500, max_num_seqs=256, max_num_batched_tokens=2048)
    found, rows = {}, []
    for blocks in track(QUICK_OPEN_POOLS if arguments.quick else OPEN_POOLS, "sweeping pools"):
        run = simulate(work, limits, CacheConfig(num_gpu_blocks=blocks + 1, enable_prefix_caching=False), cost)
        busy = sum(step.seconds for step in run.steps)
        latencies = [request.latency for request in run.requests]
        one = found[str(blocks)] = {
            "mean": sum(step.kv_cache_usage * step.seconds for step in run.steps) / busy,
            "most": max(step.kv_cache_usage for step in run.steps), "preemptions": run.num_preemptions,
            "ttft": percentile(run.ttfts, 0.99), "p50": percentile(latencies, 0.5), "p99": percentile(latencies, 0.99),
        }  # fmt: skip
        full = f"{one['mean']:.0%}", f"{one['most']:.0%}", one["preemptions"]
        rows.append((blocks, *full, *(f"{one[name]:.2f}" for name in ("ttft", "p50", "p99"))))
    columns = ("blocks", "full", "at most", "preemptions", "first, p99", "answer, p50", "p99")
    caption = "Full: on average. Seconds until the first token, and until the last. Modelled: Llama-3.1-8B on an H100."
    console.print()
    table(f"{REQUESTS} requests, {RATE} a second, by pool", columns, rows, caption)
    return found


CLIFF = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "preemption.cpu.json"
CLIFF_COLUMNS = {"p99_e2el_ms": "p99 ms", "p99_ttft_ms": "p99 first", "output_throughput": "tokens/s"}


def recall_cliff() -> None:
    """The live server by the size of its pool, as the benchmark has measured it last; nothing is measured here."""
    console.print("\nThe live server, pool by pool, as benchmarks/preemption.py has measured it", style="bold")
    if CLIFF.is_file():
        show_cliff(json.loads(CLIFF.read_text())["figures"]["cliff"])
    else:
        console.print(f"not measured yet: uv run python benchmarks/preemption.py --json {CLIFF.name}")


def show_cliff(found: Mapping[str, Any]) -> None:
    """The table, the largest pool first."""
    rows = [
        (
            blocks,
            f"{int(blocks) / found['filled']:.2f}",
            *(f"{one[name]:,.0f}" for name in CLIFF_COLUMNS),
            f"{one['preemptions']:.0f}",
            f"{one['wasted']:.1%}",
            f"{one['mean_usage']:.0%}",
        )
        for blocks, one in found["pools"].items()
    ]
    work = found["work"]
    columns = ("blocks", "of wanted", *CLIFF_COLUMNS.values(), "preempted", "twice", "full")
    caption = (
        f"{work['requests']} requests, {found['rate']:.1f} a second; with the largest pool they hold "
        f"{found['filled']:.0f} blocks on average. p99: of whole answers, and of first tokens."
    )
    table("A live server by the size of its pool", columns, rows, caption)


# ---- 7. break it -----------------------------------------------------------------------------------------------------

THRASH, LONG, THRASH_REQUESTS, THRASH_BLOCKS, THRASH_STEP = (4, 8, 16, 32, 64), 8, 100, 3200, 4096
QUICK_THRASH = (16, 32)
"""How many may run at once; the workload with prompts 8 times as long, and a pool for about twelve."""


def break_it(engine: Make, arguments: argparse.Namespace) -> dict[str, Any]:
    """Thrash, an urgent request that must wait, and the tier's own run."""
    return {
        "thrash": _thrash(QUICK_THRASH if arguments.quick else THRASH),
        "inversion": _inversion(engine, arguments),
        "tier": _tier(arguments),
    }


def _thrash(counts: Sequence[int]) -> dict[str, Any]:
    """Output tokens a second by how many may run at once, where the pool holds about twelve. Modelled."""
    cost, found, rows = RooflineCost.of(known_model("Llama-3.1-8B"), get_hardware("H100")), {}, []
    work = [SimulatedRequest(LONG * one.prompt_tokens, one.output_tokens) for one in workload()[:THRASH_REQUESTS]]
    useful = sum(one.prompt_tokens + one.output_tokens - 1 for one in work)
    for at_once in track(counts, "thrashing"):
        one: dict[str, Any] = {}
        for name, whole in (("first_chunk", False), ("whole", True)):
            limits = SchedulerConfig(
                max_model_len=20_000, max_num_seqs=at_once, max_num_batched_tokens=THRASH_STEP,
                scheduler_reserve_full_isl=whole,
            )  # fmt: skip
            blocks = CacheConfig(num_gpu_blocks=THRASH_BLOCKS + 1, enable_prefix_caching=False)
            run = simulate(work, limits, blocks, cost)
            again = 1 - useful / sum(step.shape.num_tokens for step in run.steps)
            one[name] = {"rate": run.throughput, "preemptions": run.num_preemptions, "again": again}
        found[str(at_once)] = one
        cells = [f"{each['rate']:,.0f}, {each['again']:.0%}" for each in one.values()]
        rows.append((at_once, *cells))
    columns = ("at once, at most", "first chunk", "whole")
    caption = "Output tokens a second, and of all computed tokens a second time. Modelled: Llama-3.1-8B on an H100."
    table(f"{THRASH_REQUESTS} requests with long prompts, {THRASH_BLOCKS:,} blocks", columns, rows, caption)
    return found


INVERSION_BLOCKS, INVERSION_STEPS = 11, 6


def _inversion(engine: Make, arguments: argparse.Namespace) -> dict[str, Any]:
    """Steps to the first token of an urgent request that comes when others hold the pool; how often it is preempted."""
    found, rows = {}, []
    ids = _prompts(arguments.model)
    for name, policy, blocks in (
        ("fcfs, small pool", "fcfs", INVERSION_BLOCKS),
        ("priority, small pool", "priority", INVERSION_BLOCKS),
        ("priority, ample", "priority", AMPLE),
    ):  # fmt: skip
        made = engine(paged_model(arguments, blocks), policy=policy)
        for at, other in enumerate(("a", "c")):
            made.add(Request(other, ids[other], max_tokens=ANSWER, priority=5, arrival_time=float(at)))
        for _ in range(INVERSION_STEPS):
            made.step()
        urgent = made.add(Request("urgent", ids["b"], max_tokens=ANSWER, priority=0, arrival_time=9.0))
        first, last = 0, 0
        while not urgent.status.is_finished:
            made.step()
            last += 1
            first += not urgent.num_output_tokens
        found[name] = {"first": first + 1, "last": last, "preemptions": urgent.num_preemptions}
        rows.append((name, first + 1, last, urgent.num_preemptions))
    console.print()
    columns = ("", "steps to its first token", "last", "preempted")
    table("An urgent request comes when two others hold the pool", columns, rows)
    return found


TIER_PROMPT, TIER_ANSWER, TIER_REQUESTS = 40, 40, 6


def _tier(arguments: argparse.Namespace) -> dict[str, Any]:
    """The engine under pressure without and with a host tier: the same tokens, and what of them was computed again.

    Raises:
        AssertionError: a token differs.
    """
    prompts = [[7 + index, *([20 + index] * (TIER_PROMPT - 1))] for index in range(TIER_REQUESTS)]
    sampling = SamplingParams(temperature=0.0, max_tokens=TIER_ANSWER, ignore_eos=True)
    extra = {"kv_connector_extra_config": {"offload_prompt_only": False}}
    ways: dict[str, dict[str, Any]] = {
        "ample memory": {"num_gpu_blocks_override": 100, "enable_prefix_caching": False},
        "recompute": {"enable_prefix_caching": False},
        "recompute, blocks found": {},
        "with a host tier": {"kv_offloading_size": 0.01, "kv_transfer_config": extra},
    }
    found, rows, expected = {}, [], None
    for name, settings in track(ways.items(), "serving"):
        llm = LLM(
            arguments.model, device="cpu", dtype="float32", max_model_len=96, block_size=16, max_num_seqs=8,
            skip_tokenizer_init=True, **{"num_gpu_blocks_override": 13, **settings},
        )  # fmt: skip
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        tokens = [list(one.outputs[0].token_ids) for one in outputs]
        expected = expected or tokens
        assert tokens == expected, f"{name}: other tokens than with ample memory"
        scheduler = core_of(llm).scheduler
        state = scheduler.make_stats()
        lookups = state.connector_prefix_cache_stats
        loaded = lookups.hits + lookups.preempted_hits if lookups else 0
        found[name] = {
            "preemptions": scheduler.num_preemptions,
            "again": scheduler.num_recomputed_tokens,
            "loaded": loaded,
        }
        rows.append((name, scheduler.num_preemptions, scheduler.num_recomputed_tokens, loaded))
    console.print()
    title = f"The engine, 12 blocks of 16 slots: {TIER_REQUESTS} requests of {TIER_PROMPT} + {TIER_ANSWER} tokens"
    table(
        title,
        ("", "preemptions", "computed again", "from the host"),
        rows,
        "Tokens. The answers are the same in all four.",
    )
    return found


# ---- the whole lesson ------------------------------------------------------------------------------------------------


def close(found: dict, disturbance: str) -> None:
    """Print the conclusions; `disturbance` says what else kept the machine busy, if anything."""
    tokens, waste_, last = found["tokens"], found["waste"], list(found["crossover"]["tokens"].values())[-1]["us"]
    again, small = tokens["recompute, fcfs"]["again"], waste_["400"]
    closing(
        f"Preempted requests said the same tokens as undisturbed ones; {again} tokens were computed twice, or none "
        "and their blocks copied.",
        f"With 400 blocks {small['first_chunk']:.0%} of all computed tokens were computed before if a first chunk is "
        f"enough to be admitted, {small['whole']:.0%} if all must fit.",
        Timed(
            f"Here a token is computed again in {last['recompute']:.0f} µs, and copied out and back in "
            f"{last['gathered']:.1f}."
        ),
        disturbance=disturbance,
    )


def draw(found: dict, path: str) -> None:
    """Blocks by request over the steps of the trace; waste by pool; recompute and swap by GPU."""
    with panels(path, 3) as (left, middle, right):
        steps, bottom = found["trace"]["steps"], [0] * len(found["trace"]["steps"])
        for name, colour in zip(TEXTS, (palette.BLUE, palette.ORANGE, palette.GREY), strict=True):
            held = [step["held"][name] for step in steps]
            left.bar(range(1, 1 + len(steps)), held, 1.0, bottom=bottom, color=colour, label=name)
            bottom = [low + count for low, count in zip(bottom, held, strict=True)]
        left.set(title="Blocks that each request holds", xlabel="step", ylabel="blocks")
        left.legend()
        pools = sorted(map(int, found["waste"]))
        shown = {
            "published": ("published", palette.INK), "first_chunk": ("first chunk", palette.ORANGE),
            "whole": ("whole", palette.BLUE), "found": ("whole, found again", palette.GREY),
        }  # fmt: skip
        for key, (label, colour) in shown.items():
            shares = [100 * found["waste"][str(pool)][key] for pool in pools]
            middle.plot(pools, shares, "o-", color=colour, label=label)
        middle.set(title="Computed a second time", xlabel="blocks of the pool", ylabel="% of all computed tokens")
        middle.legend()
        names = list(found["gpus"])
        bars = {
            "recompute": [found["gpus"][name]["recompute_us"] for name in names],
            "swap, small pieces": [found["gpus"][name]["small"]["us"] for name in names],
            "swap, large pieces": [found["gpus"][name]["large"]["us"] for name in names],
        }
        colours = palette.INK, palette.ORANGE, palette.BLUE
        for shift, colour, (label, values) in zip((-0.27, 0.0, 0.27), colours, bars.items(), strict=True):
            right.barh([place + shift for place in range(len(names))], values, 0.25, color=colour, label=label)
        right.set(title="µs for each token, modelled", xlabel="µs", xscale="log")
        right.set_yticks(range(len(names)), [short(name) for name in names])
        right.invert_yaxis()
        right.legend(fontsize=8)


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The lesson's own flags, besides the common ones; `doc` is shown by --help."""
    flags = lesson_parser(doc or "", EMBEDDED_MODEL)
    most = whole_number(11, AMPLE)
    flags.add_argument("--blocks", type=most, default=14, help="blocks of the small pool (11 to 200; default: 14)")
    return flags
