"""Lesson 12. Multi-LoRA: how do a thousand models share one?

Builds the adapter beside the weight that it changes, two kernels for a batch in which each token may have another
adapter, the slots that hold adapters, and the gate that keeps a batch within them. You learn how large an adapter is,
what it costs to apply it rather than merge it, and which number matters: how many different adapters a step has.

    uv run python vllm/12_multi_lora.py                           # under a minute on a laptop, no GPU needed
    uv run python vllm/12_multi_lora.py --adapters 200 --skew 0.5
"""

from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minivllm.errors import MinivllmError
from minivllm.platforms.triton_utils import tl, triton
from minivllm_lab.cli import run
from minivllm_lab.disturbance import Control
from minivllm_lab.lesson import begin, keep
from minivllm_lab.multi_lora import in_engine, report, ways
from minivllm_lab.proof import prove
from minivllm_lab.tables import heading

# %% 1 and 2. A model for every customer? Leave the weight alone, and add a small matmul


# region: weigh
def adapter_numbers(rank: int, projections: Iterable[tuple[int, int]]) -> int:
    """Count an adapter's parameters: A [rank, in] and B [out, rank] for each projection (out, in)."""
    return sum(rank * (outputs + inputs) for outputs, inputs in projections)


def merged(weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return a merged copy's weight, W + BA: weight [out, in], a [rank, in], b [out, rank] with the scale in it."""
    return weight + b @ a


def applied(x: Tensor, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return the same output from the unchanged weight, without making BA: x [tokens, in] -> [tokens, out]."""
    return x @ weight.T + (x @ a.T) @ b.T


# endregion

# %% 3. One forward pass for many adapters: group the tokens by adapter


# region: group
def group_tokens(token_slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Group the tokens by adapter, as lists of token indices, so that no token is moved; all int32.

    token_slots [tokens]: the slot of each token's adapter, -1 for none. Returns order [tokens with an adapter], their
    indices by slot and within a slot by position; active [groups], the slots that occur; starts [groups + 1].
    """
    order = torch.argsort(token_slots, stable=True)
    order = order[token_slots[order] >= 0]
    active, counts = torch.unique_consecutive(token_slots[order], return_counts=True)
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return order.int(), active.int(), starts.int()


# endregion


# region: kernels
@triton.jit
def rows_of_tile(order, starts, group, tile, TILE: tl.constexpr):
    """Return the tokens of one tile of a group, [TILE], and a mask of those that exist."""
    first, last = tl.load(starts + group), tl.load(starts + group + 1)
    place = first + tile * TILE + tl.arange(0, TILE)
    return tl.load(order + place, mask=place < last, other=0).to(tl.int64), place < last


@triton.jit
def shrink_kernel(
    small, x, a, order, active, starts, IN, MAX_RANK: tl.constexpr,
    RANKS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute small[token] = A[slot of token] · x[token]. Grid: (tiles of the largest group, groups).

    small fp32 [tokens, MAX_RANK]; x [tokens, IN]; a [slots, MAX_RANK, IN]; order, active, starts from `group_tokens`.
    RANKS is MAX_RANK rounded up for the matmul. A tile beyond the end of its group does nothing. Reads the adapter once
    for each tile, x once; 2 · MAX_RANK · IN FLOPs a token.
    """
    tile, group = tl.program_id(0), tl.program_id(1)
    token, there = rows_of_tile(order, starts, group, tile, TILE)
    if tl.sum(there.to(tl.int32)) > 0:
        slot, rank = tl.load(active + group).to(tl.int64), tl.arange(0, RANKS)
        sums = tl.zeros([TILE, RANKS], tl.float32)
        for start in range(0, IN, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = (column < IN)[None, :]
            rows = tl.load(x + token[:, None] * IN + column[None, :], mask=there[:, None] & inside, other=0.0)
            at = (slot * MAX_RANK + rank[:, None]) * IN + column[None, :]
            down = tl.load(a + at, mask=(rank < MAX_RANK)[:, None] & inside, other=0.0)
            sums = tl.dot(rows, tl.trans(down), sums, input_precision="ieee")
        at = token[:, None] * MAX_RANK + rank[None, :]
        tl.store(small + at, sums, mask=there[:, None] & (rank < MAX_RANK)[None, :])


@triton.jit
def expand_kernel(
    out, small, b, order, active, starts, OUT, MAX_RANK: tl.constexpr,
    RANKS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add B[slot of token] · small[token] to out[token]. Grid: (tiles of the largest group, groups, ceil(OUT / BLOCK)).

    out [tokens, OUT], which holds the base model's output; b [slots, OUT, MAX_RANK]; the rest as in `shrink_kernel`.
    """
    tile, group = tl.program_id(0), tl.program_id(1)
    token, there = rows_of_tile(order, starts, group, tile, TILE)
    if tl.sum(there.to(tl.int32)) > 0:
        slot, rank = tl.load(active + group).to(tl.int64), tl.arange(0, RANKS)
        column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        real, inside = (rank < MAX_RANK)[None, :], (column < OUT)[:, None]
        rows = tl.load(small + token[:, None] * MAX_RANK + rank[None, :], mask=there[:, None] & real, other=0.0)
        up = tl.load(b + (slot * OUT + column[:, None]) * MAX_RANK + rank[None, :], mask=inside & real, other=0.0)
        at = out + token[:, None] * OUT + column[None, :]
        mask = there[:, None] & (column < OUT)[None, :]
        sums = tl.dot(rows.to(up.dtype), tl.trans(up), tl.load(at, mask=mask, other=0.0).to(tl.float32),
                      input_precision="ieee")  # fmt: skip
        tl.store(at, sums.to(out.dtype.element_ty), mask=mask)


# endregion

TILE, BLOCK = 16, 64


def launched(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch a kernel; `trace_kernel` takes the same arguments, and counts the bytes that are read."""
    kernel[grid](*arguments, **constants)


def add_lora(
    out: Tensor, x: Tensor, a: Tensor, b: Tensor, groups: tuple[Tensor, Tensor, Tensor], launch: Callable = launched
) -> None:
    """Add the output of these groups' adapters to `out`, in two launches, or in none if there are no groups.

    out [tokens, out], x [tokens, in], a [slots, max_rank, in], b [slots, out, max_rank]; contiguous.
    """
    order, active, starts = groups
    if not len(active):
        return
    max_rank = a.shape[1]
    small = torch.empty(len(x), max_rank, device=x.device)
    tiles = triton.cdiv(int((starts[1:] - starts[:-1]).max()), TILE)
    sizes = {"MAX_RANK": max_rank, "RANKS": max(16, triton.next_power_of_2(max_rank)), "TILE": TILE, "BLOCK": BLOCK}
    columns = triton.cdiv(out.shape[1], BLOCK)
    launch(shrink_kernel, (tiles, len(active)), small, x, a, order, active, starts, x.shape[1], **sizes)
    launch(expand_kernel, (tiles, len(active), columns), out, small, b, order, active, starts, out.shape[1], **sizes)


# %% 4. Four ways to call them: history in one table


# region: ways
def by_sorting(out: Tensor, x: Tensor, a: Tensor, b: Tensor, token_slots: Tensor, launch: Callable = launched) -> None:
    """Apply the adapters by sorted token indices, leaving the tokens in place, as vLLM does now."""
    add_lora(out, x, a, b, group_tokens(token_slots), launch)


def by_loop(out: Tensor, x: Tensor, a: Tensor, b: Tensor, token_slots: Tensor, launch: Callable = launched) -> None:
    """Apply one adapter after another, with two launches for each."""
    order, active, starts = group_tokens(token_slots)
    for index, (first, last) in enumerate(zip(starts.tolist(), starts.tolist()[1:], strict=False)):
        alone = torch.tensor([0, last - first], dtype=torch.int32, device=x.device)
        add_lora(out, x, a, b, (order[first:last], active[index : index + 1], alone), launch)


def by_token(out: Tensor, x: Tensor, a: Tensor, b: Tensor, token_slots: Tensor, launch: Callable = launched) -> None:
    """Apply the adapters with each token as its own group that reads its own adapter, as bgmv did."""
    order = torch.nonzero(token_slots >= 0).flatten().int()
    starts = torch.arange(len(order) + 1, dtype=torch.int32, device=x.device)
    add_lora(out, x, a, b, (order, token_slots[order.long()], starts), launch)


def by_segment(out: Tensor, x: Tensor, a: Tensor, b: Tensor, token_slots: Tensor, launch: Callable = launched) -> None:
    """Copy an adapter's rows side by side, as sgmv needed them, and back."""
    order, active, starts = group_tokens(token_slots)
    rows = out[order.long()]
    add_lora(rows, x[order.long()], a, b, (torch.arange(len(order)).to(order), active, starts), launch)
    out[order.long()] = rows


# endregion

# %% 5. Slots, and who may use them


# region: slots
class AdapterSlots:
    """Slots for adapters: `slots` has the adapter in each, or None. The least recently used adapter is evicted."""

    def __init__(self, max_loras: int) -> None:
        self.slots: list[int | None] = [None] * max_loras
        self.pinned: set[int] = set()
        self._used: dict[int, None] = {}  # the least recently used first

    def activate(self, adapter: int) -> int:
        """Give an adapter a slot unless it has one, mark it as most recently used, and return its slot.

        Raises:
            MinivllmError: no slot is free, and all adapters are pinned.
        """
        if adapter not in self._used:
            if None not in self.slots:
                self.deactivate(self._least_recently_used())
            self.slots[self.slots.index(None)] = adapter
        self._used.pop(adapter, None)
        self._used[adapter] = None
        return self.slots.index(adapter)

    def deactivate(self, adapter: int) -> None:
        """Empty the adapter's slot, if it has one."""
        if adapter in self._used:
            self.slots[self.slots.index(adapter)] = None
            self.pinned.discard(adapter)
            del self._used[adapter]

    def pin(self, adapter: int) -> None:
        """Keep an adapter in its slot; activate it first if it has none."""
        if adapter not in self._used:
            self.activate(adapter)
        self.pinned.add(adapter)

    def _least_recently_used(self) -> int:
        for adapter in self._used:
            if adapter not in self.pinned:
                return adapter
        raise MinivllmError(f"all {len(self.slots)} slots hold pinned adapters; unload one, or raise max_loras")


# endregion


# region: admit
def admit(running: Sequence[int], waiting: Sequence[int], max_loras: int, seats: int) -> list[int]:
    """Return the indices of the waiting requests that may start, given each request's adapter, 0 for none.

    All that run use at most `max_loras` different adapters. A request that would need one more is skipped.
    """
    active, admitted = set(running) - {0}, []
    for index, adapter in enumerate(waiting):
        if len(admitted) == seats:
            break
        if adapter == 0 or adapter in active or len(active) < max_loras:
            admitted.append(index)
            active |= {adapter} - {0}
    return admitted


# endregion


@dataclass
class Request:
    """A request that runs for `steps` steps and arrives before step `arrives`; `adapter` 0 is the base model."""

    name: str
    adapter: int
    steps: int
    arrives: int = 0


def serve(requests: Sequence[Request], max_loras: int, max_num_seqs: int) -> Iterator[tuple[list[Request], int]]:
    """Yield the running requests and the number of waiting ones in each step, until all are served."""
    coming, running, waiting, step = list(requests), list[Request](), list[Request](), 0
    left = {request.name: request.steps for request in requests}
    while coming or running or waiting:
        waiting += [request for request in coming if request.arrives <= step]
        coming = [request for request in coming if request.arrives > step]
        adapters = [[request.adapter for request in queue] for queue in (running, waiting)]
        admitted = admit(*adapters, max_loras, max_num_seqs - len(running))
        running += [waiting[index] for index in admitted]
        waiting = [request for index, request in enumerate(waiting) if index not in admitted]
        yield list(running), len(waiting)
        left.update({request.name: left[request.name] - 1 for request in running})
        running = [request for request in running if left[request.name]]
        step += 1


def tiers(batches: Iterable[Iterable[int]], max_loras: int, max_cpu_loras: int) -> Counter:
    """Count the adapters of these steps: `used` in a step, `copied` into a slot, read `from disk`.

    An adapter is read from disk into host memory and copied from there into a slot; evicted there, it leaves both.
    """
    device, host, counts = AdapterSlots(max_loras), AdapterSlots(max_cpu_loras), Counter()
    for adapters in batches:
        for adapter in dict.fromkeys(filter(None, adapters)):
            before = set(host.slots)
            host.activate(adapter)
            for evicted in before - set(host.slots) - {None}:
                device.deactivate(evicted)
            counts.update(used=1, copied=adapter not in device.slots, **{"from disk": adapter not in before})
            device.activate(adapter)
    return counts


def first_steps() -> list[list[str]]:
    """Solve the exercise on paper: two slots, three seats."""
    requests = [Request("A", 1, 2), Request("B", 2, 4), Request("C", 3, 2), Request("D", 0, 1), Request("E", 2, 1)]
    return [[request.name for request in running] for running, _ in serve(requests, max_loras=2, max_num_seqs=3)]


# %% The talk, in order


def main(arguments: Namespace) -> None:
    """Run the lesson from top to bottom."""
    device, control = begin("Lesson 12. Multi-LoRA", arguments), Control()
    report.check(arguments)
    heading("1. The size of an adapter, and of a merged model")
    figures: dict = {"weighs": report.show_weights(adapter_numbers)}
    heading("2. Merged or applied")
    figures["applied"] = report.check_applied(merged, applied, arguments, device)
    heading("3. The same batch, four ways")
    four = {"loop": by_loop, "bgmv": by_token, "sgmv": by_segment, "sorted": by_sorting}
    figures["kernels"] = prove(partial(ways.verify_kernels, four, quick=arguments.quick), device)
    figures["counted"] = ways.count_ways(four, arguments.quick)
    with control.watch():
        figures["distinct"] = ways.measure_distinct(arguments, device)
    heading("4. A thousand adapters in one process")
    with control.watch():
        figures["thousand"] = in_engine.measure_thousand(arguments)
    with control.watch():
        figures["cost"] = in_engine.measure_cost(arguments)
    figures["answers"] = in_engine.show_answers(arguments)
    heading("5. Break it")
    figures["slots"] = report.show_gate(serve, tiers, Request)
    figures["ranks"] = report.show_ranks(adapter_numbers)
    figures["shared"] = in_engine.share_hashes(arguments)
    report.close(figures, control.disturbance())
    keep(__file__, figures, arguments, report.draw, disturbance=control.record())


parser = partial(report.parser, __doc__)

if __name__ == "__main__":
    run(main, parser())
