"""Lesson 08. Prefill/decode disaggregation: when do two pools of machines beat one?

Measures what a long prompt does to everybody else's answers. Then builds what takes it elsewhere: a connector that says
which tokens come from another engine, blocks that are held until they are read, a sender, a receiver, and the kernel
that gathers scattered blocks. You learn which links hide the transfer, and how many prefillers a decoder wants.

    uv run python vllm/08_disaggregation.py                      # under a minute on a laptop, no GPU needed
    uv run python vllm/08_disaggregation.py --prompt 1000 --quick
"""

import json
import math
import socket
import threading
import time
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minivllm.core.request import Request, RequestStatus
from minivllm.platforms.triton_utils import tl, triton
from minivllm_lab.block_tables import BlockTables
from minivllm_lab.cli import run
from minivllm_lab.disaggregation import report
from minivllm_lab.disaggregation.transfer_worker import Listening, Worker, until_finished
from minivllm_lab.disturbance import Control
from minivllm_lab.lesson import begin, keep
from minivllm_lab.paged_model import PagedModel
from minivllm_lab.proof import prove
from minivllm_lab.tables import heading

# %% 1. The pain needs no code of ours: the engine's own steps, chats that run, and a long prompt that comes
# %% 2. The idea: one engine computes the prompt, another one the answer. Which tokens come from where?


@dataclass
class Read:
    """Copy a peer's `remote_block_ids` into our `block_ids`, then tell it; of no blocks: only tell it."""

    request_id: str
    params: dict[str, Any]
    block_ids: list[int] = field(default_factory=list)
    remote_block_ids: list[int] = field(default_factory=list)


