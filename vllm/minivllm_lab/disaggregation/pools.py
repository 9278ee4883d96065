"""Engines that prefill and engines that decode, on one virtual clock: the real scheduler in each, and a link between.

A request goes to a prefilling engine, which computes its prompt, then to a decoding engine, which allocates blocks for
the prompt and pulls keys and values into them. They are held at both ends until the last byte has arrived. Then the
decoding engine computes the prompt's last token again, as vLLM's does, and that step gives the first token that the
client sees. Engines take requests in turn (round robin), as a proxy would hand them out.

What waits and what is held is the scheduler's own doing (`core.remote_kv`), told by a connector like any other: here
`SimulatedConnector`. Engines step independently of one another; what one hands to another takes effect at the other's
next step. As in `open_load`, many similar steps are taken at once, up to the next moment at which something may be
handed over.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import count

from minivllm.config import CacheConfig, SchedulerConfig
from minivllm.core.block_hash import BlockHash
from minivllm.core.block_pool import KVCacheBlock
from minivllm.core.kv_connector import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorOutput, KVTransferParams
from minivllm.core.policy import DEFAULT_POLICY, SchedulingPolicy
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler
from minivllm.core.scheduler_output import SchedulerOutput
from minivllm_simulate.cost_model import Cost, StepShape
from minivllm_simulate.kv_links import Link, layer_wise_end
from minivllm_simulate.offline import Stretches
from minivllm_simulate.open_load import PAUSE
from minivllm_simulate.virtual_clock import Acceptance, SimulatedRequest, to_request
from minivllm_simulate.workloads import RequestLengths

Configs = tuple[SchedulerConfig, CacheConfig]


@dataclass
class Journey:
    """A request's way through both pools. Times in seconds since the start; inf: not yet."""

    arrival: float
    prompt_tokens: int
    output_tokens: int
    begun: float = math.inf
    """When the step began that computes its first prompt tokens."""
    computed: float = math.inf
    """When its prompt was computed."""
    taken: float = math.inf
    """When the decoding engine had blocks for it."""
    sent: float = math.inf
    """When the first byte left."""
    received: float = math.inf
    """When the last byte had arrived."""
    first: float = math.inf
    """When the client saw its first token."""
    last: float = math.inf
    tokens: int = 0

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.first - self.arrival

    @property
    def tpot(self) -> float:
        """Seconds per token after the first; 0 for a single token."""
        return (self.last - self.first) / (self.tokens - 1) if self.tokens > 1 else 0.0

    @property
    def parts(self) -> dict[str, float]:
        """What the time to first token went into, in its order; see PARTS."""
        ready = max(self.computed, self.taken)
        return {
            "queue": self.begun - self.arrival,
            "prefill": self.computed - self.begun,
            "room": ready - self.computed,
            "link": self.received - ready,
            "decode": self.first - self.received,
        }


PARTS = ("queue", "prefill", "room", "link", "decode")
"""Waiting for a prefilling engine; the prefill; waiting for blocks at the decoding engine; the transfer, and waiting
for the link; waiting for a place there, and the first step."""


@dataclass(frozen=True)
class PoolLoad:
    """Requests that come one after another.

    At the start, `at_start` requests are decoded somewhere in their answers. The first `counted` arrivals are those
    that are looked at; those after them only keep the load up until the last of these has ended.
    """

    lengths: Sequence[RequestLengths]
    arrivals: Sequence[float]
    counted: int
    at_start: int = 0


@dataclass(frozen=True)
class Pools:
    """How many engines, what each is told, what its steps cost, and how they are linked.

    - `link`: of each engine, both ways at once; a transfer holds the sender's and the receiver's. With `shared` there
      is one link for all.
    - `layer_wise`: a layer is sent as soon as it is computed; else the transfer begins when the whole prompt is.
    - `connector`: what stands beside each scheduler, in place of `SimulatedConnector`; called as that is.
    """

    prefill: int
    decode: int
    prefill_configs: Configs
    decode_configs: Configs
    cost: Cost
    link: Link
    bytes_per_token: int
    layers: int
    layer_wise: bool = False
    shared: bool = False
    connector: Callable[[bool], SimulatedConnector] | None = None


def run_pools(pools: Pools, load: PoolLoad) -> Generator[None, None, list[Journey]]:
    """Serve a load, with a pause every few milliseconds of work; returns the counted requests, all of them ended.

    Raises:
        MinivllmError: a scheduler refuses a request.
    """
    return _Clock(pools, load).serve()


