"""Simulate engines that prefill, engines that decode, and the link between them, with the real
scheduler in each engine.

A request goes to a prefilling engine, which computes its prompt, then to a decoding engine, which
allocates blocks for the prompt and pulls keys and values into them. Both ends hold their blocks
until the last byte has arrived. Then the decoding engine computes the prompt's last token again, as
vLLM's does, and that step gives the first token that the client sees. Engines take requests in turn
(round robin), as a proxy would hand them out.

Each scheduler decides by itself which requests wait and which blocks are held (`core.remote_kv`);
`SimulatedConnector` tells it what has moved. Engines step independently on one event loop, and what
one engine hands to another takes effect at the other's next step. As in `open_load`, an engine
takes many similar steps at once, up to the next moment at which it may be handed something.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial

from minivllm.config import CacheConfig, SchedulerConfig
from minivllm.core.block_hash import BlockHash
from minivllm.core.block_pool import KVCacheBlock
from minivllm.core.kv_connector import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorOutput, KVTransferParams
from minivllm.core.policy import DEFAULT_POLICY, SchedulingPolicy
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler
from minivllm.core.scheduler_output import SchedulerOutput
from minivllm_simulate.cost_model import Cost, StepShape
from minivllm_simulate.event_loop import EventLoop, with_pauses
from minivllm_simulate.kv_links import Link, layer_wise_end
from minivllm_simulate.open_load import OpenLoad, Stay
from minivllm_simulate.simulated_engine import SimulatedEngine
from minivllm_simulate.virtual_clock import SimulatedRequest, to_request

Configs = tuple[SchedulerConfig, CacheConfig]


@dataclass
class Journey(Stay):
    """A request's path through both pools, with times in seconds since the start; inf means not
    yet.

    - `begun`, `computed`: when the step of its first prompt tokens began, and when its last prompt
      token was computed.
    - `taken`: when the decoding engine had blocks for it.
    - `sent`, `received`: when the first byte left, and when the last one arrived.
    """

    prompt_tokens: int = 1
    begun: float = math.inf
    computed: float = math.inf
    taken: float = math.inf
    sent: float = math.inf
    received: float = math.inf

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.first - self.arrival

    @property
    def parts(self) -> dict[str, float]:
        """The time to first token split into PARTS, in their order."""
        ready = max(self.computed, self.taken)
        return {
            "queue": self.begun - self.arrival,
            "prefill": self.computed - self.begun,
            "room": ready - self.computed,
            "link": self.received - ready,
            "decode": self.first - self.received,
        }


PARTS = ("queue", "prefill", "room", "link", "decode")
"""Waiting for a prefilling engine; the prefill; waiting for blocks at the decoding engine; the
transfer, with the wait for the link; waiting to be scheduled there, and the first step.
"""


@dataclass(frozen=True)
class Pools:
    """The engines of both pools, their settings, what their steps cost, and how they are linked.

    - `link`: each engine has one for both directions; a transfer holds the sender's and the
      receiver's.
    - `layer_wise`: send each layer as soon as it is computed; else the transfer begins when the
      whole prompt is.
    - `connector`: makes the connector of each scheduler; called with whether the engine sends.
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
    connector: Callable[[bool], SimulatedConnector] | None = None


def run_pools(pools: Pools, load: OpenLoad) -> Generator[None, None, list[Journey]]:
    """Serve a load, as a generator that pauses every few milliseconds of work; return the counted
    requests, all of them finished.

    Raises:
        MinivllmError: a scheduler refuses a request.
    """
    return PoolSimulation(pools, load).serve()


class SimulatedConnector(KVConnectorBase_V1):
    """The scheduler's side of a connector over a simulated link.

    A computed prompt keeps its blocks until it has been sent; a prompt that is computed elsewhere
    holds blocks and waits for all of its tokens. A preempted request has lost its blocks and is
    recomputed locally.
    """

    def __init__(self, sends: bool) -> None:
        self.sends = sends
        self.taken: list[str] = []

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Offer the whole prompt, once."""
        if self.sends or request.num_preemptions:
            return 0, False
        return request.num_prompt_tokens - num_computed_tokens, True

    def update_state_after_alloc(
        self, request: Request, blocks: Sequence[KVCacheBlock], num_external_tokens: int
    ) -> None:
        """Record that a request has blocks to be filled."""
        if num_external_tokens:
            self.taken.append(request.request_id)

    def take(self) -> list[str]:
        """Return the requests that were given blocks since the last call."""
        taken, self.taken = self.taken, []
        return taken

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, KVTransferParams | None]:
        """Hold the blocks of a sender until they have been read."""
        return self.sends, None

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return empty metadata: no worker moves real blocks."""
        return KVConnectorMetadata()


