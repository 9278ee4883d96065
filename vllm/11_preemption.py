"""Lesson 11. Preemption: what happens when memory runs out in the middle of an answer?

Lets answers grow until the pool is full, then takes one request's blocks away: to recompute them later, as vLLM does
now, or to swap them to host memory, as vLLM V0 could. The tokens are the same either way. Measures what each costs, in
tokens computed twice and in seconds. You learn to tell when a pool is too small, and which of the two is cheaper.

    uv run python vllm/11_preemption.py                      # under a minute on a laptop, no GPU needed
"""

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from minivllm.core.request import Request, RequestStatus
from minivllm.core.request_queue import RequestQueue, create_request_queue
from minivllm.platforms.triton_utils import tl, triton
from minivllm_lab.block_tables import Memory  # lesson 02's pool, with block tables that grow
from minivllm_lab.cli import run
from minivllm_lab.disturbance import Control
from minivllm_lab.lesson import begin, keep
from minivllm_lab.paged_model import PagedModel
from minivllm_lab.preemption import pools, prices, report
from minivllm_lab.proof import prove
from minivllm_lab.tables import heading

# %% 1 and 2. Answers grow until no block is free: one request gives up its blocks, keeps its tokens, recomputes them


# region: preempt
def victim(running: Sequence[Request], policy: str) -> Request:
    """Pick the request to preempt: the last one admitted, or by priority the least urgent, latest one."""
    if policy == "fcfs":
        return running[-1]
    return max(running, key=lambda request: (request.priority, request.arrival_time))


def preempt(request: Request, waiting: RequestQueue, memory: Memory) -> None:
    """Take a request's blocks away, keep its tokens, and put it before all requests that have not run."""
    memory.free(request.request_id)
    request.status = RequestStatus.PREEMPTED
    request.num_computed_tokens = 0
    request.spec_token_ids = []
    request.num_preemptions += 1
    waiting.prepend_requests([request])


# endregion


# region: schedule_running
def schedule_running(
    running: list[Request],
    waiting: RequestQueue,
    memory: Memory,
    token_budget: int,
    policy: str = "fcfs",
    preempt_request: Callable[[Request, RequestQueue, Memory], None] = preempt,
) -> tuple[dict[str, int], list[Request]]:
    """Schedule the running requests in order of admission; return their tokens, and the preempted requests."""
    scheduled: dict[str, int] = {}
    preempted: list[Request] = []
    position = 0
    while position < len(running) and token_budget > 0:
        request = running[position]
        num_tokens = min(memory.wanted(request), token_budget)
        if num_tokens == 0:
            position += 1
            continue
        while not memory.allocate(request, num_tokens):
            chosen = victim(running, policy)
            if running.index(chosen) < position:
                position -= 1  # the requests behind the victim move up
            running.remove(chosen)
            token_budget += scheduled.pop(chosen.request_id, 0)
            preempt_request(chosen, waiting, memory)
            preempted.append(chosen)
            if chosen is request:
                break
        else:
            scheduled[request.request_id] = num_tokens
            token_budget -= num_tokens
            position += 1
    return scheduled, preempted


# endregion


