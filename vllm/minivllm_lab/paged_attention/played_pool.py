"""A few requests served on a small block pool, step by step: admit, fork, grow, copy, preempt, free.

The pool is the engine's, or any class with its four methods. Tables and requests are kept here, so that after each step
the pool's books can be held against who really holds what: a pool that forgets a holder, hands a block out twice or
loses one is caught in the step where it happens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from minivllm.errors import MinivllmError
from minivllm_lab.paged_attention.pool_audit import Fault, HeldTable, Pool, audit, counted_blocks, named
from minivllm_simulate.workloads import RequestLengths

MOST_FRAMES = 26
TICKS_OF_A_LIFE = 6
ROOM_FOR = 0.36
"""Of all requests, the share for which the pool has room: enough for some, too little for all."""


@dataclass(frozen=True)
class Frame:
    """One step: what happened, and who holds what after it."""

    did: str
    """admit, fork, grow, copy, preempt, free, free twice, or stuck."""
    caption: str
    tables: tuple[HeldTable, ...]
    free: int
    """As the pool says."""
    faults: tuple[Fault, ...]
    """The gravest first; none, if the pool is right."""


@dataclass(frozen=True)
class Play:
    """The steps of one play."""

    num_blocks: int
    """Blocks of the pool, the null block included."""
    block_size: int
    shortened: int
    """The requests' lengths are divided by this, so that so few blocks are enough."""
    frames: tuple[Frame, ...]

    @property
    def fault(self) -> str:
        """What went wrong first, and the first clash that came of it; "" if nothing did."""
        found = [fault for frame in self.frames for fault in frame.faults]
        clash = next((fault for fault in found if fault.clash), None)
        first = found[0].words if found else ""
        return first if clash is None or clash is found[0] else f"{first}; later {clash.words}"


