"""What the scheduler did, step by step, as lines of JSON: for a page that shows it, and for files.

A line says only what changed, so that watching costs little; every `STEPS_BETWEEN_KEYS` steps, and when all starts over
or computed tokens are lost, a key line has the whole state, from which a reader can begin. Requests are numbered in the
order in which they are first mentioned. There are ids, counts and block numbers in the lines, and no token and no text.

    {"step":7,"t":0.41,"batch":[1,2,[3,64,0,0]],"blocks":[[2,[40]]],"stored":[12]}

In step 7 requests 1 and 2 computed one token each and sampled one; request 3 computed 64 tokens of its prompt; request
2 took block 40; block 12 can be found by its hash from now on.

In vLLM v0.33.0 nothing writes steps. Of its KV-cache events (`vllm/distributed/kv_events.py`), our block pool has those
that are needed here.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from minivllm.core.block_pool import BlockRemoved, BlockStored
from minivllm.core.messages import EngineCoreOutput
from minivllm.core.output import CachedRequestData, SchedulerOutput
from minivllm.core.request import Request, RequestStatus
from minivllm.core.scheduler import Scheduler

FORMAT = 1
STEPS_BETWEEN_KEYS = 250
WAITING_SHOWN = 24
"""How many of the waiting requests are named, from the head of the queue on; the others are counted."""
SECONDS_KEPT_BACK = 0.05
"""Steps in which the same requests decode on are written down together, this long after the first at the latest."""

Waiting = tuple[int, list[int]]
"""How many requests wait, and the numbers of the first of them."""
Event = BlockStored | BlockRemoved
QUEUE_MAY_CHANGE = {"gone", "preempted", "admitted", "ended"}
Line = dict[str, Any]
"""A `StepLine` in the making: a dictionary of what there is to say, which costs less than a structure of all there
could be."""


class HeaderLine(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The first line of a recording. `xray` is the format's version; `core` is the one of `cores` that is shown."""

    xray: int
    model: str = ""
    core: int = 0
    cores: int = 1


class NamedRequest(msgspec.Struct, array_like=True, omit_defaults=True):
    """A request that is mentioned for the first time. `max_tokens` is 0 where it is not known any more.

    `adapter`: the name of its LoRA adapter, if it has one.
    """

    number: int
    request_id: str
    prompt_tokens: int
    max_tokens: int
    adapter: str = ""


class Admitted(msgspec.Struct, array_like=True):
    """A request that begins to run: its known tokens, how many of them were cached, and its block table.

    The table begins with the cached blocks.
    """

    number: int
    num_tokens: int
    num_cached_tokens: int
    blocks: list[int]


class Scheduled(msgspec.Struct, array_like=True):
    """A request's part in a step: tokens computed, drafts among them, and tokens that came of it.

    A decode (one token, no drafts, one new token) is written as the request's number alone.
    """

    number: int
    num_tokens: int
    num_drafts: int
    num_new: int


