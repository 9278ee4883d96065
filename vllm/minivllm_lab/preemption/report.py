"""Lesson 11's requests, step by step and in seven ways, its figure and its command line; its other
tables are in `prices` and `pools`.

Each `measure_*`, `compare_*` or `show_*` function prints its table and returns its figures; the
callables and classes that it takes are the lesson's own code.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from minivllm.core.request import Request
from minivllm.models.tokenizer import load_tokenizer
from minivllm_lab.cli import lesson_parser, whole_number
from minivllm_lab.lesson import LessonCode
from minivllm_lab.paged_model import PagedModel, decoder_of
from minivllm_lab.pictures import palette
from minivllm_lab.pictures.figures import SMALL_TEXT, dotted, panels
from minivllm_lab.progress import track
from minivllm_lab.proof import furthest, show_errors
from minivllm_lab.tables import Timed, closing, console, record_table, table

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
        "published": "published for vLLM", "first_chunk": "admitted by first chunk", "least": "the same, other victim",
        "whole": "admitted whole", "found": "the same, prefix cache",
    }  # fmt: skip
    with panels(path, 2, height=4.4) as (left, right):
        for (field, label), colour in zip(labels.items(), RULES, strict=True):
            shares = {int(pool): 100 * record[field] for pool, record in figures["waste"].items()}
            style = "x--" if field == "published" else "o-"
            left.plot(list(shares), list(shares.values()), style, color=colour, label=label)
        left.set(title="Computed a second time", xlabel="blocks of the pool", ylabel="% of all computed tokens")
        left.legend(fontsize=SMALL_TEXT, loc="upper center", bbox_to_anchor=(0.4, -0.16))
        rows = {
            short(name).replace(", ", "\n"): {
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


def short(name: str) -> str:
    """Shorten a model's name for a table or a figure."""
    return name.replace("Meta-", "").replace("Llama-3", "Llama 3").replace("opt", "OPT")


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Add the lesson's own flags to the common ones; `--help` shows `doc`."""
    flags = lesson_parser(doc)
    most = whole_number(11, AMPLE)
    flags.add_argument("--blocks", type=most, default=14, help="blocks of the small pool (11 to 200; default: 14)")
    return flags