# region: resume
def resume_at(num_tokens: int, num_hit_blocks: int, block_size: int) -> int:
    """Return the first token to compute: the one after the cached blocks, but at the latest the last one."""
    return min(num_hit_blocks, (num_tokens - 1) // block_size) * block_size


def schedule_waiting(
    running: list[Request], waiting: RequestQueue, memory: Memory, token_budget: int
) -> dict[str, int]:
    """Admit requests from the head of the queue as long as all their tokens fit, generated ones included."""
    scheduled: dict[str, int] = {}
    while waiting and token_budget > 0:
        request = waiting.peek_request()
        hits = memory.find(request)
        start = resume_at(request.num_tokens, len(hits), memory.block_size)
        missing = request.num_tokens - start
        num_tokens = min(missing, token_budget)
        if not memory.allocate(request, num_tokens, hits[: start // memory.block_size], must_fit=missing):
            break
        request.num_computed_tokens = start
        request.status = RequestStatus.RUNNING
        running.append(waiting.pop_request())
        scheduled[request.request_id] = num_tokens
        token_budget -= num_tokens
    return scheduled


# endregion


class Engine:
    """Lesson 04's loop, in a pool that runs out. `computed` counts computed tokens, recomputed ones included."""

    def __init__(self, model: PagedModel, policy: str = "fcfs", token_budget: int = 64) -> None:
        self.model, self.policy, self.token_budget = model, policy, token_budget
        self.memory = Memory(model.num_blocks, model.block_size)
        self.waiting, self.running = create_request_queue(policy), list[Request]()
        self.parts = self.running, self.waiting, self.memory
        self.swapped: list[Request] = []
        self.computed = 0

    def schedule(self) -> tuple[dict[str, int], list[Request]]:
        """Schedule the next step; a step that preempts a request admits none."""
        scheduled, preempted = schedule_running(*self.parts, self.token_budget, self.policy)
        if not preempted:
            scheduled |= schedule_waiting(*self.parts, self.token_budget - sum(scheduled.values()))
        return scheduled, preempted

    def step(self) -> tuple[dict[str, int], list[str]]:
        """Schedule, compute and sample greedily; return the scheduled tokens and the ids of preempted requests."""
        scheduled, preempted = self.schedule()
        for request in [each for each in self.running if each.request_id in scheduled]:
            start = request.num_computed_tokens
            end = start + scheduled[request.request_id]
            logits = self.model.forward(request.all_token_ids[start:end], start, self.memory.ids(request))
            request.num_computed_tokens = end
            self.computed += end - start
            if request.block_hashes:
                self.memory.publish(request)
            if end == request.num_tokens:
                request.append_output_token_id(int(logits.argmax()))
                if request.num_output_tokens == request.max_tokens:
                    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
                    self.running.remove(request)
                    self.memory.free(request.request_id)
        return scheduled, [request.request_id for request in preempted]

    def steps(self) -> Iterator[tuple[dict[str, int], list[str]]]:
        """Run steps until all requests have finished."""
        while self.running or self.waiting or self.swapped:
            yield self.step()


def first_steps() -> tuple[list[list[str]], int]:
    """Solve the exercise on paper: in step 3, A takes the last block; B needs one too, and loses 4 computed tokens."""
    return [[], [], ["B"], [], [], [], []], 4


# %% 3. Before: V0's swap. The same loop, another way to give up blocks


class SwapSpace:
    """vLLM V0's `swap_space`, 2023 to 2025: host memory in slots, each for one block of all layers."""

    def __init__(self, cache: Tensor, num_slots: int, in_one_launch: bool = False) -> None:
        self.host = torch.zeros(num_slots, len(cache), *cache.shape[2:], dtype=cache.dtype, pin_memory=cache.is_cuda)
        self.cache, self.copy = cache, copy_gathered if in_one_launch else copy_pieces
        self.free, self.slots, self.num_copies = list(range(num_slots)), dict[str, list[int]](), 0

    def swap_out(self, name: str, block_ids: list[int]) -> None:
        """Copy blocks to free slots."""
        self.slots[name] = [self.free.pop() for _ in block_ids]
        self.num_copies += self.copy(self.cache, self.host, block_ids, self.slots[name], to_host=True)

    def swap_in(self, name: str, block_ids: list[int]) -> None:
        """Copy a request's slots back to the first of these blocks."""
        slots = self.slots.pop(name)
        self.num_copies += self.copy(self.cache, self.host, block_ids[: len(slots)], slots, to_host=False)
        self.free += slots


def copy_pieces(cache: Tensor, host: Tensor, block_ids: list[int], slots: list[int], to_host: bool) -> int:
    """Copy each block's keys and values layer by layer, as V0 did; return the number of copies."""
    for block, slot in zip(block_ids, slots, strict=True):
        for on_device, on_host in zip(cache[:, block], host[slot], strict=True):
            (on_host if to_host else on_device).copy_(on_device if to_host else on_host)
    return len(cache) * len(block_ids)


class SwappingEngine(Engine):
    """An engine whose preempted requests keep their computed tokens, and wait until their blocks fit again."""

    def __init__(self, model: PagedModel, space: SwapSpace) -> None:
        super().__init__(model)
        self.space = space

    def swap_out(self, request: Request, waiting: RequestQueue, memory: Memory) -> None:
        """Do what `preempt` does, without losing what was computed."""
        self.space.swap_out(request.request_id, memory.ids(request))
        memory.free(request.request_id)
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self.swapped.insert(0, request)

    def schedule(self) -> tuple[dict[str, int], list[Request]]:
        """Bring swapped requests back before any new one is admitted."""
        scheduled, preempted = schedule_running(*self.parts, self.token_budget, self.policy, self.swap_out)
        while self.swapped and not preempted and self.memory.allocate(self.swapped[0], 1):
            request = self.swapped.pop(0)
            self.space.swap_in(request.request_id, self.memory.ids(request))
            request.status = RequestStatus.RUNNING
            scheduled[request.request_id] = 1
            self.running.append(request)
        if not preempted and not self.swapped:
            scheduled |= schedule_waiting(*self.parts, self.token_budget - sum(scheduled.values()))
        return scheduled, preempted


# %% 4. The kernel: gather scattered blocks of all layers into one piece, or scatter them back, in one launch


# region: kernel
@triton.jit
def block_of(addresses, tensor, block, words):
    """Point to a block in one tensor of the cache: `addresses` int64 [tensors], `words` of 4 bytes a block."""
    return tl.load(addresses + tensor).to(tl.pointer_type(tl.int32)) + block.to(tl.int64) * words


@triton.jit
def record_of(staging, slot, tensor, num_tensors, words):
    """Point to that block's piece in the staging buffer, which is ordered by slot and, within it, by tensor."""
    return staging + (slot.to(tl.int64) * num_tensors + tensor) * words


@triton.jit
def swap_kernel(addresses, blocks, slots, staging, words, TO_STAGING: tl.constexpr, BLOCK: tl.constexpr):
    """Copy blocks of all layers to slots of the staging buffer, or back. Grid: (moves, tensors, ceil(words / BLOCK)).

    addresses int64 [tensors], of tensors [num_blocks, words] of 4-byte words; blocks, slots int32 [moves], where block
    -1 moves nothing; staging int32 [slots, tensors, words]. Each word that moves is read once and written once:
    8 * moves * tensors * words bytes, and 12 or 16 for a program's ids and address.
    """
    move, tensor = tl.program_id(0), tl.program_id(1)
    place = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    block = tl.load(blocks + move)
    if block >= 0:
        here = block_of(addresses, tensor, block, words) + place
        there = record_of(staging, tl.load(slots + move), tensor, tl.num_programs(1), words) + place
        if TO_STAGING:
            tl.store(there, tl.load(here, mask=place < words), mask=place < words)
        else:
            tl.store(here, tl.load(there, mask=place < words), mask=place < words)


# endregion


def launch(tensors: Sequence[Tensor], blocks: Tensor, slots: Tensor, staging: Tensor, to_staging: bool) -> Tensor:
    """Run the kernel on the layers' tensors, each [num_blocks, ...]; return staging, int32 [slots, tensors, words]."""
    words = tensors[0][0].numel() * tensors[0].element_size() // 4
    addresses = torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64, device=staging.device)
    size = min(4096, triton.next_power_of_2(words))
    grid = len(blocks), len(tensors), triton.cdiv(words, size)
    if len(blocks):
        swap_kernel[grid](addresses, blocks, slots, staging, words, TO_STAGING=to_staging, BLOCK=size)
    return staging


def copy_gathered(cache: Tensor, host: Tensor, block_ids: list[int], slots: list[int], to_host: bool) -> int:
    """Move all blocks through one staging buffer: one launch, one copy. On a CPU, torch's indexing gathers."""
    if not cache.is_cuda and to_host:
        host[slots] = cache[:, block_ids].transpose(0, 1)
    elif not cache.is_cuda:
        cache[:, block_ids] = host[slots].transpose(0, 1)
    else:
        staging = torch.empty_like(host[slots], device=cache.device) if to_host else host[slots].to(cache.device)
        ids = torch.tensor([block_ids, list(range(len(slots)))], dtype=torch.int32, device=cache.device)
        launch(list(cache), ids[0], ids[1], staging.view(torch.int32).view(len(slots), len(cache), -1), to_host)
        if to_host:
            host[slots] = staging.cpu()
    return 1


# %% 5. The cost of each way


# region: formulas
def recompute_seconds(num_tokens: float, parameters: float, flops: float) -> float:
    """Return the time to recompute tokens: two operations for each parameter and token, without attention."""
    return 2 * parameters * num_tokens / flops


def swap_seconds(num_tokens: float, bytes_per_token: float, bandwidth: float, directions: int = 2) -> float:
    """Return the time to copy keys and values out and back, or in one direction if the host has them already."""
    return directions * num_tokens * bytes_per_token / bandwidth


def break_even_bandwidth(bytes_per_token: float, parameters: float, flops: float, directions: int = 2) -> float:
    """Return the bytes a second above which copying is cheaper. The number of tokens cancels."""
    return directions * bytes_per_token * flops / (2 * parameters)


def effective_bandwidth(piece_bytes: float, bandwidth: float, seconds_per_copy: float) -> float:
    """Return the bytes a second of a series of copies, each of which takes some time before its first byte."""
    return piece_bytes / (seconds_per_copy + piece_bytes / bandwidth)


# endregion

# %% The talk, in order


def main(arguments: Namespace) -> None:
    """Run the lesson from top to bottom."""
    device, control = begin("Lesson 11. Preemption", arguments), Control()
    heading("1 and 2. Memory runs out, step by step")
    figures: dict = {"trace": report.show_trace(Engine, arguments)}
    heading("3. The same tokens, recomputed or swapped")
    figures["tokens"] = report.compare_tokens(Engine, SwappingEngine, SwapSpace, arguments)
    heading("4. The kernel")
    figures["kernel"] = prove(partial(report.verify_kernel, launch), device)
    heading("5. Recompute against swap")
    with control.watch():
        figures["crossover"] = prices.measure_crossover(SwapSpace, break_even_bandwidth, arguments)
    figures["gpus"] = prices.show_gpus(recompute_seconds, swap_seconds, break_even_bandwidth, effective_bandwidth)
    heading("6. Tokens computed twice")
    figures["waste"] = pools.show_waste(arguments)
    figures["cliff"] = pools.show_pools(arguments)
    heading("7. Break it")
    figures["broken"] = pools.break_it(arguments)
    report.close(figures, control.disturbance())
    keep(__file__, figures, arguments, report.draw, disturbance=control.record())


parser = partial(report.parser, __doc__)

if __name__ == "__main__":
    run(main, parser())
