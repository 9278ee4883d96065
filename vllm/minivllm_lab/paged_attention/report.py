"""Lesson 02's flags, tables and figure."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from minivllm.errors import MinivllmError
from minivllm.models.tokenizer import load_tokenizer
from minivllm_lab.cli import lesson_parser, positive_int
from minivllm_lab.paged_attention.allocators import replay_workloads
from minivllm_lab.paged_attention.memory_replay import Memory, Occupancy
from minivllm_lab.pictures.figures import curves, panels
from minivllm_lab.tables import closing, console, table
from minivllm_simulate.workloads import WORKLOADS

if TYPE_CHECKING:
    import torch

PROMPT = (
    'class Stack:\n    """Keeps things in the order in which they came; the last one leaves first."""\n\n'
    "    def __init__(self, items=None):\n        self.items = list(items or [])\n\n"
    "    def push(self, item):\n        self."
)
STRANGER = (
    'class Account:\n    """The account of one customer; nobody else may see it."""\n\n'
    "    def __init__(self, owner, password):\n        self.owner = owner\n        self.password = password\n\n"
    "    def check(self, password):\n        if self.password"
)
SLOTS = 15_696
"""Token slots of the replay: those of the paper's figure 2."""
SHORT_REQUESTS = ("alpaca", "sharegpt", "azure-conversation")
"""The workloads for which block sizes are compared."""
TITLES = {
    "max": "greatest length", "pow2": "power of two", "oracle": "exact", "exact": "exact, first fit", "paged": "blocks",
}  # fmt: skip
"""Display names of the allocators."""
SHARES = {"tokens": "a token", "later": "will, later", "never": "never will", "outside": "outside"}
"""Display names of what a slot holds; together they cover all slots."""


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Build the parser: the common flags and the lesson's own; --help shows `doc`."""
    flags = lesson_parser(doc)
    flags.add_argument("--block-size", type=positive_int, default=16, help="token slots in a block (default: 16)")
    return flags


class Plan(NamedTuple):
    """The amount of work in a run."""

    block_size: int
    longest: int
    """Tokens of the longest request of the replay."""
    seed: int
    steps: int
    """Steps of the replay."""
    beam_steps: int
    """Tokens that the beam search writes."""
    widths: Sequence[int]
    """Beams of each search, rising."""
    sizes: tuple[int, ...]
    """Block sizes that are compared."""
    rounds: int = 40
    """Timed runs of attention for each block size."""
    samples: int = 40
    """Requests of each kind that draw several outputs from one prompt."""

    def cache_blocks(self, *texts: Sequence[int]) -> int:
        """Return how many blocks the widest search takes without sharing, for the longest of these
        texts.
        """
        each = 1 + (max(map(len, texts)) + self.beam_steps) // self.block_size
        return 2 + 2 * self.widths[-1] * each


def plan(arguments: argparse.Namespace, longest: int) -> Plan:
    """Plan the work that the flags ask for; `longest` is the longest request of the replay, in
    tokens.

    Raises:
        MinivllmError: a block is longer than the longest request.
    """
    size, seed = arguments.block_size, arguments.seed
    if size > longest:
        raise MinivllmError(f"--block-size must be at most {longest:,}, the longest request, not {size:,}")
    if arguments.quick:
        work = {"steps": 150, "beam_steps": 8, "rounds": 5, "samples": 10}
        return Plan(size, longest, seed, widths=(4,), sizes=(1, 16, 512), **work)
    steps = 8000 if arguments.full else 2000
    sizes = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    return Plan(size, longest, seed, steps, beam_steps=48, widths=(2, 4, 6), sizes=sizes)


def load_prompts(arguments: argparse.Namespace, device: torch.device) -> tuple:
    """Load the model and its tokenizer, and encode both prompts.

    Returns:
        The model, the tokenizer, and the token ids of the prompt to continue and of the stranger's.
    """
    from minivllm.models.loader import load_model

    model, _ = load_model(arguments.model, device, "auto" if device.type == "cuda" else "float32")
    tokenizer = load_tokenizer(arguments.model)
    return model, tokenizer, *(tokenizer.encode(text).ids for text in (PROMPT, STRANGER))


def measure_memory(plan: Plan, allocators: Mapping[str, Callable[[int], Memory]]) -> dict:
    """Print what the slots hold under each allocator, for ShareGPT's requests. Return the figures by
    workload and allocator, each with the factor by which blocks do better.
    """
    results = replay_workloads(allocators, SLOTS, plan.steps, plan.longest, plan.seed)
    rows = []
    for kind, occupancy in results["sharegpt"].items():
        shares = (f"{getattr(occupancy, share):.1%}" for share in SHARES)
        rows.append((TITLES[kind], *shares, f"{occupancy.running:.1f}"))
    title = f"What {SLOTS:,} slots hold, requests like {WORKLOADS['sharegpt'].title}"
    table(title, ("reserved", *SHARES.values(), "at once"), rows)
    return {
        name: {
            kind: {**occupancy.figures(), "paged_over_this": _ratios(kinds["paged"], occupancy)}
            for kind, occupancy in kinds.items()
        }
        for name, kinds in results.items()
    }


