"""Recordings of an engine's steps: made from an `LLM`, read from a file, and replayed to any step.

    with record(llm, "run.jsonl"):
        llm.generate(prompts)
    states = replay("run.jsonl")

A file is one header line, then key lines and step lines, as `minivllm.core.step_events` describes them. The first of
those is a key line. `minivllm serve --record FILE` writes the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from minivllm.core.step_events import FORMAT, HeaderLine, KeyLine, Scheduled, StepLine, Waiting
from minivllm.entrypoints.xray.recorder import RecordingFile, is_key
from minivllm.errors import EngineDeadError, MinivllmError

if TYPE_CHECKING:
    from minivllm.entrypoints.llm import LLM

MOST_BYTES, MOST_LINES, MOST_BLOCKS = 64 * 2**20, 100_000, 10**6


@dataclass
class ReplayedRequest:
    """A request as the lines tell of it. `num_tokens` are known, `num_computed_tokens` are in the cache."""

    request_id: str
    prompt_tokens: int
    max_tokens: int
    num_tokens: int = 0
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    running: bool = False
    blocks: list[int] = field(default_factory=list)
    adapter: str = ""


@dataclass
class ReplayedState:
    """The pool and the queues after a step, by the numbers of requests."""

    step: int
    num_blocks: int
    block_size: int
    max_num_batched_tokens: int
    requests: dict[int, ReplayedRequest]
    cached: set[int]
    waiting: Waiting
    batch: list[Scheduled] = field(default_factory=list)
    """Who got tokens in this step."""
    tier: list[int] = field(default_factory=list)
    """See `StepLine`, here and below."""
    slots: list[tuple[str, bool]] = field(default_factory=list)

    @classmethod
    def of(cls, key: KeyLine) -> ReplayedState:
        """The state that a key line has.

        Raises:
            MinivllmError: it cannot be the state of a pool.
        """
        if not 2 <= key.num_blocks <= MOST_BLOCKS or key.block_size < 1:
            raise MinivllmError(f"a pool of {key.num_blocks} blocks of {key.block_size} tokens")
        requests = {
            one.number: ReplayedRequest(
                one.request_id, one.prompt_tokens, one.max_tokens, one.num_tokens, one.num_computed_tokens,
                one.num_preemptions, one.running, list(one.blocks), one.adapter,
            )
            for one in key.requests
        }  # fmt: skip
        state = cls(
            key.key, key.num_blocks, key.block_size, key.max_num_batched_tokens, requests, set(key.cached), key.waiting
        )
        state.tier, state.slots = key.tier, key.slots
        state._check_blocks(key.cached)
        for one in requests.values():
            state._check_blocks(one.blocks)
        return state

    def apply(self, line: StepLine) -> None:
        """Moves on by one line.

        Raises:
            MinivllmError: it names a request or a block that there is not.
        """
        self.step = line.step
        for one in line.named:
            self.requests[one.number] = ReplayedRequest(
                one.request_id, one.prompt_tokens, one.max_tokens, num_tokens=one.prompt_tokens, adapter=one.adapter
            )
        for number in line.gone:
            self.requests.pop(number, None)
        for number in line.preempted:
            request = self._known(number)
            request.running, request.blocks, request.num_computed_tokens = False, [], 0
            request.num_preemptions += 1
        for one in line.admitted:
            request = self._known(one.number)
            request.running, request.blocks = True, self._check_blocks(one.blocks)
            request.num_tokens, request.num_computed_tokens = one.num_tokens, one.num_cached_tokens
        for number, blocks in line.blocks:
            self._known(number).blocks += self._check_blocks(blocks)
        self.batch = [Scheduled(one, 1, 0, 1) if isinstance(one, int) else one for one in line.batch]
        for one in self.batch:
            self._compute(one)
        self.cached -= set(line.removed)
        self.cached |= set(self._check_blocks(line.stored))
        for number, _ in line.ended:
            self.requests.pop(number, None)
        if line.waiting is not None:
            self.waiting = line.waiting
        self.tier, self.slots = line.tier or self.tier, line.slots or self.slots

    def holders(self) -> dict[int, list[int]]:
        """Block -> the requests that hold it."""
        found: dict[int, list[int]] = {}
        for number, request in self.requests.items():
            for block in request.blocks:
                found.setdefault(block, []).append(number)
        return found

    def _compute(self, one: Scheduled) -> None:
        request = self._known(one.number)
        rejected = one.num_drafts - (one.num_new - 1) if one.num_drafts and one.num_new else 0
        request.num_computed_tokens += one.num_tokens - rejected
        request.num_tokens += one.num_new

    def _known(self, number: int) -> ReplayedRequest:
        if number not in self.requests:
            raise MinivllmError(f"step {self.step} names request {number}, of which nothing was said")
        return self.requests[number]

    def _check_blocks(self, blocks: list[int]) -> list[int]:
        wrong = next((one for one in blocks if not 0 < one < self.num_blocks), None)
        if wrong is not None:
            raise MinivllmError(f"block {wrong} of a pool of {self.num_blocks}")
        return list(blocks)


def read_lines(path: str | Path) -> list[bytes]:
    """The lines of a recording, checked by replaying them. An unfinished last line is left out.

    Raises:
        MinivllmError: the file cannot be read, is no recording, or is too large.
    """
    lines = _lines_of(Path(path))
    for _ in _replayed(path, lines):
        pass
    return lines


def replay(path: str | Path) -> Iterator[ReplayedState]:
    """Yields the state after each line. It is one object, which moves on.

    Raises:
        MinivllmError: the file cannot be read, is no recording, or is too large.
    """
    return _replayed(path, _lines_of(Path(path)))


@contextmanager
def record(llm: LLM, path: str | Path) -> Iterator[None]:
    """Records the steps of an `LLM` while the block runs, here or with `multiprocess`; of several cores, the first's.

    Raises:
        MinivllmError: the file cannot be written.
    """
    engine = llm.llm_engine
    with RecordingFile(path, HeaderLine(xray=FORMAT, model=engine.model_name)) as file:
        engine.engine_core.call_utility("start_step_events")
        watcher = (0, file.write)
        engine.step_watchers.append(watcher)
        try:
            yield
        finally:
            engine.step_watchers.remove(watcher)
            with suppress(EngineDeadError):  # whoever used it has been told; of its steps there is no more to say
                file.write(engine.engine_core.call_utility("take_step_events"))
                engine.engine_core.call_utility("stop_step_events")


def _lines_of(path: Path) -> list[bytes]:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise MinivllmError(f"{path} has more than {MOST_BYTES // 2**20} MiB; record fewer steps")
        content = path.read_bytes()
    except OSError as error:
        raise MinivllmError(f"{path} cannot be read: {error.strerror}") from None
    lines = content.splitlines() if content.endswith(b"\n") else content.splitlines()[:-1]
    if len(lines) > MOST_LINES:
        raise MinivllmError(f"{path} has more than {MOST_LINES} lines; record fewer steps")
    return lines


def _replayed(path: str | Path, lines: list[bytes]) -> Iterator[ReplayedState]:
    number, state = 1, None
    try:
        header = msgspec.json.decode(lines[0], type=HeaderLine)
        if header.xray != FORMAT:
            raise MinivllmError(f"its format is {header.xray}, and {FORMAT} is read here")
        for line in lines[1:]:
            number += 1
            state = _after(state, line)
            yield state
        if state is None:
            raise MinivllmError("there is no step in it")
    except IndexError:
        raise MinivllmError(f"{path} is no recording: it is empty") from None
    except (msgspec.DecodeError, MinivllmError) as error:
        raise MinivllmError(f"{path} is no recording that can be shown: line {number}: {error}") from None


def _after(state: ReplayedState | None, line: bytes) -> ReplayedState:
    """The state after a line."""
    if is_key(line):
        return ReplayedState.of(msgspec.json.decode(line, type=KeyLine))
    if state is None:
        raise MinivllmError("the first step comes before any state")
    state.apply(msgspec.json.decode(line, type=StepLine))
    return state
