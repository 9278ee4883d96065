"""Lesson 08. Prefill/decode disaggregation: when do two pools of machines beat one?

Measures what a long prompt does to all other answers. Then builds what moves it elsewhere: a connector that knows which
tokens come from another engine, blocks that are held until they are read, a sender, a receiver, and the kernel that
gathers scattered blocks. You learn which links hide the transfer, and how many prefillers a decoder needs.

    uv run python vllm/08_disaggregation.py                      # under a minute on a laptop, no GPU needed
    uv run python vllm/08_disaggregation.py --prompt 1000 --quick
"""

import json
import socket
import time
from argparse import Namespace
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minivllm.core.request import Request, RequestStatus
from minivllm.platforms.triton_utils import tl, triton
from minivllm_lab import cli, lesson
from minivllm_lab.block_tables import Memory
from minivllm_lab.disaggregation import engines, interference, report
from minivllm_lab.disaggregation.transfer_worker import Listening, Read, Worker, as_blocks, send_data, until_finished
from minivllm_lab.disturbance import Control
from minivllm_lab.paged_model import PagedModel
from minivllm_lab.proof import prove

# %% 1. The pain needs no code of ours: the engine's own steps, running chats, and a long prompt that arrives
# %% 2. The idea: one engine computes the prompt, another the answer. Which tokens come from where?


