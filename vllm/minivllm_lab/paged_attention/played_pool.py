"""A few requests served on a small block pool, step by step: admit, fork, grow, copy, preempt,
free.

The pool is the engine's, or any class with its four methods. Tables and requests are kept here, so
that after each step the pool's bookkeeping can be compared with the tables: a pool that miscounts,
allocates a block twice or loses one is caught in the step where it happens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from minivllm_lab.block_tables import BlockTable, Pool
from minivllm_lab.paged_attention.pool_audit import Fault, HeldTable, audit, counted_blocks, named
from minivllm_simulate.workloads import RequestLengths

MOST_FRAMES = 26
TICKS_OF_A_LIFE = 6
ROOM_FOR = 0.36
"""The pool has room for this share of the requests: enough for some, too little for all."""


class Frame(NamedTuple):
    """One step: what happened, and the tables after it."""

    did: str
    """admit, fork, grow, copy, preempt, free, free twice, or stuck."""
    caption: str
    tables: tuple[HeldTable, ...]
    free: int
    """The number of free blocks that the pool reports."""
    faults: tuple[Fault, ...]
    """The gravest first; empty if the pool is right."""

    @property
    def branches(self) -> bool:
        """Return whether two samples' tables share a block and go on in different ones."""
        return any(
            one.request == other.request and one.blocks != other.blocks and {*one.blocks} & {*other.blocks}
            for one, other in pairwise(self.tables)
        )


class Play(NamedTuple):
    """All steps of a pool that serves a few requests."""

    num_blocks: int
    """Blocks of the pool, the null block included."""
    block_size: int
    shortened: int
    """The requests' lengths are divided by this, so that so few blocks are enough."""
    frames: tuple[Frame, ...]

    @property
    def fault(self) -> str:
        """Return the first fault and the first clash that follows from it, or "" if the pool is
        right.
        """
        faults = [fault for frame in self.frames for fault in frame.faults]
        clash = next((fault for fault in faults if fault.clash), None)
        first = faults[0].words if faults else ""
        return first if clash is None or clash is faults[0] else f"{first}; later {clash.words}"