@dataclass(eq=False)
class _Table:
    """The blocks of one sequence, and copy-on-write: lesson 02's `BlockTable`."""

    pool: Pool
    block_size: int
    blocks: list[Any] = field(default_factory=list)
    tokens: int = 0

    def must_copy(self, count: int) -> bool:
        return count > 0 and self.tokens % self.block_size > 0 and self.blocks[-1].ref_cnt > 1

    def missing(self, count: int) -> int:
        return -(-(self.tokens + count) // self.block_size) - len(self.blocks) + self.must_copy(count)

    def append(self, count: int) -> list[tuple[int, int]]:
        """Room for `count` tokens; the (source, target) blocks that are copied."""
        new, copies = list(self.pool.get_new_blocks(self.missing(count))), []
        if self.must_copy(count):
            shared, own = self.blocks.pop(), new.pop(0)
            self.pool.free_blocks([shared])
            self.blocks.append(own)
            copies.append((shared.block_id, own.block_id))
        self.blocks += new
        self.tokens += count
        return copies

    def fork(self) -> _Table:
        child = _Table(self.pool, self.block_size, list(self.blocks), self.tokens)
        self.pool.touch(child.blocks)
        return child

    def free(self) -> None:
        blocks, self.blocks, self.tokens = self.blocks, [], 0
        self.pool.free_blocks(reversed(blocks))


@dataclass(eq=False)
class _Request:
    number: int
    lengths: RequestLengths
    samples: int
    written: int = 0
    tables: list[_Table] = field(default_factory=list)

    def most_blocks(self, block_size: int, written: int) -> int:
        """Blocks of all samples once each has written so many tokens, the prompt's full blocks shared."""
        prompt = self.lengths.prompt_tokens
        shared = prompt // block_size if self.samples > 1 else 0
        return shared + self.samples * (-(-(prompt + written) // block_size) - shared)


def play_pool(
    requests: Sequence[RequestLengths],
    block_size: int,
    samples: int,
    most_blocks: int,
    pool_class: Callable[[int], Any],
) -> Play:
    """Serve `requests` on a pool that has room for about a third of them, first come, first served.

    Lengths are divided by a whole number, so that the pool has at most `most_blocks` blocks. The play ends with the
    last step at which half of the pool is held, and after `MOST_FRAMES` steps at the latest.

    Args:
        requests: their lengths, in tokens; at least one request.
        block_size: token slots in a block.
        samples: answers to each request; they share the blocks of its prompt.
        most_blocks: the most blocks to show, the null block included; at least `samples` + 1.
        pool_class: called with the number of blocks; block 0 is the null block.

    Raises:
        MinivllmError: an argument makes no sense.
    """
    if not requests or block_size < 1 or not 1 <= samples < most_blocks:
        problem = f"{len(requests)} requests, blocks of {block_size}, {samples} samples, {most_blocks} blocks"
        raise MinivllmError(f"a play needs requests, blocks with slots, and a block for each sample, not {problem}")
    shortened, waiting, usable = _fitted(requests, block_size, samples, most_blocks - 1)
    stage = _Stage(pool_class(usable + 1), block_size, deque(waiting))
    stage.play(max(1, round(sum(one.lengths.output_tokens for one in waiting) / len(waiting) / TICKS_OF_A_LIFE)))
    frames = stage.frames[:MOST_FRAMES]
    busy = [index for index, frame in enumerate(frames) if frame.faults or frame.free <= usable / 2]
    return Play(usable + 1, block_size, shortened, tuple(frames[: busy[-1] + 1] if busy else frames))


def _fitted(
    requests: Sequence[RequestLengths], block_size: int, samples: int, most: int
) -> tuple[int, list[_Request], int]:
    """By how much lengths are divided, the requests then, and the blocks of the pool."""
    shortened = 1
    while True:
        shorter = [
            RequestLengths(max(1, one.prompt_tokens // shortened), max(1, one.output_tokens // shortened))
            for one in requests
        ]
        waiting = [_Request(number, lengths, samples) for number, lengths in enumerate(shorter, 1)]
        sizes = [one.most_blocks(block_size, one.lengths.output_tokens) for one in waiting]
        # One block more than they hold in the end: copies are taken before the shared block is let go of.
        usable = max(max(sizes) + (samples > 1), round(ROOM_FOR * sum(sizes)))
        if usable <= most or max(one.total for one in shorter) <= 2:
            return shortened, waiting, usable
        shortened += max(1, shortened // 8)


class _Stage:
    """The pool, who runs, who waits, and the frames so far."""

    def __init__(self, pool: Pool, block_size: int, waiting: deque[_Request]) -> None:
        self.pool, self.block_size, self.waiting = pool, block_size, waiting
        self.running: list[_Request] = []
        self.frames: list[Frame] = []
        self.tried_twice = False

    def play(self, stride: int) -> None:
        """Ticks until all are served, nobody can go on, the pool refuses what is right, or it is long enough."""
        try:
            while (self.waiting or self.running) and len(self.frames) < MOST_FRAMES:
                lost = self.grow(stride)
                self.finish()
                if not lost:
                    self.admit()
                if self.waiting and not self.running and not lost:
                    free = self.pool.get_num_free_blocks()
                    self.show("stuck", f"Nobody runs, and request {self.waiting[0].number} does not fit: {free} free")
                    return
        except ValueError as error:
            self.show("stuck", "It goes no further", [Fault(f"the pool raises where it must not: {error}")])

    def show(self, did: str, caption: str, faults: Iterable[Fault] = ()) -> None:
        tables = tuple(
            HeldTable(one.number, sample, tuple(block.block_id for block in table.blocks), table.tokens)
            for one in self.running
            for sample, table in enumerate(one.tables, 1)
        )
        found = [*faults, *audit(self.pool, tables, self.prompts(), self.block_size)]
        caption = f"{caption}. ✕ {_capital(found[0].words)}." if found else f"{caption}."
        self.frames.append(Frame(did, caption, tables, self.pool.get_num_free_blocks(), tuple(found)))

    def prompts(self) -> dict[int, int]:
        return {one.number: one.lengths.prompt_tokens for one in self.running}

    def grow(self, stride: int) -> int:
        """Everybody writes on, and the request admitted last gives way where the pool is dry; how many did."""
        taken, copies, lost, grown = 0, [], 0, []
        for one in list(self.running):
            count = min(stride, one.lengths.output_tokens - one.written)
            while one.tables and self.missing(one, count) > self.pool.get_num_free_blocks():
                self.preempt()
                lost += 1
            if not one.tables:
                continue
            for table in one.tables:
                taken += table.missing(count)
                copies += table.append(count)
            one.written += count
            grown.append(one.number)
        if copies:
            pairs = ", ".join(f"{source} to {target}" for source, target in copies[:4])
            more = f" and {len(copies) - 4} more" if len(copies) > 4 else ""
            self.show("copy", f"{_these(grown)} on. Copy-on-write into half full shared blocks: {pairs}{more}")
        elif taken:
            self.show("grow", f"{_these(grown)} on: {counted_blocks(taken)} taken")
        return lost

    def missing(self, one: _Request, count: int) -> int:
        """Blocks that all samples together take; of those who share a half full block, the last one needs no copy."""
        needed = sum(table.missing(count) for table in one.tables)
        copies = sum(table.must_copy(count) for table in one.tables)
        return needed - (copies > 0 and copies == len(one.tables))

    def preempt(self) -> None:
        last = self.running.pop()
        before = self.pool.get_num_free_blocks()
        self.release(last)
        self.waiting.appendleft(last)
        freed = self.pool.get_num_free_blocks() - before
        self.show("preempt", f"The pool is dry. Request {last.number} preempted: {counted_blocks(freed)} free again")

    def finish(self) -> None:
        for one in [one for one in self.running if one.written >= one.lengths.output_tokens]:
            before = self.pool.get_num_free_blocks()
            blocks = list(one.tables[0].blocks)
            self.running.remove(one)
            self.release(one)
            freed = self.pool.get_num_free_blocks() - before
            self.show("free", f"Request {one.number} ends: {counted_blocks(freed)} free again")
            if not self.tried_twice:
                self.tried_twice = True
                self.free_twice(one.number, blocks)

    def free_twice(self, number: int, blocks: list[Any]) -> None:
        """What a forgetful caller does: a pool must refuse it."""
        tried = f"A bug frees request {number}'s blocks again"
        try:
            self.pool.free_blocks(reversed(blocks))
        except ValueError:
            self.show("free twice", f"{tried}: the pool refuses")
            return
        self.show(
            "free twice",
            tried,
            [Fault("blocks freed twice, and the pool took them", tuple(block.block_id for block in blocks))],
        )

    def release(self, one: _Request) -> None:
        for table in one.tables:
            table.free()
        one.tables = []

    def admit(self) -> None:
        """The queue's head comes in while its tokens fit; then its samples fork."""
        came: list[_Request] = []
        before, promised = self.pool.get_num_free_blocks(), 0
        while self.waiting and len(came) < 3:
            one = self.waiting[0]
            wanted = one.most_blocks(self.block_size, one.written + 1)
            if promised + wanted > before:
                break
            promised += wanted
            table = _Table(self.pool, self.block_size)
            table.append(one.lengths.prompt_tokens)
            one.tables = [table]
            came.append(self.waiting.popleft())
            self.running.append(one)
            if one.written:  # it was preempted: what it had is computed again, its samples apart
                self.fork(one)
        if not came:
            return
        taken = before - self.pool.get_num_free_blocks()
        again = [one for one in came if one.written]
        note = f" ({named(one.number for one in again)} again)" if again else ""
        self.show(
            "admit", f"{_capital(named(one.number for one in came))} admitted{note}: {counted_blocks(taken)} taken"
        )
        fresh = [one for one in came if not one.written and one.samples > 1]
        for one in fresh:
            self.fork(one)
        if fresh:
            held = sum(len(one.tables[0].blocks) for one in fresh)
            names = _capital(named(one.number for one in fresh))
            self.show("fork", f"{names} forked: {counted_blocks(held)} held {fresh[0].samples} times each, none taken")

    def fork(self, one: _Request) -> None:
        one.tables += [one.tables[0].fork() for _ in range(one.samples - 1)]
        for table in one.tables if one.written else ():
            table.append(one.written)


def _these(numbers: list[int]) -> str:
    return _capital(f"{named(numbers)} write{'' if len(set(numbers)) > 1 else 's'}")


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]
