"""What the scheduler did, step by step, as lines of JSON: for a page that shows it, and for files.

A line says only what changed, so that watching costs little; every `STEPS_BETWEEN_KEYS` steps a key line has the whole
state, from which a reader can begin. Requests are numbered in the order in which they are first mentioned. There are
ids, counts and block numbers in the lines, and no token and no text.

    {"step":7,"t":0.41,"batch":[1,2,[3,64,0,0]],"blocks":[[2,[40]]],"stored":[12]}

In step 7 requests 1 and 2 computed one token each and sampled one; request 3 computed 64 tokens of its prompt; request
2 took block 40; block 12 can be found by its hash from now on.

In vLLM v0.33.0 nothing writes steps; of its KV-cache events (`vllm/distributed/kv_events.py`), `BlockPool` has the ones
that are needed here.
"""

import time
from collections.abc import Sequence

import msgspec

from minivllm.core.block_pool import BlockPool, BlockStored
from minivllm.core.messages import EngineCoreOutput
from minivllm.core.output import SchedulerOutput
from minivllm.core.request import Request, RequestStatus
from minivllm.core.scheduler import Scheduler

FORMAT = 1
STEPS_BETWEEN_KEYS = 250
WAITING_SHOWN = 24
"""How many of the waiting requests are named, from the head of the queue on; the others are counted."""
LONG_QUEUE = 500
"""In a queue longer than this, the first requests are looked at only when its length has changed."""

Waiting = tuple[int, list[int]]
"""How many requests wait, and the numbers of the first of them."""


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
      and being stored, and blocks on disk.

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

    `max_loras`: how many adapters may run at once; 0 where none are served.
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