def _constant_hash(parent: BlockHash, token_ids: Sequence[int], extra_keys: bytes = b"") -> BlockHash:
    """Return the same hash for all blocks: `SimulatedConnector` does not look at it."""
    del parent, token_ids, extra_keys
    return b""


class _Engine(SimulatedEngine):
    """One engine, whose stretches of steps end when it may be handed something."""

    def __init__(self, configs: Configs, cost: Cost, connector: SimulatedConnector) -> None:
        needs_hashes = configs[1].enable_prefix_caching or type(connector) is not SimulatedConnector
        policy = DEFAULT_POLICY if needs_hashes else SchedulingPolicy(hash_block_tokens=_constant_hash)
        super().__init__(Scheduler(*configs, policy))
        self.scheduler.use_connector(connector)
        self.connector = connector
        self.cost = cost
        self.busy = False
        self.until = 0.0
        self.room = math.inf
        self.step_seconds = self.shortest = cost.seconds(StepShape.of([(1, 0)]))
        self.link_free = 0.0
        self.incoming: deque[float] = deque()
        self.ending: list[str] = []

    def moved(self, request_id: str) -> None:
        """Tell the scheduler, between two steps, that a prompt has been sent, or has arrived."""
        remote = self.scheduler.remote
        assert remote is not None
        output = KVConnectorOutput()
        (output.finished_sending if self.connector.sends else output.finished_recving).add(request_id)
        remote.end_transfers(output)
        self.settled = False

    def steps_alike(self, running: Sequence[Request]) -> int:
        """Return how many similar steps can begin before the engine may be handed something."""
        remote = self.scheduler.remote
        if remote is not None and remote.finished_recving_kv_req_ids:  # they join
            return 1
        steps = super().steps_alike(running)
        if steps == 1 or any(not request.num_output_tokens for request in running):
            return 1
        return max(1, min(steps, math.ceil(self.room / self.step_seconds))) if self.room < math.inf else steps

    def begin(self, now: float, until: float) -> bool:
        """Take steps that begin before `until`; return False if there is nothing to compute."""
        self.room = until - now
        stretch = self.stretch()
        assert self.scheduled is not None
        if not self.scheduled.num_scheduled_tokens:
            return False
        seconds = stretch.seconds(self.cost)
        self.step_seconds = seconds / stretch.steps
        self.busy = True
        self.until = now + seconds
        self.ending = [output.request_id for output in self.outputs if output.finish_reason]
        return True


