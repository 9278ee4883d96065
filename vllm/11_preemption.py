"""Lesson 11. Preemption: what happens when memory runs out in the middle of an answer?

Lets more answers grow than a pool can hold. Then takes one request's blocks away, as vLLM does now (it is computed
again later), and as vLLM V0 could (its blocks are swapped to the host's memory): the same tokens either way. Then what
each costs: tokens that are computed twice by the size of the pool, and seconds for each token. You learn to tell when a
pool is too small, and which of the two ways is the cheaper one.

    uv run python vllm/11_preemption.py                      # under a minute on a laptop, no GPU needed
    uv run python vllm/11_preemption.py --blocks 12 --quick
"""

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minivllm.core.request import Request, RequestStatus
from minivllm.core.request_queue import RequestQueue, create_request_queue
from minivllm.errors import MinivllmError
from minivllm.platforms.triton_utils import tl, triton
from minivllm_lab.block_tables import Memory
from minivllm_lab.cli import run
from minivllm_lab.disturbance import Control
from minivllm_lab.lesson import begin, keep
from minivllm_lab.paged_model import PagedModel
from minivllm_lab.preemption import report
from minivllm_lab.proof import prove
from minivllm_lab.tables import heading

# %% 1. The pain: answers grow, and nobody knows how far


# `Memory` is lesson 02's pool with tables that grow: `wanted`, `allocate` and `free`, and `find` for old blocks

# %% 2. The idea: somebody gives everything back, keeps the tokens, and computes them again later


# region: victim
def victim(running: Sequence[Request], policy: str) -> Request:
    """Who loses its blocks: whoever was admitted last, or by priority the least urgent, and of those the latest."""
    if policy == "fcfs":
        return running[-1]
    return max(running, key=lambda request: (request.priority, request.arrival_time))


# endregion


# region: preempt
def preempt(request: Request, waiting: RequestQueue, memory: Memory) -> None:
    """By recompute. The request keeps its tokens, and nothing else; it waits before all who have not run."""
    memory.free(request.request_id)
    request.status = RequestStatus.PREEMPTED
    request.num_computed_tokens = 0
    request.spec_token_ids = []
    request.num_preemptions += 1
    waiting.prepend_requests([request])


# endregion

GiveUp = Callable[[Request, Any, Any], None]


# region: schedule_running
def schedule_running(
    running: list[Request],
    waiting: RequestQueue,
    memory: Memory,
    token_budget: int,
    policy: str = "fcfs",
    give_up: GiveUp = preempt,
) -> tuple[dict[str, int], list[Request]]:
    """Tokens of those that run, in the order of their admission, and who was preempted for them."""
    given: dict[str, int] = {}
    preempted: list[Request] = []
    position = 0
    while position < len(running) and token_budget > 0:
        request = running[position]
        num_tokens = min(memory.wanted(request), token_budget)
        if num_tokens == 0:
            position += 1
            continue
        while not memory.allocate(request, num_tokens):
            loser = victim(running, policy)
            if running.index(loser) < position:
                position -= 1
            running.remove(loser)
            token_budget += given.pop(loser.request_id, 0)
            give_up(loser, waiting, memory)
            preempted.append(loser)
            if loser is request:
                break
        else:
            given[request.request_id] = num_tokens
            token_budget -= num_tokens
            position += 1
    return given, preempted


# endregion