def _ratios(blocks: Occupancy, other: Occupancy) -> dict[str, float]:
    """Divide the tokens held, requests running and requests served with blocks by those of another
    allocator.
    """
    return {key: getattr(blocks, key) / getattr(other, key) for key in ("tokens", "running", "served_per_1000_steps")}


def show_sharing(results: dict, prompt_tokens: int, steps: int) -> None:
    """Print the blocks that sharing saves, for parallel samples and for beams."""
    rows = [
        (WORKLOADS[name].title, *(f"{share:.1%}" for share in saved.values()))
        for name, saved in results["samples"].items()
    ]
    table("Blocks saved when samples share their prompt", ("requests like", "2 samples", "4", "6"), rows)
    rows = [
        (width, search["most_alone"], search["most_shared"], f"{search['saved']:.1%}")
        for width, search in results["beams"].items()
    ]
    title = f"Beam search, {prompt_tokens} + {steps} tokens: the same beams both ways"
    table(title, ("beams", "most blocks, each its own", "shared", "saved on average"), rows)


def measure_block_sizes(
    plan: Plan, device: torch.device, paged: Callable[[int, int], Memory], decode: Callable[..., torch.Tensor],
) -> dict:  # fmt: skip
    """Measure both costs of a block size: empty slots in held blocks, by workload, and the time of
    attention. Print the first.

    A GPU times `decode`, the lesson's kernel. A CPU times the engine's attention (lesson 03), which
    looks every token up in either case: its times compare orders of memory, and say nothing about
    the lookup.
    """
    from minivllm_lab.paged_attention.paged_cache import time_by_block_size

    price = time_by_block_size(device, plan.sizes, decode, plan.rounds)
    allocators = {str(size): lambda slots, size=size: paged(slots, size) for size in plan.sizes}
    held = replay_workloads(allocators, SLOTS, plan.steps // 3, plan.longest, plan.seed, SHORT_REQUESTS)
    empty = {name: {size: kinds[size].empty for size in allocators} for name, kinds in held.items()}
    rows = [
        (size, *(f"{shares[size]:.1%}" for shares in empty.values()), f"{plan.longest // int(size):,}")
        for size in allocators
    ]
    columns = ("block", *(WORKLOADS[name].title for name in empty), "table entries")
    table("Held slots that are empty, and entries of the longest table", columns, rows)
    return {"price": price, "empty": empty}


def show_break(results: dict, refused_twice: str, refused_dry: str) -> None:
    """Print the effects of a double free, an empty pool and a leaked reference, with the error
    messages of the first two.
    """
    console.print(f"freed twice without a check, the blocks {results['double_free']} went to two sequences at once")
    console.print(f"freed twice: {refused_twice}")
    console.print(f"the pool is dry: {refused_dry}")
    console.print("A request is forked, its first half ends, a stranger is admitted. The second half")
    for name in ("counted", "forgotten"):
        console.print(f"- {name}: reads {results[name]['reads']!r}, writes {results[name]['writes']!r}", markup=False)


def conclude(results: dict, longest: int) -> None:
    """Print the conclusions, all of which are counted rather than timed."""
    reserved, blocks = (results["memory"]["sharegpt"][kind] for kind in ("max", "paged"))
    empty, leaked = results["blocks"]["empty"]["alpaca"], results["broken"]["forgotten"]["reads"]
    closing(
        f"Requests like ShareGPT's: {reserved['tokens']:.0%} of the slots hold a token if each reserves {longest:,}, "
        f"{blocks['tokens']:.0%} in blocks; {blocks['running'] / reserved['running']:.1f} times as many run at once.",
        f"Requests as short as Alpaca's leave {empty['16']:.0%} of their slots empty in blocks of 16, and "
        f"{empty['512']:.0%} in blocks of 512.",
        f"One forgotten reference, and a request reads a stranger's text: {leaked[:48]!r}.",
    )


def draw(results: dict, path: str) -> None:
    """Plot the empty slots in held blocks by block size."""
    empty = {WORKLOADS[name].title: shares for name, shares in results["blocks"]["empty"].items()}
    with panels(path, 1, width=7) as (axes,):
        curves(axes, empty, factor=100, octaves=True)
        axes.set(title="Empty slots in held blocks", xlabel="block size", ylabel="%", ylim=0)
