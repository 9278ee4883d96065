"""Lesson 04. Continuous batching: decide before every step which request gets how many tokens.

Builds static batching and the scheduler that replaced it, which shares a budget of tokens and a pool of blocks, and
the kernel that makes one launch of requests of any length. You learn to say in advance what vLLM's scheduler will do,
what share of its seats a static batch wastes, and why batching and paging need each other.

    uv run python vllm/04_continuous_batching.py                      # under a minute on a laptop, no GPU needed
    uv run python vllm/04_continuous_batching.py --seats 4 --requests 32
"""

import math
import statistics
from argparse import Namespace
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.config import ModelConfig
from minivllm.platforms.triton_utils import tl, triton
from minivllm_lab.cli import run
from minivllm_lab.continuous_batching import report
from minivllm_lab.continuous_batching.seats import assign_seats
from minivllm_lab.disturbance import Control
from minivllm_lab.key_walk import attend_keys
from minivllm_lab.lesson import begin, keep
from minivllm_lab.progress import track
from minivllm_lab.proof import furthest, prove, show_errors
from minivllm_lab.tables import heading
from minivllm_simulate.workloads import WORKLOADS


# %% 1. The pain: a batch that ends together waits for its longest request
def static_utilization(lengths: Sequence[int], batch: int) -> float:
    """Return the share of seat-steps that make a token when `batch` requests start and end together.

    It is mean / E[longest of batch]. `lengths` is a sample of output lengths; the longest of `batch` draws is the i-th
    smallest with probability (i/n)^batch - ((i-1)/n)^batch.
    """
    n, ordered = len(lengths), sorted(lengths)
    longest = sum(x * ((i / n) ** batch - ((i - 1) / n) ** batch) for i, x in enumerate(ordered, start=1))
    return statistics.mean(lengths) / longest


# %% 2. The idea: no phases, one budget. In each step every request computes the tokens that it has not computed yet
# region: schedule
@dataclass
class Request:
    """`num_tokens` are known (prompt and sampled ones); `num_computed_tokens` of them are in the KV cache."""

    request_id: str
    num_tokens: int
    max_tokens: int
    num_computed_tokens: int = 0
    num_blocks: int = 0


@dataclass
class Pool:
    """The KV cache as a scheduler counts it. The default is ample memory."""

    num_free_blocks: int = 1_000_000_000
    block_size: int = 1