class StepLine(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One step. `t` is in seconds since the first line. To be applied in the order of the fields.

    - `gone`: requests that were aborted before the step.
    - `preempted`: requests that lost their blocks, and wait again.
    - `admitted`, and `blocks`: what requests that ran already took besides.
    - `batch`: who got tokens, in scheduling order.
    - `removed`, `stored`: blocks that cannot be found by a hash any more, and those that can from now on.
    - `ended`: requests and their finish reasons.
    - `waiting`: the queue, if it has changed.
    - `tier`: a second tier of the cache, if it has changed: its blocks, those that hold something, those being loaded
      and those being stored.
    - `slots`: those of LoRA adapters, if they have changed: the name of the adapter in each ("": none), and whether it
      is pinned.

    A line without a batch that repeats the last step's number tells of what happened while nothing ran.
    """

    step: int
    t: float
    named: list[NamedRequest] = []
    gone: list[int] = []
    preempted: list[int] = []
    admitted: list[Admitted] = []
    blocks: list[tuple[int, list[int]]] = []
    batch: list[int | Scheduled] = []
    removed: list[int] = []
    stored: list[int] = []
    ended: list[tuple[int, str]] = []
    waiting: Waiting | None = None
    tier: list[int] = []
    slots: list[tuple[str, bool]] = []


class RequestState(msgspec.Struct, array_like=True, omit_defaults=True):
    """A request in a key line: known tokens, tokens whose keys and values are computed, block table, adapter."""

    number: int
    request_id: str
    prompt_tokens: int
    max_tokens: int
    num_tokens: int
    num_computed_tokens: int
    num_preemptions: int
    running: bool
    blocks: list[int]
    adapter: str = ""


class KeyLine(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The whole state after step `key`. Block 0 is the null block: `num_blocks` includes it, and nobody holds it.

    A request that has been aborted since, while later steps were in flight, is left out.

    `max_loras`: how many adapters may run at once; 0 where none are served. `slots`: see `StepLine`; empty in
    recordings of versions that did not tell them.
    """

    key: int
    t: float
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    requests: list[RequestState]
    cached: list[int]
    waiting: Waiting
    tier: list[int] = []
    max_loras: int = 0
    slots: list[tuple[str, bool]] = []


class StepRecorder:
    """Watches a scheduler and changes nothing in it. `take` returns the lines since the last call; the first is a key.

    Call `observe` after each step, and `observe_idle` when the scheduler has started over, or something has happened
    while there are no requests.

    After a forward pass nothing that is needed here lies in the processor's caches, so a line costs several times what
    it would cost in a loop. In most steps the same requests decode on: what is new in these is kept as it comes, and
    their lines are written in one go.
    """

    def __init__(
        self, scheduler: Scheduler, in_flight: Callable[[], Iterable[SchedulerOutput]] = tuple[SchedulerOutput]
    ) -> None:
        """`in_flight` returns the steps that are scheduled, and of which `observe` has not been told yet."""
        self._scheduler, self._in_flight = scheduler, in_flight
        self._since = time.monotonic()
        self._step = 0
        self._numbers: dict[str, int] = {}
        self._last_number = 0
        self._cached: set[int] = set()
        self._waiting: Waiting = (0, [])
        self._tier: list[int] = []
        self._slots: list[tuple[str, bool]] = []
        self._num_truncations = 0
        self._decodes: dict[str, int] | None = None
        """The last step's tokens by request, if all of them have decoded one."""
        self._decoding = msgspec.Raw()
        """The same as a line's `batch`."""
        self._kept: list[tuple[float, CachedRequestData | None, list[Event]]] = []
        """Of the last steps, of which no line is written yet: their ends, blocks taken, and what came of hashes."""
        self._encode = msgspec.json.Encoder().encode
        self._lines: list[bytes] = []
        self._begin()

    def take(self, all_of_them: bool = True) -> list[bytes]:
        """Returns the lines that were not taken yet, without their line ends; or only those that are written."""
        if all_of_them:
            self._write_kept(self._step)
        lines, self._lines = self._lines, []
        return lines

    def stop(self) -> None:
        """Watches no more."""
        self._manager.block_pool.kv_event_queue = None

    def observe(self, scheduled: SchedulerOutput, outputs: Sequence[EngineCoreOutput]) -> None:
        """Writes down a step that has been computed; `outputs` are those of its requests."""
        self._step += 1
        now = time.monotonic()
        cached = scheduled.scheduled_cached_reqs
        if self._goes_on(scheduled, outputs):
            self._kept.append((now, cached if any(cached.new_block_ids) else None, self._take_events()))
            if now - self._kept[0][0] > SECONDS_KEPT_BACK:
                self._write_kept(self._step)
            return
        self._write_kept(self._step - 1)
        line = self._line(self._step, now)
        if scheduled.finished_req_ids or scheduled.preempted_req_ids:
            self._note_lost(line, scheduled)
        if scheduled.scheduled_new_reqs:
            self._note_admitted(line, scheduled)
        if any(cached.new_block_ids):
            self._note_taken(line, cached)
        line["batch"] = self._batch(scheduled, outputs)
        self._note_changes(line, outputs)
        if self._step % STEPS_BETWEEN_KEYS == 0 or self._progress_was_lost():
            self._lines.append(self._encode(self._key()))

    def observe_idle(self) -> None:
        """Writes down what has changed since the last step: requests were aborted, the prefix cache was reset.

        That all has started over counts as a step, so that the one before it is still shown as it was.
        """
        self._write_kept(self._step)
        if self._scheduler.kv_cache_manager is not self._manager:
            self._step += 1
            self._begin()
            return
        self._note_changes(self._line(self._step, time.monotonic()), ())

    def _goes_on(self, scheduled: SchedulerOutput, outputs: Sequence[EngineCoreOutput]) -> bool:
        """Whether the same requests have decoded as in the step before, and no request came, went or was preempted.

        Whoever was admitted or preempted has changed the tokens, the queue's length, or both.
        """
        scheduler = self._scheduler
        return not (
            scheduled.num_scheduled_tokens != self._decodes
            or len(scheduled.num_scheduled_tokens) != len(outputs)
            or scheduled.finished_req_ids
            or scheduler.finished_req_ids
            or scheduler.remote
            or scheduler.lora_slots is not self._slots
            or self._num_waiting() != self._waiting[0]
            or self._step % STEPS_BETWEEN_KEYS == 0
        )

    def _write_kept(self, last: int) -> None:
        """Writes the lines of the steps up to `last` that were kept back."""
        if not self._kept:
            return
        for step, (now, taken, events) in enumerate(self._kept, last + 1 - len(self._kept)):
            line = self._line(step, now)
            if taken is not None:
                self._note_taken(line, taken)
            line["batch"] = self._decoding
            if events:
                self._note_blocks(line, events)
            self._lines.append(self._encode(line))
        self._kept = []

    def _line(self, step: int, now: float) -> Line:
        return {"step": step, "t": self._time(now)}

    def _time(self, now: float) -> float:
        return round(now - self._since, 4)

    def _num_waiting(self) -> int:
        return len(self._scheduler.requests) - len(self._scheduler.running)

    def _progress_was_lost(self) -> bool:
        """Whether requests that run must compute again what came of invalid blocks, which no step line can say."""
        remote = self._scheduler.remote
        return remote is not None and remote.num_truncations != self._num_truncations

    def _begin(self) -> None:
        self._manager = self._scheduler.kv_cache_manager
        pool = self._manager.block_pool
        self._events: list[Event] = []
        pool.kv_event_queue = self._events
        # A pool that takes the place of the engine's own may know nothing of hashes.
        blocks = getattr(pool, "blocks", ())
        self._cached = {block.block_id for block in blocks if getattr(block, "block_hash", None) is not None}
        self._decodes = None
        self._lines.append(self._encode(self._key()))

    def _note_lost(self, line: Line, scheduled: SchedulerOutput) -> None:
        line["gone"] = self._numbered(scheduled.finished_req_ids)
        for request_id in scheduled.finished_req_ids:
            self._numbers.pop(request_id, None)
        line["preempted"] = self._numbered(scheduled.preempted_req_ids)

    def _note_admitted(self, line: Line, scheduled: SchedulerOutput) -> None:
        self._decodes = None  # an id may be another request's now
        line["admitted"] = admitted = []
        for new in scheduled.scheduled_new_reqs:
            number = self._number_of(new.req_id, len(new.prompt_token_ids), line)
            admitted.append((number, len(new.prefill_token_ids), new.num_computed_tokens, new.block_ids))

    def _note_changes(self, line: Line, outputs: Sequence[EngineCoreOutput]) -> None:
        """What a step and idleness have in common; and the line is done."""
        scheduler = self._scheduler
        if self._events:
            self._note_blocks(line, self._take_events())
        if scheduler.finished_req_ids:
            self._note_ended(line, {one.request_id: one.finish_reason for one in outputs})
        # Whoever leaves the queue was admitted or has ended.
        if line.keys() & QUEUE_MAY_CHANGE or self._num_waiting() != self._waiting[0] or scheduler.remote:
            self._note_waiting(line)
        if scheduler.remote and (tier := self._tier_state()) != self._tier:
            self._tier = line["tier"] = tier
        if scheduler.lora_slots is not self._slots:
            self._slots = line["slots"] = scheduler.lora_slots
        self._lines.append(self._encode(line))

    def _numbered(self, request_ids: set[str]) -> list[int]:
        return [self._numbers[request_id] for request_id in request_ids if request_id in self._numbers]

    def _number_of(self, request_id: str, prompt_tokens: int, line: Line) -> int:
        number = self._numbers.get(request_id)
        if number is None:
            number = self._new_number(request_id)
            request = self._scheduler.requests.get(request_id)  # it may have been aborted while it was computed
            most, adapter = (request.max_tokens, _adapter_of(request)) if request else (0, "")
            line.setdefault("named", []).append(NamedRequest(number, request_id, prompt_tokens, most, adapter))
        return number

    def _new_number(self, request_id: str) -> int:
        self._last_number += 1
        self._numbers[request_id] = self._last_number
        return self._last_number

    def _batch(self, scheduled: SchedulerOutput, outputs: Sequence[EngineCoreOutput]) -> Any:
        """The line's `batch`. While the same requests decode, it is what it was."""
        numbers, counts = self._numbers, scheduled.num_scheduled_tokens
        if scheduled.total_num_scheduled_tokens == len(counts) == len(outputs):  # one token in, one out: decodes
            if counts != self._decodes:
                self._decodes = counts
                self._decoding = msgspec.Raw(self._encode([numbers[name] for name in counts if name in numbers]))
            return self._decoding
        drafts = scheduled.scheduled_spec_decode_tokens
        fresh = {one.request_id: len(one.new_token_ids) for one in outputs}
        batch: list[int | Scheduled] = []
        for name, count in counts.items():
            if name in numbers:
                num_new = fresh.get(name, 0)
                plain = count == num_new == 1
                batch.append(
                    numbers[name] if plain else Scheduled(numbers[name], count, len(drafts.get(name, ())), num_new)
                )
        return batch

    def _note_taken(self, line: Line, cached: CachedRequestData) -> None:
        taken = zip(cached.req_ids, cached.new_block_ids, strict=True)
        line["blocks"] = [(self._numbers[name], ids) for name, ids in taken if ids and name in self._numbers]

    def _take_events(self) -> list[Event]:
        """What came of the pool's hashes since the last call."""
        events = self._events.copy()
        self._events.clear()
        return events

    def _note_blocks(self, line: Line, events: Sequence[Event]) -> None:
        removed: set[int] = set()
        stored: set[int] = set()
        for event in events:
            if isinstance(event, BlockStored):
                stored.update(event.block_ids)
            else:
                ids = self._cached | stored if event.block_ids is None else event.block_ids
                removed.update(ids)
                stored.difference_update(ids)
        self._cached -= removed
        self._cached |= stored
        line["removed"], line["stored"] = sorted(removed), sorted(stored)

    def _note_ended(self, line: Line, reasons: dict[str, str | None]) -> None:
        line["ended"] = ended = []
        for request_id in self._scheduler.finished_req_ids:
            number = self._numbers.pop(request_id, None)
            if number is not None:
                ended.append((number, reasons.get(request_id) or "abort"))

    def _note_waiting(self, line: Line) -> None:
        head = self._head_of_queue()
        waiting = (self._num_waiting(), [self._number_of(one.request_id, one.num_prompt_tokens, line) for one in head])
        if waiting != self._waiting:
            self._waiting = line["waiting"] = waiting

    def _tier_state(self) -> list[int]:
        remote = self._scheduler.remote
        state = remote.connector.tier_state() if remote else None
        return [] if state is None else list(state.values())

    def _head_of_queue(self) -> list[Request]:
        """Requests whose keys and values come from elsewhere, then others. The former are admitted first."""
        remote = self._scheduler.remote
        loading = [*remote.received, *remote.kv_holding_waiting.values()] if remote else []
        return [*loading, *self._scheduler.waiting.head(WAITING_SHOWN)][:WAITING_SHOWN]

    def _key(self) -> KeyLine:
        scheduler, config = self._scheduler, self._scheduler.config
        head = self._head_of_queue()
        for request in (*scheduler.running, *head):
            if request.request_id not in self._numbers:
                self._new_number(request.request_id)
        self._numbers = {name: number for name, number in self._numbers.items() if name in scheduler.requests}
        self._waiting = (self._num_waiting(), [self._numbers[request.request_id] for request in head])
        self._tier, self._slots = self._tier_state(), scheduler.lora_slots
        self._num_truncations = scheduler.remote.num_truncations if scheduler.remote else 0
        states = {name: self._state(scheduler.requests[name], number) for name, number in self._numbers.items()}
        for step in reversed(tuple(self._in_flight())):
            _undo(step, states)
        return KeyLine(
            key=self._step,
            t=self._time(time.monotonic()),
            num_blocks=scheduler.cache_config.num_gpu_blocks,
            block_size=scheduler.cache_config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            requests=list(states.values()),
            cached=sorted(self._cached),
            waiting=self._waiting,
            tier=self._tier,
            max_loras=config.max_loras,
            slots=self._slots,
        )

    def _state(self, request: Request, number: int) -> RequestState:
        return RequestState(
            number,
            request.request_id,
            request.num_prompt_tokens,
            request.max_tokens,
            request.num_tokens,
            request.num_computed_tokens,
            request.num_preemptions,
            request.status is RequestStatus.RUNNING,
            self._scheduler.kv_cache_manager.get_block_ids(request.request_id),
            _adapter_of(request),
        )


def _undo(step: SchedulerOutput, states: dict[str, RequestState]) -> None:
    """Makes states what they were before a step was scheduled, whose line is still to come.

    Which blocks a preempted request had, and how many of its tokens were computed, is not known any more: none until
    that line.
    """
    for name, num_tokens in step.num_scheduled_tokens.items():
        if name in states:
            states[name].num_computed_tokens = max(0, states[name].num_computed_tokens - num_tokens)
    cached = step.scheduled_cached_reqs
    for name, taken in zip(cached.req_ids, cached.new_block_ids, strict=True):
        if taken and name in states:
            del states[name].blocks[-len(taken) :]
    for new in step.scheduled_new_reqs:
        if new.req_id in states:
            one = states[new.req_id]
            one.running, one.blocks, one.num_computed_tokens = False, [], 0
    for name in step.preempted_req_ids & states.keys():
        one = states[name]
        one.running, one.blocks, one.num_computed_tokens = True, [], 0
        one.num_preemptions -= 1


def _adapter_of(request: Request) -> str:
    return request.lora_request.lora_name if request.lora_request else ""