# region: connector
class ConnectorScheduler:
    """The scheduler's side of a connector: it decides which blocks move, and moves none itself."""

    def __init__(self, block_size: int, address: dict[str, Any], lease: float = 30.0, clock=time.monotonic) -> None:
        self.block_size, self.address, self.lease, self.clock = block_size, address, lease, clock
        self.reads: list[Read] = []
        self.in_flight: dict[str, set[bytes]] = {}
        self.held: dict[str, float] = {}

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many further tokens a peer has (None: ask later), and whether they load asynchronously."""
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_prefill"):
            return 0, False
        missing = request.block_hashes[num_computed_tokens // self.block_size :]
        if missing and any(missing[0] in hashes for hashes in self.in_flight.values()):
            return None, False  # another request has it on its way
        num_tokens = params["remote_num_tokens"] - num_computed_tokens
        return max(num_tokens, 0), num_tokens > 0

    def update_state_after_alloc(self, request: Request, block_ids: list[int], num_external_tokens: int) -> None:
        """Note what to read into which blocks, now that the request has them."""
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
        """Return the reads that the worker is to begin."""
        reads, self.reads = self.reads, []
        return reads

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Return whether to hold an ended request's blocks, and what their reader has to know."""
        params = request.kv_transfer_params or {}
        if params.get("do_remote_prefill"):  # it ends before anything was read: nothing will be
            self.reads.append(Read(request.request_id, params))
        if not params.get("do_remote_decode") or request.status.finish_reason not in ("stop", "length"):
            return False, None
        self.held[request.request_id] = self.clock() + self.lease
        num_blocks = -(-request.num_computed_tokens // self.block_size)
        source = {"remote_request_id": request.request_id, "remote_num_tokens": request.num_computed_tokens}
        return True, {"do_remote_prefill": True, "remote_block_ids": block_ids[:num_blocks], **source, **self.address}

    def update_connector_output(self, finished_sending: Iterable[str], finished_recving: Iterable[str]) -> None:
        """Forget the requests whose blocks the worker has moved."""
        for name in finished_sending:
            self.held.pop(name, None)
        for name in finished_recving:
            self.in_flight.pop(name, None)

    def expired(self) -> list[str]:
        """Return, once each, the requests whose blocks were not read in time."""
        late = [name for name, until in self.held.items() if until <= self.clock()]
        self.update_connector_output(late, ())
        return late


# endregion

# %% 3. Blocks on the move: gather them, send them, scatter them


# region: kernels
@triton.jit
def gather_block_kernel(staging, cache, block_id, numbers, BLOCK: tl.constexpr):
    """Copy a block of one tensor: cache [blocks, numbers] -> staging [numbers]. Grid: (ceil(numbers / BLOCK),)."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    source = cache + tl.cast(block_id, tl.int64) * numbers + place
    tl.store(staging + place, tl.load(source, mask=place < numbers), mask=place < numbers)


@triton.jit
def gather_kernel(staging, cache, block_ids, num_blocks, numbers, BLOCK: tl.constexpr):
    """Copy blocks of all layers in one launch. Grid: (blocks moved, tensors, ceil(numbers / BLOCK)).

    staging [blocks moved, tensors, numbers]; cache [tensors, num_blocks, numbers]; block_ids int32 [blocks moved].
    Reads and writes each number that moves once, and 4 bytes of block_ids a program.
    """
    index, tensor = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    block = tl.load(block_ids + index).to(tl.int64)
    source = cache + (tensor * num_blocks + block) * numbers + place
    target = staging + (index * tl.num_programs(1) + tensor) * numbers + place
    tl.store(target, tl.load(source, mask=place < numbers), mask=place < numbers)


@triton.jit
def scatter_kernel(cache, staging, block_ids, num_blocks, numbers, BLOCK: tl.constexpr):
    """Copy staging back to the cache, with the same grid. Where block_ids has -1, nothing is read or written."""
    index, tensor = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    block = tl.load(block_ids + index).to(tl.int64)
    if block >= 0:
        source = staging + (index * tl.num_programs(1) + tensor) * numbers + place
        target = cache + (tensor * num_blocks + block) * numbers + place
        tl.store(target, tl.load(source, mask=place < numbers), mask=place < numbers)


# endregion


def launch(kernel: Any, cache: Tensor, staging: Tensor, block_ids: Any, block: int = 1024) -> Tensor:
    """Gather or scatter: cache [tensors, blocks, ...], staging [blocks moved, tensors, ...]; return the target."""
    numbers, ends = cache[0, 0].numel(), (staging, cache) if kernel is gather_kernel else (cache, staging)
    if len(block_ids):
        grid = len(block_ids), len(cache), triton.cdiv(numbers, block)
        ids = torch.as_tensor(block_ids, dtype=torch.int32, device=cache.device)
        kernel[grid](*ends, ids, cache.shape[1], numbers, BLOCK=block)
    return ends[0]


def gather(cache: Tensor, block_ids: list[int]) -> Tensor:
    """Copy scattered blocks into one piece: [blocks moved, tensors, block_size, kv_heads, head_dim]."""
    if not cache.is_cuda:
        return cache[:, block_ids].transpose(0, 1).contiguous()
    return launch(gather_kernel, cache, cache.new_empty(len(block_ids), len(cache), *cache.shape[2:]), block_ids)


def scatter(cache: Tensor, staging: Tensor, block_ids: list[int]) -> None:
    """Copy what `gather` returned into these blocks of another cache."""
    if cache.is_cuda:
        launch(scatter_kernel, cache, staging, block_ids)
    else:
        cache[:, block_ids] = staging.transpose(0, 1)


class Sender(Worker):
    """The prefiller's worker: sends blocks to a peer that asks, and learns when they have arrived."""

    def __init__(self, cache: Tensor) -> None:
        super().__init__()
        self.cache, self.listening = cache, Listening(self.serve)

    def serve(self, connection: socket.socket) -> None:
        """Read a line that asks for blocks, send them, and read a line that confirms them."""
        with connection.makefile("rb") as incoming:
            body = json.loads(incoming.readline())
            if body["block_ids"]:
                send_data(connection, gather(self.cache, body["block_ids"]))
            if incoming.readline() == b"done\n":
                self.sent.put(body["request_id"])


class Receiver(Worker):
    """The decoder's worker: reads in threads while the engine goes on."""

    def __init__(self, cache: Tensor) -> None:
        super().__init__()
        self.cache, self.num_bytes = cache, 0

    def read(self, read: Read) -> None:
        """Ask for the blocks, write them into the cache if all of them arrive, and confirm them."""
        try:
            host, port = read.params["remote_host"], read.params["remote_port"]
            with socket.create_connection((host, port)) as connection, connection.makefile("rb") as incoming:
                body = {"request_id": read.params["remote_request_id"], "block_ids": read.remote_block_ids}
                connection.sendall(json.dumps(body).encode() + b"\n")
                if read.block_ids:
                    data = bytearray(incoming.read(int.from_bytes(incoming.read(8), "big")))
                    scatter(self.cache, as_blocks(data, self.cache, read.block_ids), read.block_ids)
                    self.num_bytes += len(data)
                connection.sendall(b"done\n")
            self.received.put(read.request_id)
        except OSError:
            self.failed.put(read.request_id)


# %% 4. An engine with one more state


class Engine:
    """Lesson 04's loop for a few requests and whole prompts, with the state WAITING_FOR_REMOTE_KVS."""

    def __init__(self, model: PagedModel, connector: ConnectorScheduler, worker: Worker) -> None:
        self.model, self.connector, self.worker = model, connector, worker
        self.blocks = Memory(model.num_blocks, model.block_size)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.params: dict[str, dict[str, Any] | None] = {}

    def add(self, name: str, token_ids: list[int], max_tokens: int, params: dict[str, Any] | None = None) -> Request:
        """Enqueue a request."""
        request = Request(name, token_ids, max_tokens=max_tokens, kv_transfer_params=params)
        request.enable_block_hashes(self.model.block_size)
        self.waiting.append(request)
        return request

    def step(self) -> None:
        """Process finished transfers, admit requests, start reads, and compute a token for each running request."""
        self.take_in(*self.worker.get_finished())
        for request in [each for each in self.waiting if each.status is RequestStatus.WAITING]:
            self.admit(request)
        self.worker.start_load(self.connector.build_connector_meta())
        for request in list(self.running):
            self.compute(request)

    def admit(self, request: Request) -> None:
        """Give a waiting request its blocks. It then runs, or waits for what is being loaded into them."""
        hits = self.blocks.find(request)
        num_local = len(hits) * self.model.block_size
        num_external, is_async = self.connector.get_num_new_matched_tokens(request, num_local)
        all_others = request.num_tokens + request.max_tokens - 1 - num_local
        if num_external is None or not self.blocks.allocate(request, all_others, hits):
            return  # the next step asks again
        self.connector.update_state_after_alloc(request, self.blocks.ids(request), num_external)
        request.num_cached_tokens, request.num_computed_tokens = num_local, num_local + num_external
        if is_async:
            request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        else:
            self.start(request)

    def start(self, request: Request) -> None:
        """Move a request to `running`. Its last known token is always computed: that yields the next one."""
        request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        request.status = RequestStatus.RUNNING
        self.waiting.remove(request)
        self.running.append(request)

    def take_in(self, sent: set[str], received: set[str], failed: set[str]) -> None:
        """Free what has been sent, publish what has been received, and compute here what has failed."""
        arrived, alive = received | failed, {each.request_id for each in (*self.waiting, *self.running)}
        self.connector.update_connector_output(sent, arrived)
        for name in [*sent, *(arrived - alive), *self.connector.expired()]:
            self.blocks.free(name)
        for request in [each for each in self.waiting if each.request_id in arrived]:
            if request.request_id in failed:
                request.num_computed_tokens = request.num_cached_tokens
            self.blocks.publish(request)
            self.start(request)

    def compute(self, request: Request) -> None:
        """Compute all known tokens that are not computed yet, and sample the next one."""
        new, start = request.all_token_ids[request.num_computed_tokens :], request.num_computed_tokens
        logits = self.model.forward(new, start, self.blocks.ids(request))
        request.num_computed_tokens = request.num_tokens
        self.blocks.publish(request)
        request.append_output_token_id(int(logits.argmax()))
        if request.num_output_tokens == request.max_tokens:
            self.finish(request, RequestStatus.FINISHED_LENGTH_CAPPED)

    def finish(self, request: Request, status: RequestStatus) -> None:
        """End a request. Its blocks stay while a peer may read them, or a transfer still writes into them."""
        is_loading, request.status = request.status is RequestStatus.WAITING_FOR_REMOTE_KVS, status
        (self.running if request in self.running else self.waiting).remove(request)
        is_held, self.params[request.request_id] = self.connector.request_finished(request, self.blocks.ids(request))
        if not (is_held or is_loading):
            self.blocks.free(request.request_id)


def through_both(prefiller: Engine, decoder: Engine, name: str, token_ids: list[int], max_tokens: int) -> Request:
    """Do a proxy's work: send the prompt to one engine for one token, then with its answer to the other."""
    until_finished(prefiller, prefiller.add(name, token_ids, 1, {"do_remote_decode": True}))
    return until_finished(decoder, decoder.add(name, token_ids, max_tokens, prefiller.params[name]))


# %% 5. What the transfer costs, and how many of each


def added_seconds(prefill: float, transfer: float, layers: int) -> float:
    """Return the seconds that a transfer adds to a first token if each layer is sent as soon as it is computed.

    One layer is computed, then the slower of computing and sending sets the pace, and the last layer is sent.
    """
    return prefill / layers + (layers - 1) * max(prefill, transfer) / layers + transfer / layers - prefill


def goodput_per_gpu(prefill_rate: float, decode_rate: float, prefillers: int, decoders: int) -> float:
    """Return the requests a second per GPU that both pools sustain, from the rates of one GPU of each."""
    return min(prefillers * prefill_rate, decoders * decode_rate) / (prefillers + decoders)


# %% The talk, in order


def two_engines(arguments: Namespace, lease: float = 30.0) -> tuple[Engine, Engine]:
    """Make a prefiller and a decoder of the same model, each with blocks of its own."""
    here, there = engines.paged_model(arguments), engines.paged_model(arguments)
    sender, receiver = Sender(here.cache), Receiver(there.cache)
    connectors = [ConnectorScheduler(here.block_size, address, lease) for address in (sender.listening.address, {})]
    return Engine(here, connectors[0], sender), Engine(there, connectors[1], receiver)


def main(arguments: Namespace) -> None:
    """Run the lesson from top to bottom."""
    device, control = lesson.begin("Lesson 08. Prefill/decode disaggregation", arguments), Control()
    make, found = partial(two_engines, arguments), {}
    with control.watch():
        found["interference"] = interference.measure_interference(arguments)
        found["servers"] = interference.measure_two_servers(arguments)
    found["tokens"] = engines.compare_tokens(make, through_both, arguments)
    found["kernel"] = prove(partial(engines.verify_kernels, launch, gather_kernel, scatter_kernel), device)
    found["links"] = report.show_links(added_seconds)
    found["ratio"] = report.show_ratios(goodput_per_gpu, arguments)
    found["dies"] = engines.break_peers(make, arguments)
    report.close(found, arguments, control.disturbance())
    lesson.keep(__file__, found, arguments, report.draw, disturbance=control.record())


parser = partial(report.parser, __doc__)

if __name__ == "__main__":
    cli.run(main, parser())