def blocks_missing(request: Request, num_tokens: int, block_size: int) -> int:
    """Return how many more blocks a request needs to hold `num_tokens` tokens."""
    return max(0, -(-num_tokens // block_size) - request.num_blocks)


def preempt_last(running: list[Request], waiting: deque[Request], pool: Pool) -> None:
    """Preempt the last running request: it returns its blocks, starts over, and is the next to be admitted."""
    victim = running.pop()
    pool.num_free_blocks += victim.num_blocks
    victim.num_blocks = victim.num_computed_tokens = 0
    waiting.appendleft(victim)


def schedule(
    running: list[Request], waiting: deque[Request], pool: Pool, token_budget: int, chunk_limit: int, max_num_seqs: int
) -> dict[str, int]:
    """Divide one step's token budget: running requests first, then new ones.

    Moves requests between `running` and `waiting`, takes blocks from `pool`, and counts tokens as computed at once.
    Returns the tokens by request id, in the order of scheduling.
    """
    scheduled: dict[str, int] = {}

    def give(request: Request, num_tokens: int) -> int:
        num_blocks = blocks_missing(request, request.num_computed_tokens + num_tokens, pool.block_size)
        pool.num_free_blocks -= num_blocks
        request.num_blocks += num_blocks
        request.num_computed_tokens += num_tokens
        scheduled[request.request_id] = num_tokens
        return num_tokens

    def share(request: Request) -> int:
        return min(request.num_tokens - request.num_computed_tokens, chunk_limit, token_budget)

    position, preempted = 0, False
    while position < len(running) and token_budget > 0:
        request = running[position]
        needed = request.num_computed_tokens + share(request)
        if blocks_missing(request, needed, pool.block_size) > pool.num_free_blocks:
            preempt_last(running, waiting, pool)
            preempted = True  # and try again, unless the last was this request itself
        else:
            token_budget -= give(request, share(request))
            position += 1
    while waiting and token_budget > 0 and len(running) < max_num_seqs and not preempted:
        if blocks_missing(waiting[0], waiting[0].num_tokens, pool.block_size) > pool.num_free_blocks:
            break
        running.append(waiting.popleft())
        token_budget -= give(running[-1], share(running[-1]))
    return scheduled


# endregion


class Scheduler:
    """The loop around `schedule`: requests wait, get tokens, sample once all are computed, and leave."""

    def __init__(
        self,
        requests: Sequence[Request],
        token_budget: int,
        max_num_seqs: int,
        static: bool = False,
        pool: Pool | None = None,
    ) -> None:
        self.token_budget, self.max_num_seqs, self.static = token_budget, max_num_seqs, static
        self.running: list[Request] = []
        self.waiting, self.pool = deque(requests), pool or Pool()

    def schedule(self) -> dict[str, int]:
        """Schedule one step. A static batch admits requests only when all of its last ones have ended."""
        seats = len(self.running) if self.static and self.running else self.max_num_seqs
        return schedule(self.running, self.waiting, self.pool, self.token_budget, self.token_budget, seats)

    def update(self, scheduled: dict[str, int]) -> None:
        """Process a forward pass: requests with all tokens computed sample one more, and complete ones leave."""
        for request in self.running:
            if request.request_id in scheduled and request.num_computed_tokens == request.num_tokens:
                request.num_tokens, request.max_tokens = request.num_tokens + 1, request.max_tokens - 1
        self.pool.num_free_blocks += sum(r.num_blocks for r in self.running if r.max_tokens == 0)
        self.running = [request for request in self.running if request.max_tokens > 0]

    def steps(self) -> Iterator[dict[str, int]]:
        """Yield step after step until all requests are complete."""
        while self.running or self.waiting:
            scheduled = self.schedule()
            yield scheduled
            self.update(scheduled)


def named(lengths: Sequence[tuple[int, int]]) -> list[Request]:
    """Make requests A, B, C … with these (prompt, output) lengths."""
    return [Request(chr(65 + index), prompt, output) for index, (prompt, output) in enumerate(lengths)]


PUZZLE = [(10, 3), (4, 2), (12, 4), (3, 2)]


def first_steps(count: int = 4) -> list[dict[str, int]]:
    """Schedule the first steps of the exercise's puzzle: 12 tokens a step and 3 seats."""
    steps = Scheduler(named(PUZZLE), token_budget=12, max_num_seqs=3).steps()
    return [scheduled for _, scheduled in zip(range(count), steps, strict=False)]


def show_timelines(outputs: Sequence[int], seats: int) -> dict:
    """Draw the same requests in the same seats under both policies; count steps and seats in use."""
    results = {}
    for name in ("static", "continuous"):
        rows = assign_seats(Scheduler(named([(1, n) for n in outputs]), seats, seats, name == "static").steps(), seats)
        results[name] = {"steps": len(rows[0]), "used": sum(outputs) / (seats * len(rows[0])), "slots": rows}
        report.show_timeline(name, results[name])
    return results


def measure_seats(requests: int, seats: int, seed: int) -> dict:
    """Compute the seats in use, by kind of request: by the formula, and counted under both policies."""
    samples = {work.title: [r.output_tokens for r in work.sample(4096, seed)] for work in WORKLOADS.values()}
    samples["uniform 1–512"], results = [1 + i * 37 % 512 for i in range(4096)], {}
    for title, lengths in track(samples.items(), "counting seats"):
        theory = {str(batch): static_utilization(lengths, batch) for batch in (1, 2, 4, 8, 16, 32, 64)}
        results[title] = {"formula": static_utilization(lengths[:requests], seats), "theory": theory}
        for policy in ("static", "continuous"):
            scheduler = Scheduler(named([(1, n) for n in lengths[:requests]]), seats, seats, policy == "static")
            taken = [len(step) for step in scheduler.steps()]
            results[title][policy] = sum(taken) / (seats * len(taken))
    report.show_seats(results, seats)
    return results


# %% 3. Selective batching: everything but attention takes tokens one by one, so lay all requests end to end
def ragged_attention(q: Tensor, keys: Tensor, values: Tensor, query_start: Tensor, key_start: Tensor) -> Tensor:
    """Attend in a loop, request by request: its new tokens see its own keys, up to themselves.

    q [tokens, heads, d]; keys, values [all keys, kv_heads, d]; request i owns the rows from start[i] to start[i + 1]
    of each, and its queries are the last of its keys -> like q.
    """
    out = torch.empty_like(q)
    for (a, b), (c, d) in zip(pairwise(query_start.tolist()), pairwise(key_start.tolist()), strict=True):
        visible = torch.ones(b - a, d - c, dtype=torch.bool, device=q.device).tril(d - c - (b - a))
        rows = (x.transpose(0, 1)[None] for x in (q[a:b], keys[c:d], values[c:d]))
        out[a:b] = F.scaled_dot_product_attention(*rows, attn_mask=visible, enable_gqa=True)[0].transpose(0, 1)
    return out


# region: ragged
@triton.jit
def visible_kernel(visible, query_start_loc, seq_lens, BLOCK: tl.constexpr):
    """Write how many keys each row sees, int32 [rows]. Grid: (requests,); no request has more than BLOCK rows."""
    request, row = tl.program_id(0), tl.arange(0, BLOCK)
    start = tl.load(query_start_loc + request)
    queries = tl.load(query_start_loc + request + 1) - start
    context = tl.load(seq_lens + request) - queries
    tl.store(visible + start + row, context + row + 1, mask=row < queries)


@triton.jit
def find_sequence(query_start_loc, tile, num_seqs, BLOCK_Q: tl.constexpr):
    """Find a tile's request: the last one whose first tile, start // BLOCK_Q + request, is not after it."""
    low, high = 0, num_seqs
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_start_loc + middle) // BLOCK_Q + middle <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def ragged_kernel(
    out, q, keys, values, query_start_loc, key_start_loc, num_seqs, scale,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Do `ragged_attention` in one launch. Grid: (rows // BLOCK_Q + requests, heads).

    Same layouts; starts int32 [requests + 1]. float32 inside. Reads a request's keys and values once for each head and
    tile of its queries, up to the last key that the tile sees; 4 * HEAD_DIM FLOPs for each (query, key) pair and head.
    A decode is a tile with one real row.
    """
    tile, head = tl.program_id(0), tl.program_id(1)
    # 1. Which request does this tile belong to? No table says so; the starts do.
    request = find_sequence(query_start_loc, tile, num_seqs, BLOCK_Q)
    # 2. How many new rows does the request have, and how many tokens before them?
    start = tl.load(query_start_loc + request)
    first_key = tl.load(key_start_loc + request)
    queries = tl.load(query_start_loc + request + 1) - start
    context = tl.load(key_start_loc + request + 1) - first_key - queries
    # 3. Which of the request's rows are this tile's?
    row = (tile - start // BLOCK_Q - request) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    column = tl.arange(0, BLOCK_D)
    at = ((start + row).to(tl.int64) * GROUP * KV_HEADS + head)[:, None] * HEAD_DIM + column[None, :]
    # 4. Rows past the request's last one are the next request's: neither load nor store them.
    real = (row < queries)[:, None] & (column < HEAD_DIM)[None, :]
    if tl.min(row) < queries:
        query = tl.load(q + at, mask=real, other=0.0)
        # 5. No row of the tile sees a key behind its last row's.
        end = context + tl.minimum(tl.max(row) + 1, queries)
        # 6. The staircase: each row sees one key more than the row above it.
        result = attend_keys(
            query, keys, values, first_key, head // GROUP, end, context + row + 1, scale,
            KV_HEADS, HEAD_DIM, BLOCK_D, BLOCK_T,
        )  # fmt: skip
        tl.store(out + at, result.to(out.dtype.element_ty), mask=real)


# endregion


def ragged_launch(q: Tensor, keys: Tensor, values: Tensor, query_start: Tensor, key_start: Tensor) -> Tensor:
    """Do `ragged_attention` with the kernel."""
    (rows, heads, head_dim), kv_heads, out = q.shape, keys.shape[1], torch.empty_like(q)
    requests = len(query_start) - 1
    ragged_kernel[(rows // 16 + requests, heads)](
        out, q, keys, values, query_start, key_start, requests, 1 / math.sqrt(head_dim), GROUP=heads // kv_heads,
        KV_HEADS=kv_heads, HEAD_DIM=head_dim, BLOCK_D=max(16, triton.next_power_of_2(head_dim)), BLOCK_Q=16, BLOCK_T=32,
    )  # fmt: skip
    return out


def starts(lengths: Sequence[int]) -> Tensor:
    """Return where each request begins, and where the last one ends: int32 [requests + 1]."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def verify_kernel(device: torch.device, quick: bool = False) -> dict:
    """Compare one launch over a prefill, decodes, a chunk and an empty request with the loop in float64."""
    queries, lengths, errors = [17, 1, 16, 0, 1, 5], [17, 1, 40, 3, 65, 33], {}
    layout = starts(queries), starts(lengths)
    for heads, kv_heads, head_dim in track([(4, 4, 64), (6, 2, 80)][quick:], "verifying the kernel"):
        q, k, v = (torch.randn(n, h, head_dim).half() for n, h in ((40, heads), (159, kv_heads), (159, kv_heads)))
        expected = ragged_attention(q.double(), k.double(), v.double(), *layout)
        out = ragged_launch(*(x.to(device) for x in (q, k, v, *layout)))
        errors[f"{heads} heads on {kv_heads}, of {head_dim}"] = furthest(out, expected)
    padded = max(queries) * len(queries)
    caption = f"new tokens of six requests: {queries}. End to end {sum(queries)} rows, padded {padded}"
    largest = show_errors("The ragged kernel", errors, 4e-3, caption=caption)
    return {"largest_error": largest, "rows": sum(queries), "padded": padded}


# %% 6. Break it
def starved(token_budget: int = 5, steps: int = 20) -> dict[str, int]:
    """Let eight requests decode under a budget of five tokens; count what each of them gets."""
    scheduler = Scheduler(named([(1, 100)] * 8), 8, 8)
    scheduler.update(scheduler.schedule())
    scheduler.token_budget, tokens = token_budget, dict.fromkeys("ABCDEFGH", 0)
    for _, scheduled in zip(range(steps), scheduler.steps(), strict=False):
        tokens = {name: count + scheduled.get(name, 0) for name, count in tokens.items()}
    report.show_starved(tokens, token_budget, steps)
    return tokens


def main(arguments: Namespace) -> None:
    """Run the lesson from top to bottom."""
    device, control = begin("Lesson 04. Continuous batching", arguments), Control()
    ModelConfig.from_pretrained(arguments.model)  # a missing model is refused before any work
    heading("1 and 2. The seats of a batch")
    results: dict = {"timelines": show_timelines((3, 14, 5, 8, 12, 4, 6, 2, 9, 5), 4)}
    requests = max(32, 2 * arguments.seats) if arguments.quick else 512
    results["slots"] = measure_seats(requests, arguments.seats, arguments.seed)
    heading("3. One forward pass for requests of any length")
    results["kernel"] = prove(partial(verify_kernel, quick=arguments.quick), device)
    heading("4 and 5. Batching, then paging, on the engine")
    with control.watch():
        results["engine"] = report.measure_engine(arguments, device)
    heading("6. Break it (Llama-3.1-8B on an H100, modelled)")
    results["long_prompt"] = report.measure_long_prompt()
    heading("7. Break it (the scheduler and the engine themselves)")
    results["starved"] = starved()
    results["refused"] = report.refuse_too_long(arguments.model, device)
    report.close(results, arguments.seats, control.disturbance())
    keep(__file__, results, arguments, report.draw, disturbance=control.record())


parser = partial(report.parser, __doc__)

if __name__ == "__main__":
    run(main, parser())