class SimulatedConnector(KVConnectorBase_V1):
    """The scheduler's side of a connector over a link that exists on the virtual clock only.

    A prompt that has been computed keeps its blocks until it was sent; one that is computed elsewhere waits for all of
    its tokens, holding blocks. A request that was preempted has lost them, and is computed where it is.
    """

    def __init__(self, sends: bool) -> None:
        self.sends, self.taken = sends, []

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """All of its prompt, once."""
        if self.sends or request.num_preemptions:
            return 0, False
        return request.num_prompt_tokens - num_computed_tokens, True

    def update_state_after_alloc(
        self, request: Request, blocks: Sequence[KVCacheBlock], num_external_tokens: int
    ) -> None:
        """Notes who has got blocks to be filled."""
        if num_external_tokens:
            self.taken.append(request.request_id)

    def take(self) -> list[str]:
        """The requests that have got blocks since the last call."""
        found, self.taken = self.taken, []
        return found

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, KVTransferParams | None]:
        """The blocks are needed until they were sent."""
        return self.sends, None

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """There is no rank to be told."""
        return KVConnectorMetadata()

    def start_load_kv(self) -> None:
        """There is no rank."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """There is no rank."""

    def save_kv_layer(self, layer_name: str, kv_layer: object, attn_metadata: object) -> None:
        """There is no rank."""

    def wait_for_save(self) -> None:
        """There is no rank."""


def _no_name(parent: BlockHash, token_ids: Sequence[int], extra_keys: bytes = b"") -> BlockHash:
    """A block's name where nobody asks for it: `SimulatedConnector` does not."""
    del parent, token_ids, extra_keys
    return b""


class _Engine(Stretches):
    """One engine: stretches that end when something may be handed to it."""

    def __init__(self, configs: Configs, cost: Cost, connector: SimulatedConnector) -> None:
        named = configs[1].enable_prefix_caching or type(connector) is not SimulatedConnector
        policy = DEFAULT_POLICY if named else SchedulingPolicy(hash_block_tokens=_no_name)
        scheduler, self.connector = Scheduler(*configs, policy), connector
        scheduler.use_connector(self.connector)
        super().__init__((), scheduler, Acceptance(0.0), StepShape.of)
        self.cost, self.busy = cost, False
        self.until, self.room = 0.0, math.inf
        self.step_seconds = self.shortest = cost.seconds(StepShape.of([(1, 0)]))
        self.link_free = 0.0
        self.incoming: deque[float] = deque()
        self.ending: list[str] = []

    def add(self, request: Request) -> None:
        """Hand it a request. Raises `MinivllmError` for one that cannot be served."""
        self.scheduler.add_request(request)
        self.settled = False

    def moved(self, request_id: str) -> None:
        """Tell the scheduler, between two steps, that a prompt has been sent, or has arrived."""
        done, remote = {request_id}, self.scheduler.remote
        assert remote is not None
        sent = KVConnectorOutput(finished_sending=done) if self.connector.sends else None
        remote.end_update(sent or KVConnectorOutput(finished_recving=done))
        self.settled = False

    def steps_alike(self, running: Sequence[Request]) -> int:
        """No more than begin before something may be handed to it."""
        remote = self.scheduler.remote
        if remote is not None and remote.finished_recving_kv_req_ids:  # they join
            return 1
        steps = super().steps_alike(running)
        if steps == 1 or any(not request.num_output_tokens for request in running):
            return 1
        return max(1, min(steps, math.ceil(self.room / self.step_seconds))) if self.room < math.inf else steps

    def begin(self, now: float, until: float) -> bool:
        """Take steps that begin before `until`; False if there is nothing to do."""
        self.room = until - now
        stretch = self.stretch()
        assert self.scheduled is not None
        if not self.scheduled.num_scheduled_tokens:
            return False
        seconds = stretch.seconds(self.cost)
        self.step_seconds = seconds / stretch.steps
        self.busy, self.until = True, now + seconds
        self.ending = [one.request_id for one in self.outputs if one.finish_reason]
        return True