@dataclass(eq=False)
class _Request:
    number: int
    lengths: RequestLengths
    samples: int
    written: int = 0
    tables: list[BlockTable] = field(default_factory=list)

    def most_blocks(self, block_size: int, written: int) -> int:
        """Return the number of blocks that all samples hold once each has written `written` tokens,
        with the prompt's full blocks shared.
        """
        prompt = self.lengths.prompt_tokens
        shared = prompt // block_size if self.samples > 1 else 0
        return shared + self.samples * (-(-(prompt + written) // block_size) - shared)


def play_pool(
    requests: Sequence[RequestLengths], block_size: int, samples: int, most_blocks: int,
    pool_class: Callable[[int], Any],
) -> Play:  # fmt: skip
    """Serve `requests` on a pool that has room for about a third of them, first come, first served.

    Lengths are divided by a whole number, so that the pool has at most `most_blocks` blocks. The
    play ends with the last step in which at least half of the pool is held, if possible with tables
    that branch, and after at most `MOST_FRAMES` steps.

    Args:
        requests: their lengths, in tokens; at least one request.
        block_size: token slots in a block.
        samples: answers to each request; they share the blocks of its prompt.
        most_blocks: the maximum number of blocks to show, the null block included; at least `samples` + 1.
        pool_class: called with the number of blocks; block 0 is the null block.
    """
    shortened, waiting, usable = _fitted(requests, block_size, samples, most_blocks - 1)
    stage = _Stage(pool_class(usable + 1), block_size, deque(waiting))
    mean_output = sum(request.lengths.output_tokens for request in waiting) / len(waiting)
    stage.play(max(1, round(mean_output / TICKS_OF_A_LIFE)))
    frames = stage.frames[:MOST_FRAMES]
    busy = [index for index, frame in enumerate(frames) if frame.faults or frame.free <= usable / 2]
    branching = [index for index in busy if frames[index].faults or frames[index].branches]
    last = (branching or busy or range(len(frames)))[-1]
    return Play(usable + 1, block_size, shortened, tuple(frames[: last + 1]))


def _fitted(
    requests: Sequence[RequestLengths], block_size: int, samples: int, most: int
) -> tuple[int, list[_Request], int]:
    """Shorten the requests until a pool of `most` blocks is enough.

    Returns:
        The divisor of their lengths, the requests, and the blocks of the pool.
    """
    divisor = 1
    while True:
        shorter = [
            RequestLengths(max(1, x.prompt_tokens // divisor), max(1, x.output_tokens // divisor)) for x in requests
        ]
        waiting = [_Request(number, lengths, samples) for number, lengths in enumerate(shorter, 1)]
        sizes = [request.most_blocks(block_size, request.lengths.output_tokens) for request in waiting]
        # One block more than they hold in the end: a copy is allocated before the shared block is
        # freed.
        usable = max(max(sizes) + (samples > 1), round(ROOM_FOR * sum(sizes)))
        if usable <= most or max(lengths.total for lengths in shorter) <= 2:
            return divisor, waiting, usable
        divisor += max(1, divisor // 8)


class _Stage:
    """The pool, the running and waiting requests, and the frames so far."""

    def __init__(self, pool: Pool, block_size: int, waiting: deque[_Request]) -> None:
        self.pool, self.block_size, self.waiting = pool, block_size, waiting
        self.running: list[_Request] = []
        self.frames: list[Frame] = []
        self.freed_twice = False

    def play(self, stride: int) -> None:
        """Step until all requests are served, none can continue, the pool refuses a valid call, or
        there are enough frames.
        """
        try:
            while (self.waiting or self.running) and len(self.frames) < MOST_FRAMES:
                preempted = self.grow(stride)
                self.finish()
                if not preempted:
                    self.admit()
                if self.waiting and not self.running and not preempted:
                    free = self.pool.get_num_free_blocks()
                    self.show("stuck", f"Nothing runs, and request {self.waiting[0].number} does not fit: {free} free")
                    return
        except ValueError as error:
            self.show("stuck", "The play cannot go on", [Fault(f"the pool refuses a valid call: {error}")])

    def show(self, did: str, caption: str, faults: Iterable[Fault] = ()) -> None:
        tables = tuple(
            HeldTable(request.number, sample, tuple(block.block_id for block in table.blocks), table.num_tokens)
            for request in self.running
            for sample, table in enumerate(request.tables, 1)
        )
        prompts = {request.number: request.lengths.prompt_tokens for request in self.running}
        faults = [*faults, *audit(self.pool, tables, prompts, self.block_size)]
        caption = f"{caption}. ✕ {_capital(faults[0].words)}." if faults else f"{caption}."
        self.frames.append(Frame(did, caption, tables, self.pool.get_num_free_blocks(), tuple(faults)))

    def grow(self, stride: int) -> int:
        """Append tokens to every request; when the pool runs out, preempt the last request. Return
        the number of preemptions.
        """
        allocated, copies, preempted, grown = 0, [], 0, []
        for request in list(self.running):
            count = min(stride, request.lengths.output_tokens - request.written)
            while request.tables and self.blocks_needed(request, count) > self.pool.get_num_free_blocks():
                self.preempt()
                preempted += 1
            if not request.tables:
                continue
            for table in request.tables:
                allocated += table.blocks_needed(count)
                copies += table.append(count)
            request.written += count
            grown.append(request.number)
        subject = _capital(f"{named(grown)} continue{'' if len(set(grown)) > 1 else 's'}") if grown else ""
        if copies:
            pairs = ", ".join(f"{source} to {target}" for source, target in copies[:4])
            more = f" and {len(copies) - 4} more" if len(copies) > 4 else ""
            self.show("copy", f"{subject}. Copy-on-write into half-full shared blocks: {pairs}{more}")
        elif allocated:
            self.show("grow", f"{subject}: {counted_blocks(allocated)} taken")
        return preempted

    def blocks_needed(self, request: _Request, count: int) -> int:
        """Count the blocks that all samples take; of the samples that share a half-full block, the
        last needs no copy.
        """
        needed = sum(table.blocks_needed(count) for table in request.tables)
        copies = sum(table.must_copy(count) for table in request.tables)
        return needed - (copies > 0 and copies == len(request.tables))

    def preempt(self) -> None:
        last = self.running.pop()
        freed = self.release(last)
        self.waiting.appendleft(last)
        self.show("preempt", f"Too few are free. Request {last.number} preempted: {counted_blocks(freed)} free again")

    def finish(self) -> None:
        for request in [x for x in self.running if x.written >= x.lengths.output_tokens]:
            blocks = list(request.tables[0].blocks)
            self.running.remove(request)
            freed = self.release(request)
            self.show("free", f"Request {request.number} ends: {counted_blocks(freed)} free again")
            if not self.freed_twice:
                self.freed_twice = True
                self.free_twice(request.number, blocks)

    def free_twice(self, number: int, blocks: list[Any]) -> None:
        """Free blocks twice, as a forgetful caller would; the pool must refuse."""
        caption = f"A bug frees request {number}'s blocks again"
        try:
            self.pool.free_blocks(reversed(blocks))
        except ValueError:
            self.show("free twice", f"{caption}: the pool refuses")
            return
        block_ids = tuple(block.block_id for block in blocks)
        self.show("free twice", caption, [Fault("blocks freed twice, and the pool accepted them", block_ids)])

    def release(self, request: _Request) -> int:
        """Free all tables of a request; return how many blocks became free."""
        before = self.pool.get_num_free_blocks()
        for table in request.tables:
            table.free()
        request.tables = []
        return self.pool.get_num_free_blocks() - before

    def admit(self) -> None:
        """Admit up to three requests from the head of the queue while their tokens fit, then fork
        their samples.
        """
        admitted: list[_Request] = []
        before, promised = self.pool.get_num_free_blocks(), 0
        while self.waiting and len(admitted) < 3:
            request = self.waiting[0]
            needed = request.most_blocks(self.block_size, request.written + 1)
            if promised + needed > before:
                break
            promised += needed
            table = BlockTable(self.pool, self.block_size)
            table.append(request.lengths.prompt_tokens)
            request.tables = [table]
            admitted.append(self.waiting.popleft())
            self.running.append(request)
            if request.written:  # it was preempted: its tokens are computed again, for each sample apart
                self.fork(request)
        if not admitted:
            return
        allocated = before - self.pool.get_num_free_blocks()
        again = [request.number for request in admitted if request.written]
        note = f" ({named(again)} again)" if again else ""
        names = _capital(named(request.number for request in admitted))
        self.show("admit", f"{names} admitted{note}: {counted_blocks(allocated)} taken")
        fresh = [request for request in admitted if not request.written and request.samples > 1]
        for request in fresh:
            self.fork(request)
        if fresh:
            held = sum(len(request.tables[0].blocks) for request in fresh)
            names = _capital(named(request.number for request in fresh))
            self.show("fork", f"{names} forked: {counted_blocks(held)} held {fresh[0].samples} times each, none taken")

    def fork(self, request: _Request) -> None:
        request.tables += [request.tables[0].fork() for _ in range(request.samples - 1)]
        for table in request.tables if request.written else ():
            table.append(request.written)


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]