class StepRecorder:
    """Watches a scheduler and changes nothing in it. `take` returns the lines since the last call; the first is a key.

    Call `observe` after each step, and `observe_idle` after what has happened while there are no requests.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._since = time.monotonic()
        self._step = 0
        self._numbers: dict[str, int] = {}
        self._last_number = 0
        self._cached: set[int] = set()
        self._waiting: Waiting = (0, [])
        self._tier: list[int] = []
        self._encode = msgspec.json.Encoder().encode
        self._lines: list[bytes] = []
        self._begin()

    def take(self) -> list[bytes]:
        """Returns the lines that were not taken yet, without their line ends."""
        lines, self._lines = self._lines, []
        return lines

    def stop(self) -> None:
        """Watches no more."""
        self._pool.kv_event_queue = None

    def observe(self, scheduled: SchedulerOutput, outputs: Sequence[EngineCoreOutput]) -> None:
        """Writes down a step that has been computed; `outputs` are those of its requests."""
        self._step += 1
        if self._is_new_pool():
            self._begin()
            return
        line = StepLine(step=self._step, t=self._time())
        if scheduled.finished_req_ids or scheduled.preempted_req_ids:
            self._note_lost(line, scheduled)
        if scheduled.scheduled_new_reqs:
            self._note_admitted(line, scheduled)
        new_block_ids = scheduled.scheduled_cached_reqs.new_block_ids
        if any(new_block_ids):
            taken = zip(scheduled.scheduled_cached_reqs.req_ids, new_block_ids, strict=True)
            line.blocks = [(self._numbers[name], ids) for name, ids in taken if ids and name in self._numbers]
        line.batch = self._batch(scheduled, outputs)
        self._note_changes(line, outputs)
        if self._step % STEPS_BETWEEN_KEYS == 0:
            self._lines.append(self._encode(self._key()))

    def observe_idle(self) -> None:
        """Writes down what has changed since the last step: requests were aborted, the prefix cache was reset."""
        if self._is_new_pool():
            self._begin()
            return
        self._note_changes(StepLine(step=self._step, t=self._time()), ())

    @property
    def _pool(self) -> BlockPool:
        return self._scheduler.kv_cache_manager.block_pool

    def _is_new_pool(self) -> bool:
        """Whether the scheduler has started over, or somebody else has watched it."""
        return getattr(self._pool, "kv_event_queue", None) is not self._events

    def _begin(self) -> None:
        self._events = self._pool.kv_event_queue = []
        # A pool that takes the place of the engine's own may know nothing of hashes.
        blocks = getattr(self._pool, "blocks", ())
        self._cached = {block.block_id for block in blocks if getattr(block, "block_hash", None) is not None}
        self._lines.append(self._encode(self._key()))

    def _time(self) -> float:
        return round(time.monotonic() - self._since, 4)

    def _note_lost(self, line: StepLine, scheduled: SchedulerOutput) -> None:
        line.gone = self._numbered(scheduled.finished_req_ids)
        for request_id in scheduled.finished_req_ids:
            self._numbers.pop(request_id, None)
        line.preempted = self._numbered(scheduled.preempted_req_ids)

    def _note_admitted(self, line: StepLine, scheduled: SchedulerOutput) -> None:
        for new in scheduled.scheduled_new_reqs:
            number = self._number_of(new.req_id, len(new.prompt_token_ids), line)
            line.admitted.append(Admitted(number, len(new.prefill_token_ids), new.num_computed_tokens, new.block_ids))

    def _note_changes(self, line: StepLine, outputs: Sequence[EngineCoreOutput]) -> None:
        """What a step and idleness have in common; and the line is done."""
        if self._events:
            self._note_blocks(line)
        if self._scheduler.finished_req_ids:
            self._note_ended(line, {one.request_id: one.finish_reason for one in outputs})
        self._note_waiting(line)
        if (tier := self._tier_state()) != self._tier:
            self._tier = line.tier = tier
        self._lines.append(self._encode(line))

    def _numbered(self, request_ids: set[str]) -> list[int]:
        return [self._numbers[request_id] for request_id in request_ids if request_id in self._numbers]

    def _number_of(self, request_id: str, prompt_tokens: int, line: StepLine) -> int:
        number = self._numbers.get(request_id)
        if number is None:
            number = self._new_number(request_id)
            request = self._scheduler.requests.get(request_id)  # it may have been aborted while it was computed
            most, adapter = (request.max_tokens, _adapter_of(request)) if request else (0, "")
            line.named.append(NamedRequest(number, request_id, prompt_tokens, most, adapter))
        return number

    def _new_number(self, request_id: str) -> int:
        self._last_number += 1
        self._numbers[request_id] = self._last_number
        return self._last_number

    def _batch(self, scheduled: SchedulerOutput, outputs: Sequence[EngineCoreOutput]) -> list[int | Scheduled]:
        numbers, counts = self._numbers, scheduled.num_scheduled_tokens
        if scheduled.total_num_scheduled_tokens == len(counts) == len(outputs):  # one token in, one out: decodes
            return [numbers[name] for name in counts if name in numbers]
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

    def _note_blocks(self, line: StepLine) -> None:
        removed: set[int] = set()
        stored: set[int] = set()
        for event in self._pool.take_events():
            if isinstance(event, BlockStored):
                stored.update(event.block_ids)
            else:
                ids = self._cached | stored if event.block_ids is None else event.block_ids
                removed.update(ids)
                stored.difference_update(ids)
        self._events = self._pool.kv_event_queue
        self._cached -= removed
        self._cached |= stored
        line.removed, line.stored = sorted(removed), sorted(stored)

    def _note_ended(self, line: StepLine, reasons: dict[str, str | None]) -> None:
        for request_id in self._scheduler.finished_req_ids:
            number = self._numbers.pop(request_id, None)
            if number is not None:
                line.ended.append((number, reasons.get(request_id) or "abort"))

    def _note_waiting(self, line: StepLine) -> None:
        loading = self._loading()
        length = len(loading) + len(self._scheduler.waiting)
        if not length and not self._waiting[0]:
            return
        if length == self._waiting[0] > LONG_QUEUE and not line.admitted and not line.preempted:
            return
        head = self._head_of_queue(loading)
        waiting = (length, [self._number_of(one.request_id, one.num_prompt_tokens, line) for one in head])
        if waiting != self._waiting:
            self._waiting = line.waiting = waiting

    def _tier_state(self) -> list[int]:
        remote = self._scheduler.remote
        state = remote.connector.tier_state() if remote else None
        return [] if state is None else list(state.values())

    def _loading(self) -> list[Request]:
        """Requests whose keys and values come from elsewhere. Those that have them are admitted before all others."""
        remote = self._scheduler.remote
        return [*remote.received, *remote.kv_holding_waiting.values()] if remote else []

    def _head_of_queue(self, loading: list[Request]) -> list[Request]:
        return [*loading, *self._scheduler.waiting.head(WAITING_SHOWN)][:WAITING_SHOWN]

    def _key(self) -> KeyLine:
        scheduler, config = self._scheduler, self._scheduler.config
        loading = self._loading()
        head = self._head_of_queue(loading)
        for request in (*scheduler.running, *head):
            if request.request_id not in self._numbers:
                self._new_number(request.request_id)
        self._numbers = {name: number for name, number in self._numbers.items() if name in scheduler.requests}
        length = len(loading) + len(scheduler.waiting)
        self._waiting = (length, [self._numbers[request.request_id] for request in head])
        self._tier = self._tier_state()
        return KeyLine(
            key=self._step,
            t=self._time(),
            num_blocks=scheduler.cache_config.num_gpu_blocks,
            block_size=scheduler.cache_config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            requests=[self._state(scheduler.requests[name], number) for name, number in self._numbers.items()],
            cached=sorted(self._cached),
            waiting=self._waiting,
            tier=self._tier,
            max_loras=config.max_loras,
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


def _adapter_of(request: Request) -> str:
    return request.lora_request.lora_name if request.lora_request else ""