class PoolSimulation:
    """A running simulation of both pools."""

    def __init__(self, pools: Pools, load: OpenLoad) -> None:
        self.pools = pools
        self.load = load
        make = pools.connector or SimulatedConnector
        self.prefillers = [_Engine(pools.prefill_configs, pools.cost, make(True)) for _ in range(pools.prefill)]
        self.decoders = [_Engine(pools.decode_configs, pools.cost, make(False)) for _ in range(pools.decode)]
        times = zip(load.lengths, load.arrivals, strict=False)
        self.journeys = [
            Journey(at, lengths.output_tokens, prompt_tokens=lengths.prompt_tokens) for lengths, at in times
        ]
        self.come = 0
        self.unended = load.counted
        self.work = 0
        self.loop = EventLoop()

    def serve(self) -> Generator[None, None, list[Journey]]:
        """Run until the last counted request has ended."""
        self._fill_decoders()
        self.loop.at(self.journeys[0].arrival, self._arrive)
        for engine in self.decoders:
            self._decode(engine)
        yield from with_pauses(self.advance, lambda: self.unended)
        return self.journeys[: self.load.counted]

    def advance(self) -> int:
        """Process the next event; return the work that it took."""
        self.work = 0
        self.loop.advance(self.loop.next_time)
        return self.work

    def _fill_decoders(self) -> None:
        """Give the decoders requests that are part-way through their answers, at evenly spread
        points.
        """
        engines, lengths = self.decoders, self.load.lengths
        turns = -(-self.load.at_start // len(engines))
        for index in range(self.load.at_start):
            drawn = lengths[index % len(lengths)]
            done = int(drawn.output_tokens * (index // len(engines) + 0.5) / turns)
            spec = SimulatedRequest(drawn.prompt_tokens + done, max(1, drawn.output_tokens - done))
            engines[index % len(engines)].add(to_request(len(self.journeys) + index, spec, 0.0))
        for engine in engines:
            engine.stretch()
            for request_id in engine.connector.take():
                engine.moved(request_id)

    # From a request's arrival to its first byte at the decoder

    def _arrive(self) -> None:
        index = self.come
        self.come += 1
        if self.come < len(self.journeys):
            self.loop.at(self.journeys[self.come].arrival, self._arrive)
        engine = self._prefiller(index)
        self._add(engine, index, output_tokens=1)
        self._prefill(engine)

    def _add(self, engine: _Engine, index: int, output_tokens: int) -> None:
        spec = SimulatedRequest(self.journeys[index].prompt_tokens, output_tokens, self.loop.now)
        engine.add(to_request(index, spec, self.loop.now))

    def _prefill(self, engine: _Engine) -> None:
        now = self.loop.now
        if engine.busy or not engine.scheduler.requests or not engine.begin(now, now):
            return
        self.work += 8
        assert engine.scheduled is not None
        for new in engine.scheduled.scheduled_new_reqs:
            index = int(new.req_id)
            self.journeys[index].begun = now
            if self.pools.layer_wise:
                self._hand_over(index)
        self.loop.at(engine.until, partial(self._computed, engine))

    def _computed(self, engine: _Engine) -> None:
        engine.busy = False
        for index in map(int, engine.ending):
            self.journeys[index].computed = self.loop.now
            if self.pools.layer_wise:
                self._send(index)
            else:
                self._hand_over(index)
        engine.ending = []
        self._prefill(engine)

    def _hand_over(self, index: int) -> None:
        """Tell the decoding engine about a prompt, so that it allocates blocks for it."""
        engine = self._decoder(index)
        self._add(engine, index, self.journeys[index].output_tokens)
        self._decode(engine)

    def _send(self, index: int) -> None:
        """Begin a transfer if the prompt is computed and there are blocks for it."""
        journey, source, target = self.journeys[index], self._prefiller(index), self._decoder(index)
        if max(journey.computed, journey.taken) == math.inf:
            return
        seconds = self.pools.link.seconds(journey.prompt_tokens * self.pools.bytes_per_token)
        free = max(source.link_free, target.link_free)
        start = max(free, journey.taken, journey.begun if self.pools.layer_wise else journey.computed)
        end = start + seconds
        if start < journey.computed:
            end = layer_wise_end(start, journey.computed, seconds, self.pools.layers)
        journey.sent = start
        journey.received = end
        source.link_free = target.link_free = end - self.pools.link.latency
        target.incoming.append(end)
        self.loop.at(end, partial(self._received, index))

    def _received(self, index: int) -> None:
        source, target = self._prefiller(index), self._decoder(index)
        source.moved(str(index))
        self._prefill(source)
        target.incoming.popleft()
        target.moved(str(index))
        self._decode(target)

    # From there to its last token

    def _decode(self, engine: _Engine) -> None:
        if engine.busy:
            return
        has_begun = bool(engine.scheduler.requests) and engine.begin(self.loop.now, self._undisturbed_until(engine))
        for index in map(int, engine.connector.take()):
            self.journeys[index].taken = self.loop.now
            self._send(index)
        if has_begun:
            self.work += 8 + len(engine.outputs)
            self.loop.at(engine.until, partial(self._decoded, engine))

    def _undisturbed_until(self, engine: _Engine) -> float:
        """Return a time before which nothing can be handed to a decoding engine."""
        soonest = [self._hands_over_from(source, self.decoders.index(engine)) for source in self.prefillers]
        return min([*list(engine.incoming)[:1], *soonest])

    def _hands_over_from(self, source: _Engine, decoder: int) -> float:
        """Return the earliest time at which a prefilling engine may have something for this
        decoding engine.
        """
        waits = 0.0 if self.pools.layer_wise else source.shortest
        if source.busy:
            ends = any(int(request_id) % len(self.decoders) == decoder for request_id in source.ending)
            return source.until if ends else source.until + waits
        if source.scheduler.requests:  # it waits for blocks that a transfer will free
            return self.loop.now + waits
        return (self.journeys[self.come].arrival if self.come < len(self.journeys) else math.inf) + waits

    def _decoded(self, engine: _Engine) -> None:
        engine.busy = False
        for output in engine.outputs:
            index = int(output.request_id)
            if index < len(self.journeys):
                journey = self.journeys[index]
                journey.first = min(journey.first, self.loop.now)
                journey.last = self.loop.now
                journey.tokens += len(output.new_token_ids)
                self.unended -= bool(output.finish_reason) and index < self.load.counted
        self._decode(engine)

    def _prefiller(self, index: int) -> _Engine:
        return self.prefillers[index % len(self.prefillers)]

    def _decoder(self, index: int) -> _Engine:
        return self.decoders[index % len(self.decoders)]