# region: connector
class ConnectorScheduler:
    """The scheduler's side of a connector: it decides which blocks move, and moves none."""

    def __init__(self, block_size: int, address: dict[str, Any], lease: float = 30.0, clock=time.monotonic) -> None:
        self.block_size, self.address, self.lease, self.clock = block_size, address, lease, clock
        self.reads: list[Read] = []
        self.in_flight: dict[str, set[bytes]] = {}
        self.pinned: dict[str, float] = {}

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens behind the computed ones can come from elsewhere (None: ask later); do others go on?"""
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_prefill"):
            return 0, False
        missing = request.block_hashes[num_computed_tokens // self.block_size :]
        if missing and any(missing[0] in hashes for hashes in self.in_flight.values()):
            return None, False  # another request has it on its way
        num_tokens = params["remote_num_tokens"] - num_computed_tokens
        return max(num_tokens, 0), num_tokens > 0

    def update_state_after_alloc(self, request: Request, block_ids: list[int], num_external_tokens: int) -> None:
        """The request has its blocks: note what is to be read into which of them."""
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_prefill"):
            return
        params["do_remote_prefill"] = False  # after a preemption it is computed here
        remote, first = params["remote_block_ids"], len(params["remote_block_ids"])
        if num_external_tokens:
            first = (params["remote_num_tokens"] - num_external_tokens) // self.block_size
            full = params["remote_num_tokens"] // self.block_size  # the peer may have less than this prompt
            self.in_flight[request.request_id] = set(request.block_hashes[first:full])
        self.reads.append(Read(request.request_id, params, block_ids[first : len(remote)], remote[first:]))

    def build_connector_meta(self) -> list[Read]:
        """What the worker is to read from now on."""
        reads, self.reads = self.reads, []
        return reads

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Whether its blocks must be held although it has ended, and what whoever reads them has to know."""
        params = request.kv_transfer_params or {}
        if params.get("do_remote_prefill"):  # it ends before anything was read: nobody will
            self.reads.append(Read(request.request_id, params))
        if not params.get("do_remote_decode") or request.status.finish_reason not in ("stop", "length"):
            return False, None
        self.pinned[request.request_id] = self.clock() + self.lease
        num_blocks = -(-request.num_computed_tokens // self.block_size)
        told = {"remote_request_id": request.request_id, "remote_num_tokens": request.num_computed_tokens}
        return True, {"do_remote_prefill": True, "remote_block_ids": block_ids[:num_blocks], **told, **self.address}

    def update_connector_output(self, finished_sending: Iterable[str], finished_recving: Iterable[str]) -> None:
        """The worker has moved the blocks of these requests."""
        for name in finished_sending:
            self.pinned.pop(name, None)
        for name in finished_recving:
            self.in_flight.pop(name, None)

    def expired(self) -> list[str]:
        """Requests whose blocks nobody has read in time. Each is named once."""
        late = [name for name, until in self.pinned.items() if until <= self.clock()]
        self.update_connector_output(late, ())
        return late


# endregion

# %% 3. Blocks on the move: gather them, send them, scatter them

PIECE = 1 << 16


# region: kernels
@triton.jit
def gather_block_kernel(staging, cache, block_id, numbers, BLOCK: tl.constexpr):
    """One block of one tensor: cache [blocks, numbers] -> staging [numbers]. Grid: (ceil(numbers / BLOCK),)."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    source = cache + tl.cast(block_id, tl.int64) * numbers + place
    tl.store(staging + place, tl.load(source, mask=place < numbers), mask=place < numbers)


@triton.jit
def gather_kernel(staging, cache, block_ids, num_blocks, numbers, BLOCK: tl.constexpr):
    """Many blocks of all layers in one launch. Grid: (blocks wanted, tensors, ceil(numbers / BLOCK)).

    staging [blocks wanted, tensors, numbers]; cache [tensors, num_blocks, numbers]; block_ids int32 [blocks wanted].
    Reads and writes each number that moves once, and 4 bytes of block_ids a program.
    """
    wanted, tensor = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    block = tl.load(block_ids + wanted).to(tl.int64)
    source = cache + (tensor * num_blocks + block) * numbers + place
    target = staging + (wanted * tl.num_programs(1) + tensor) * numbers + place
    tl.store(target, tl.load(source, mask=place < numbers), mask=place < numbers)


@triton.jit
def scatter_kernel(cache, staging, block_ids, num_blocks, numbers, BLOCK: tl.constexpr):
    """The way back, with the same grid. Where block_ids has -1, nothing is read or written."""
    wanted, tensor = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    block = tl.load(block_ids + wanted).to(tl.int64)
    if block >= 0:
        source = staging + (wanted * tl.num_programs(1) + tensor) * numbers + place
        target = cache + (tensor * num_blocks + block) * numbers + place
        tl.store(target, tl.load(source, mask=place < numbers), mask=place < numbers)


# endregion


def launch(kernel: Any, cache: Tensor, staging: Tensor, block_ids: Tensor, block: int = 1024) -> Tensor:
    """Gather or scatter: cache [tensors, blocks, ...], staging [blocks wanted, tensors, ...]; returns the target."""
    numbers, ends = cache[0, 0].numel(), (staging, cache) if kernel is gather_kernel else (cache, staging)
    if len(block_ids):
        grid = len(block_ids), len(cache), triton.cdiv(numbers, block)
        kernel[grid](*ends, block_ids, cache.shape[1], numbers, BLOCK=block)
    return ends[0]


def gather(cache: Tensor, block_ids: list[int]) -> Tensor:
    """Blocks that lie anywhere, in one piece: [blocks wanted, tensors, block_size, kv_heads, head_dim]."""
    if not cache.is_cuda:
        return cache[:, block_ids].transpose(0, 1).contiguous()
    staging = cache.new_empty(len(block_ids), len(cache), *cache.shape[2:])
    return launch(gather_kernel, cache, staging, torch.tensor(block_ids, dtype=torch.int32, device=cache.device))


def scatter(cache: Tensor, staging: Tensor, block_ids: list[int]) -> None:
    """What `gather` made, into these blocks of another cache."""
    if not cache.is_cuda:
        cache[:, block_ids] = staging.transpose(0, 1)
        return
    launch(scatter_kernel, cache, staging, torch.tensor(block_ids, dtype=torch.int32, device=cache.device))


# region: worker
class Sender(Worker):
    """The prefiller's worker: hands out blocks to whoever asks, and hears when they have arrived."""

    def __init__(self, cache: Tensor, bytes_per_second: float = math.inf) -> None:
        super().__init__()
        self.cache, self.bytes_per_second, self.listening = cache, bytes_per_second, Listening(self.serve)
        self.address = {"remote_host": self.listening.host, "remote_port": self.listening.port}

    def serve(self, connection: socket.socket) -> None:
        """One line that says what is wanted, the blocks, and a line when they are there."""
        with connection.makefile("rb") as incoming:
            asked = json.loads(incoming.readline())
            if asked["block_ids"]:
                data = gather(self.cache, asked["block_ids"]).cpu().flatten().view(torch.uint8).numpy().data
                connection.sendall(len(data).to_bytes(8, "big"))
                for start in range(0, len(data), PIECE):
                    time.sleep(PIECE / self.bytes_per_second)
                    connection.sendall(data[start : start + PIECE])
            if incoming.readline() == b"done\n":
                self.sent.put(asked["request_id"])


class Receiver(Worker):
    """The decoder's worker: reads in threads, while the engine goes on."""

    def __init__(self, cache: Tensor) -> None:
        super().__init__()
        self.cache, self.num_bytes = cache, 0

    def start_load(self, reads: list[Read]) -> None:
        """Begin to read, and return at once."""
        for one in reads:
            threading.Thread(target=self.read, args=(one,), daemon=True).start()

    def read(self, one: Read) -> None:
        """Ask for the blocks, and say when they are here."""
        try:
            place = one.params["remote_host"], one.params["remote_port"]
            with socket.create_connection(place) as connection, connection.makefile("rb") as incoming:
                asked = {"request_id": one.params["remote_request_id"], "block_ids": one.remote_block_ids}
                connection.sendall(json.dumps(asked).encode() + b"\n")
                if one.block_ids:
                    self.receive(incoming, one.block_ids)
                connection.sendall(b"done\n")
            self.received.put(one.request_id)
        except OSError:
            self.failed.put(one.request_id)

    def receive(self, incoming: Any, block_ids: list[int]) -> None:
        """All or nothing: what does not arrive in full length is not written into the cache."""
        data = bytearray(incoming.read(int.from_bytes(incoming.read(8), "big")))
        if len(data) != self.cache[:, block_ids].nbytes:
            raise ConnectionError("the blocks did not arrive whole")
        shape = len(block_ids), len(self.cache), *self.cache.shape[2:]
        scatter(self.cache, torch.frombuffer(data, dtype=self.cache.dtype).view(shape).to(self.cache.device), block_ids)
        self.num_bytes += len(data)


# endregion


# %% 4. An engine with one state more


# region: engine
class Engine:
    """Lesson 04's loop for a few requests, prompts in one piece, and with WAITING_FOR_REMOTE_KVS."""

    def __init__(self, model: PagedModel, connector: ConnectorScheduler, worker: Worker) -> None:
        self.model, self.connector, self.worker = model, connector, worker
        self.blocks = BlockTables(model.num_blocks, model.block_size)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.params: dict[str, dict[str, Any] | None] = {}

    def add(self, name: str, token_ids: list[int], max_tokens: int, params: dict[str, Any] | None = None) -> Request:
        """A new request waits."""
        request = Request(name, token_ids, max_tokens=max_tokens, kv_transfer_params=params)
        request.enable_block_hashes(self.model.block_size)
        self.waiting.append(request)
        return request

    def step(self) -> None:
        """Take in what has moved, admit, begin to read, and compute a token for everybody who runs."""
        self.take_in(*self.worker.get_finished())
        for request in [one for one in self.waiting if one.status is RequestStatus.WAITING]:
            self.admit(request)
        self.worker.start_load(self.connector.build_connector_meta())
        for request in list(self.running):
            self.compute(request)

    def admit(self, request: Request) -> None:
        """Give a waiting request its blocks. It then runs, or waits for what is on its way into them."""
        hits = self.blocks.find(request)
        num_local = len(hits) * self.model.block_size
        num_external, is_async = self.connector.get_num_new_matched_tokens(request, num_local)
        if num_external is None or not self.blocks.allocate(request, hits):
            return  # the next step asks again
        self.connector.update_state_after_alloc(request, self.blocks.ids(request), num_external)
        request.num_cached_tokens, request.num_computed_tokens = num_local, num_local + num_external
        if is_async:
            request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        else:
            self.start(request)

    def start(self, request: Request) -> None:
        """From `waiting` to `running`. The last known token is computed in any case: what follows it is needed."""
        request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        request.status = RequestStatus.RUNNING
        self.waiting.remove(request)
        self.running.append(request)

    def take_in(self, sent: set[str], received: set[str], failed: set[str]) -> None:
        """What has been sent is freed; what has been received is published; what has failed is computed here."""
        arrived, alive = received | failed, {one.request_id for one in (*self.waiting, *self.running)}
        self.connector.update_connector_output(sent, arrived)
        for name in [*sent, *(arrived - alive), *self.connector.expired()]:
            self.blocks.free(name)
        for request in [one for one in self.waiting if one.request_id in arrived]:
            if request.request_id in failed:
                request.num_computed_tokens = request.num_cached_tokens
            self.blocks.publish(request)
            self.start(request)

    def compute(self, request: Request) -> None:
        """All tokens that are known and not computed, and the token after them."""
        new, start = request.all_token_ids[request.num_computed_tokens :], request.num_computed_tokens
        logits = self.model.forward(new, start, self.blocks.ids(request))
        request.num_computed_tokens = request.num_tokens
        self.blocks.publish(request)
        request.append_output_token_id(int(logits.argmax()))
        if request.num_output_tokens == request.max_tokens:
            self.finish(request, RequestStatus.FINISHED_LENGTH_CAPPED)

    def finish(self, request: Request, status: RequestStatus) -> None:
        """It ends. Its blocks stay if somebody is going to read them, or is still writing into them."""
        is_loading, request.status = request.status is RequestStatus.WAITING_FOR_REMOTE_KVS, status
        (self.running if request in self.running else self.waiting).remove(request)
        is_held, self.params[request.request_id] = self.connector.request_finished(request, self.blocks.ids(request))
        if not (is_held or is_loading):
            self.blocks.free(request.request_id)


# endregion


def through_both(prefiller: Engine, decoder: Engine, name: str, token_ids: list[int], max_tokens: int) -> Request:
    """The proxy: the prompt to one engine, for one token; then the same prompt, and what it has told, to the other."""
    until_finished(prefiller, prefiller.add(name, token_ids, 1, {"do_remote_decode": True}))
    return until_finished(decoder, decoder.add(name, token_ids, max_tokens, prefiller.params[name]))


# %% 5. What the way costs, and how many of each


# region: formulas
def added_seconds(prefill: float, transfer: float, layers: int) -> float:
    """What the transfer adds to a first token, if each layer is sent as soon as it is computed; all in seconds.

    One layer is computed, then the slower of the two sets the pace, and the last layer is sent.
    """
    return prefill / layers + (layers - 1) * max(prefill, transfer) / layers + transfer / layers - prefill


def goodput_per_gpu(prefill_rate: float, decode_rate: float, prefillers: int, decoders: int) -> float:
    """Requests a second that both pools bear, for each GPU; rates are those of one GPU of a pool."""
    return min(prefillers * prefill_rate, decoders * decode_rate) / (prefillers + decoders)


# endregion

# %% The talk, in order


def two_engines(arguments: Namespace, lease: float = 30.0, bytes_per_second: float = math.inf) -> tuple[Engine, Engine]:
    """A prefiller and a decoder of the same model, each with blocks of its own."""
    here, there = report.paged_model(arguments), report.paged_model(arguments)
    sender, receiver = Sender(here.cache, bytes_per_second), Receiver(there.cache)
    connectors = [ConnectorScheduler(here.block_size, address, lease) for address in (sender.address, {})]
    return Engine(here, connectors[0], sender), Engine(there, connectors[1], receiver)


def main(arguments: Namespace) -> None:
    """Run the lesson from top to bottom."""
    device, control = begin("Lesson 08. Prefill/decode disaggregation", arguments), Control()
    report.load(arguments, device)
    make = partial(two_engines, arguments)
    heading("1. A long prompt among running chats")
    with control.watch():
        found: dict = {"interference": report.measure_interference(arguments)}
        found["servers"] = report.measure_two_servers(arguments)
    heading("2. The prompt here, the answer there")
    found["tokens"] = report.compare_tokens(make, through_both, arguments)
    heading("3. The kernel")
    found["kernel"] = prove(partial(report.verify_kernels, launch, gather_kernel, scatter_kernel), device)
    heading("4. Which links hide the transfer")
    found["links"] = report.show_links(added_seconds)
    heading("5. How many of each")
    found["ratio"] = report.show_ratios(goodput_per_gpu, arguments)
    heading("6. Break it")
    with control.watch():
        found["slow"] = report.measure_slow_links(make, through_both, arguments)
    found["dies"] = report.break_peers(make, through_both, arguments)
    report.close(found, control.disturbance())
    keep(__file__, found, arguments, report.draw, disturbance=control.record())


parser = partial(report.parser, __doc__)

if __name__ == "__main__":
    run(main, parser())