# region: resume
def resume_at(num_tokens: int, num_hit_blocks: int, block_size: int) -> int:
    """From which token on a request is computed: behind the blocks that were found, but its last one in any case."""
    return min(num_hit_blocks, (num_tokens - 1) // block_size) * block_size


def schedule_waiting(
    running: list[Request], waiting: RequestQueue, memory: Memory, token_budget: int, max_num_seqs: int
) -> dict[str, int]:
    """Admits from the head of the queue while all that a request knows fits, outputs from before among it."""
    given: dict[str, int] = {}
    while waiting and token_budget > 0 and len(running) < max_num_seqs:
        request = waiting.peek_request()
        hits = memory.find(request)
        start = resume_at(request.num_tokens, len(hits), memory.block_size)
        missing, hits = request.num_tokens - start, hits[: start // memory.block_size]
        if not memory.allocate(request, min(missing, token_budget), hits, must_fit=missing):
            break
        request.num_computed_tokens, request.status = start, RequestStatus.RUNNING
        running.append(waiting.pop_request())
        given[request.request_id] = min(missing, token_budget)
        token_budget -= given[request.request_id]
    return given


# endregion


class Engine:
    """Lesson 04's loop with blocks that run out. `computed` counts tokens, those that are computed again among them."""

    def __init__(self, model: PagedModel, policy: str = "fcfs", token_budget: int = 64, max_num_seqs: int = 8) -> None:
        self.model, self.policy, self.token_budget, self.max_num_seqs = model, policy, token_budget, max_num_seqs
        self.memory = Memory(model.num_blocks, model.block_size)
        self.waiting, self.running = create_request_queue(policy), list[Request]()
        self.swapped: list[Request] = []
        self.computed, self.caching = 0, False

    def add(self, request: Request) -> Request:
        """A request waits."""
        if self.caching:
            request.enable_block_hashes(self.model.block_size)
        self.waiting.add_request(request)
        return request

    def schedule(self) -> tuple[dict[str, int], list[Request]]:
        """Tokens of the next step, and who was preempted: a step that takes blocks away admits nobody."""
        parts = self.running, self.waiting, self.memory
        given, preempted = schedule_running(*parts, self.token_budget, self.policy)
        if not preempted:
            given |= schedule_waiting(*parts, self.token_budget - sum(given.values()), self.max_num_seqs)
        return given, preempted

    def step(self) -> tuple[dict[str, int], list[str]]:
        """Schedules, computes, samples greedily for all that have caught up: what was given, and who was preempted."""
        given, preempted = self.schedule()
        for request in [one for one in self.running if one.request_id in given]:
            start, end = request.num_computed_tokens, request.num_computed_tokens + given[request.request_id]
            logits = self.model.forward(request.all_token_ids[start:end], start, self.memory.ids(request))
            request.num_computed_tokens, self.computed = end, self.computed + end - start
            if self.caching:
                self.memory.publish(request)
            if end == request.num_tokens:
                request.append_output_token_id(int(logits.argmax()))
                if request.num_output_tokens == request.max_tokens:
                    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
                    self.running.remove(request)
                    self.memory.free(request.request_id)
        return given, [request.request_id for request in preempted]

    def steps(self) -> Iterator[tuple[dict[str, int], list[str]]]:
        """Steps until all have ended."""
        while self.running or self.waiting or self.swapped:
            yield self.step()


def first_steps() -> tuple[list[list[str]], int]:
    """The exercise on paper: in step 3, A takes the last block, and B, which needs one too, is the victim itself.

    B knows 5 tokens then, 4 of them computed. It comes back when A has ended.
    """
    return [[], [], ["B"], [], [], [], []], 4


# %% 3. Before: V0's swap. The same loop, another way to give up


# region: swap
class SwapSpace:
    """vLLM V0's `swap_space`, 2023 to 2025: memory of the host, in slots of one block of all layers."""

    def __init__(self, cache: Tensor, num_slots: int, in_one_launch: bool = False) -> None:
        self.host = torch.zeros(num_slots, len(cache), *cache.shape[2:], dtype=cache.dtype, pin_memory=cache.is_cuda)
        self.cache, self.in_one_launch = cache, in_one_launch
        self.free, self.slots, self.num_copies = list(range(num_slots)), dict[str, list[int]](), 0

    def swap_out(self, name: str, block_ids: list[int]) -> None:
        """Copies blocks to slots of their own."""
        if len(block_ids) > len(self.free):
            raise MinivllmError(f"{len(block_ids)} blocks to swap, and {len(self.free)} slots: V0 ended here")
        self.slots[name] = [self.free.pop() for _ in block_ids]
        self.move(block_ids, self.slots[name], to_host=True)

    def swap_in(self, name: str, block_ids: list[int]) -> None:
        """Copies them back, to blocks that may lie anywhere."""
        slots = self.slots.pop(name)
        self.move(block_ids, slots, to_host=False)
        self.free += slots

    def move(self, block_ids: list[int], slots: list[int], to_host: bool) -> None:
        """As V0: a copy for each block, in each layer, of keys and of values. Or gathered first, and one copy."""
        if self.in_one_launch:
            self.num_copies += swap_gathered(self.cache, self.host, block_ids, slots, to_host)
            return
        for block, slot in zip(block_ids, slots, strict=True):
            for tensor in range(len(self.cache)):
                here, there = self.cache[tensor, block], self.host[slot, tensor]
                (there if to_host else here).copy_(here if to_host else there)
                self.num_copies += 1


class SwappingEngine(Engine):
    """A preempted request keeps its computed tokens, and waits until as many blocks as it had are free."""

    def __init__(self, model: PagedModel, space: SwapSpace, **settings: Any) -> None:
        super().__init__(model, **settings)
        self.space = space

    def swap_out(self, request: Request, waiting: RequestQueue, memory: Memory) -> None:
        """Takes the place of `preempt`."""
        self.space.swap_out(request.request_id, memory.ids(request))
        memory.free(request.request_id)
        request.status, request.num_preemptions = RequestStatus.PREEMPTED, request.num_preemptions + 1
        self.swapped.insert(0, request)

    def schedule(self) -> tuple[dict[str, int], list[Request]]:
        """Who is swapped out comes back before anybody is admitted."""
        given, preempted = schedule_running(
            self.running, self.waiting, self.memory, self.token_budget, self.policy, self.swap_out
        )
        while self.swapped and not preempted and self.memory.allocate(self.swapped[0], 1):
            request = self.swapped.pop(0)
            num_blocks = len(self.space.slots[request.request_id])
            self.space.swap_in(request.request_id, self.memory.ids(request)[:num_blocks])
            request.status, given[request.request_id] = RequestStatus.RUNNING, 1
            self.running.append(request)
        if not preempted and not self.swapped:
            left = self.token_budget - sum(given.values())
            given |= schedule_waiting(self.running, self.waiting, self.memory, left, self.max_num_seqs)
        return given, preempted


def v0_mode(num_seqs: int) -> str:
    """What V0 did with a request of so many sequences: only one can be computed again as a prompt is."""
    return "recompute" if num_seqs == 1 else "swap"


# endregion

# %% 4. The kernel: scattered blocks of all layers, to one piece and back, in one launch


# region: kernel
@triton.jit
def block_of(addresses, tensor, block, words):
    """Where a block begins in one tensor of the cache: `addresses` int64 [tensors], `words` of 4 bytes a block."""
    return tl.load(addresses + tensor).to(tl.pointer_type(tl.int32)) + block.to(tl.int64) * words


@triton.jit
def record_of(staging, slot, tensor, num_tensors, words):
    """Where the same piece begins in the staging buffer: slot by slot, and in a slot tensor by tensor."""
    return staging + (slot.to(tl.int64) * num_tensors + tensor) * words


@triton.jit
def swap_kernel(addresses, blocks, slots, staging, words, TO_STAGING: tl.constexpr, BLOCK: tl.constexpr):
    """Blocks of all layers to slots of the staging buffer, or back. Grid: (moves, tensors, ceil(words / BLOCK)).

    addresses int64 [tensors], each of a tensor [num_blocks, words] of 4-byte words; blocks, slots int32 [moves], -1 in
    blocks: nothing moves; staging int32 [slots, tensors, words]. Each word that moves is read once and written once:
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
    """tensors: of the layers, each [num_blocks, ...]; staging int32 [slots, tensors, words]; returns the staging."""
    words = tensors[0][0].numel() * tensors[0].element_size() // 4
    addresses = torch.tensor([one.data_ptr() for one in tensors], dtype=torch.int64, device=staging.device)
    size = min(4096, triton.next_power_of_2(words))
    grid = len(blocks), len(tensors), triton.cdiv(words, size)
    if len(blocks):
        swap_kernel[grid](addresses, blocks, slots, staging, words, TO_STAGING=to_staging, BLOCK=size)
    return staging


def swap_gathered(cache: Tensor, host: Tensor, block_ids: list[int], slots: list[int], to_host: bool) -> int:
    """All blocks by way of one piece: one launch, and one copy. On a CPU torch's own indexing gathers."""
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


# %% 5. What either way costs


# region: formulas
def recompute_seconds(num_tokens: float, parameters: float, flops: float) -> float:
    """Of computing so many tokens again: two operations for each parameter and token. Attention is left out."""
    return 2 * parameters * num_tokens / flops


def swap_seconds(num_tokens: float, bytes_per_token: float, bandwidth: float, directions: int = 2) -> float:
    """Of copying their keys and values: out and back, or back alone where they are on the host already."""
    return directions * num_tokens * bytes_per_token / bandwidth


def break_even_bandwidth(bytes_per_token: float, parameters: float, flops: float, directions: int = 2) -> float:
    """From how many bytes a second on copying is the cheaper way. Without attention the number of tokens cancels."""
    return directions * bytes_per_token * flops / (2 * parameters)


def effective_bandwidth(piece_bytes: float, bandwidth: float, seconds_per_copy: float) -> float:
    """Bytes a second of a row of copies, each of which costs some time before its first byte."""
    return piece_bytes / (seconds_per_copy + piece_bytes / bandwidth)


# endregion

# %% The talk, in order


def main(arguments: Namespace) -> None:
    """Run the lesson from top to bottom."""
    device, control = begin("Lesson 11. Preemption", arguments), Control()
    report.load(arguments, device)
    heading("1 and 2. Memory runs out, step by step")
    found: dict = {"trace": report.show_trace(Engine, arguments)}
    found["policies"] = report.show_policies(Engine, arguments)
    heading("3. The same tokens, computed again or swapped")
    found["tokens"] = report.compare_tokens(Engine, SwappingEngine, SwapSpace, arguments)
    found["groups"] = report.show_groups(v0_mode, SwapSpace, arguments)
    heading("4. The kernel")
    found["kernel"] = prove(partial(report.verify_kernel, launch), device)
    heading("5. Recompute against swap")
    with control.watch():
        found["crossover"] = report.measure_crossover(SwapSpace, break_even_bandwidth, arguments)
    found["gpus"] = report.show_gpus(recompute_seconds, swap_seconds, break_even_bandwidth, effective_bandwidth)
    heading("6. What is computed twice")
    found["waste"] = report.show_waste(arguments)
    found["cliff"] = report.show_pools(arguments)
    report.recall_cliff()
    heading("7. Break it")
    found["broken"] = report.break_it(Engine, arguments)
    report.close(found, control.disturbance())
    keep(__file__, found, arguments, report.draw, disturbance=control.record())


parser = partial(report.parser, __doc__)

if __name__ == "__main__":
    run(main, parser())