class _Clock:
    """A run under way."""

    def __init__(self, pools: Pools, load: PoolLoad) -> None:
        self.pools, self.load = pools, load
        make = pools.connector or SimulatedConnector
        self.prefillers = [_Engine(pools.prefill_configs, pools.cost, make(True)) for _ in range(pools.prefill)]
        self.decoders = [_Engine(pools.decode_configs, pools.cost, make(False)) for _ in range(pools.decode)]
        times = zip(load.lengths, load.arrivals, strict=False)
        self.journeys = [Journey(at, one.prompt_tokens, one.output_tokens) for one, at in times]
        self.come, self.unended, self.work = 0, load.counted, 0
        self.link_free = 0.0
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self.order = count()

    def serve(self) -> Generator[None, None, list[Journey]]:
        """Run until the last counted request has ended."""
        self._put_in_the_middle()
        self._at(self.journeys[0].arrival, self._arrive)
        for engine in self.decoders:
            self._decode(engine, 0.0)
        while self.unended:
            now, _, act = heapq.heappop(self.events)
            act(now)
            if self.work > PAUSE:
                self.work = 0
                yield
        return self.journeys[: self.load.counted]

    def _at(self, when: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self.events, (when, next(self.order), act))

    def _put_in_the_middle(self) -> None:
        """Requests that are decoded at the start, each somewhere in its answer, spread evenly over it."""
        engines, lengths = self.decoders, self.load.lengths
        for index in range(self.load.at_start):
            one, engine = lengths[index % len(lengths)], engines[index % len(engines)]
            turn, turns = index // len(engines), -(-self.load.at_start // len(engines))
            done = int(one.output_tokens * (turn + 0.5) / turns)
            spec = SimulatedRequest(one.prompt_tokens + done, max(1, one.output_tokens - done))
            engine.add(to_request(len(self.journeys) + index, spec, 0.0))
        for engine in engines:
            engine.stretch()
            for request_id in engine.connector.take():
                engine.moved(request_id)

    # A prompt's way

    def _arrive(self, now: float) -> None:
        index, self.come = self.come, self.come + 1
        if self.come < len(self.journeys):
            self._at(self.journeys[self.come].arrival, self._arrive)
        engine, one = self._prefiller(index), self.journeys[index]
        engine.add(to_request(index, SimulatedRequest(one.prompt_tokens, 1, now), now))
        self._prefill(engine, now)

    def _prefill(self, engine: _Engine, now: float) -> None:
        if engine.busy or not engine.scheduler.requests or not engine.begin(now, now):
            return
        self.work += 8
        assert engine.scheduled is not None
        for new in engine.scheduled.scheduled_new_reqs:
            index = int(new.req_id)
            self.journeys[index].begun = now
            if self.pools.layer_wise:
                self._hand_over(index, now)
        self._at(engine.until, lambda then: self._computed(engine, then))

    def _computed(self, engine: _Engine, now: float) -> None:
        engine.busy = False
        for index in map(int, engine.ending):
            self.journeys[index].computed = now
            if self.pools.layer_wise:
                self._send(index)
            else:
                self._hand_over(index, now)
        engine.ending = []
        self._prefill(engine, now)

    def _hand_over(self, index: int, now: float) -> None:
        """Tell the decoding engine of a prompt: it needs blocks for it."""
        engine, one = self._decoder(index), self.journeys[index]
        engine.add(to_request(index, SimulatedRequest(one.prompt_tokens, one.output_tokens, now), now))
        self._decode(engine, now)

    def _send(self, index: int) -> None:
        """Begin a transfer if the prompt is computed and there are blocks for it."""
        one, source, target = self.journeys[index], self._prefiller(index), self._decoder(index)
        if max(one.computed, one.taken) == math.inf:
            return
        seconds = self.pools.link.seconds(one.prompt_tokens * self.pools.bytes_per_token)
        free = self.link_free if self.pools.shared else max(source.link_free, target.link_free)
        start = max(free, one.taken, one.begun if self.pools.layer_wise else one.computed)
        if start < one.computed:
            end = layer_wise_end(start, one.computed, seconds, self.pools.layers)
        else:
            end = start + seconds
        one.sent, one.received = start, end
        self.link_free = source.link_free = target.link_free = end - self.pools.link.latency
        target.incoming.append(end)
        self._at(end, lambda then: self._received(index, then))

    def _received(self, index: int, now: float) -> None:
        source, target = self._prefiller(index), self._decoder(index)
        source.moved(str(index))
        self._prefill(source, now)
        target.incoming.popleft()
        target.moved(str(index))
        self._decode(target, now)

    # Answers

    def _decode(self, engine: _Engine, now: float) -> None:
        if engine.busy:
            return
        has_begun = bool(engine.scheduler.requests) and engine.begin(now, self._nothing_before(engine, now))
        for index in map(int, engine.connector.take()):
            self.journeys[index].taken = now
            self._send(index)
        if has_begun:
            self.work += 8 + len(engine.outputs)
            self._at(engine.until, lambda then: self._decoded(engine, then))

    def _nothing_before(self, engine: _Engine, now: float) -> float:
        """A moment before which nothing can be handed to a decoding engine."""
        coming = self.journeys[self.come].arrival if self.come < len(self.journeys) else math.inf
        own = self.decoders.index(engine)
        return min(
            engine.incoming[0] if engine.incoming else math.inf,
            *(self._hands_over_from(one, own, now, coming) for one in self.prefillers),
        )

    def _hands_over_from(self, source: _Engine, own: int, now: float, coming: float) -> float:
        """When a prefilling engine may have something for the `own`-th decoding engine, at the soonest."""
        waits = 0.0 if self.pools.layer_wise else source.shortest
        if not source.busy:  # if it has work, it waits for blocks that a transfer will free
            return (now if source.scheduler.requests else coming) + waits
        ends = any(int(request_id) % len(self.decoders) == own for request_id in source.ending)
        return source.until if ends else source.until + waits

    def _decoded(self, engine: _Engine, now: float) -> None:
        engine.busy = False
        for output in engine.outputs:
            index = int(output.request_id)
            if index < len(self.journeys):
                self._note(index, now, len(output.new_token_ids), bool(output.finish_reason))
        self._decode(engine, now)

    def _note(self, index: int, now: float, tokens: int, ended: bool) -> None:
        one = self.journeys[index]
        one.first = min(one.first, now)
        one.last, one.tokens = now, one.tokens + tokens
        self.unended -= ended and index < self.load.counted

    def _prefiller(self, index: int) -> _Engine:
        return self.prefillers[index % len(self.prefillers)]

    def _decoder(self, index: int) -> _Engine:
        return self.decoders[index % len(self.decoders)]
