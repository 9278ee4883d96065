"""Lesson 10. Chunked prefill: what does one long prompt do to everyone else?

Puts a long prompt among running chats twice: as vLLM V0 did, in a step of its own, and as vLLM does now, in pieces
beside the chats' next tokens, which takes one `min` in two loops. Then comes the kernel that computes such a step in
one launch, what the pieces cost, and how many tokens of a step are free. You learn to choose a budget.

    uv run python vllm/10_chunked_prefill.py                      # under a minute on a laptop, no GPU needed
"""

import math
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

from torch import Tensor

from minivllm.platforms.triton_utils import tl, triton
from minivllm_lab.chunked_prefill import kernel_cases, pieces, report
from minivllm_lab.cli import run
from minivllm_lab.disturbance import Control
from minivllm_lab.key_walk import attend_blocks
from minivllm_lab.lesson import begin, keep
from minivllm_lab.proof import prove
from minivllm_lab.tables import heading

# %% 1. The pain: whole prompts in steps of their own, as in vLLM V0


@dataclass
class Request:
    """A request with `num_tokens` so far, `num_computed_tokens` of them in the KV cache, and `max_tokens` to sample."""

    request_id: str
    num_tokens: int
    max_tokens: int
    num_computed_tokens: int = 0

    @property
    def missing(self) -> int:
        """The tokens that are not computed: a prompt, or the token that was sampled last."""
        return self.num_tokens - self.num_computed_tokens


Policy = Callable[[list[Request], deque[Request]], dict[str, int]]
"""Schedule the next step's tokens, and move admitted requests from `waiting` to the end of `running`."""


# region: prefill_first
def prefill_first(
    running: list[Request], waiting: deque[Request], token_budget: int, max_num_seqs: int = 8
) -> dict[str, int]:
    """Schedule whole waiting prompts, as V0 did; running requests get a token in steps that admit no prompt."""
    scheduled: dict[str, int] = {}
    while waiting and len(running) < max_num_seqs and waiting[0].missing <= token_budget - sum(scheduled.values()):
        running.append(waiting.popleft())
        scheduled[running[-1].request_id] = running[-1].missing
    return scheduled or {request.request_id: request.missing for request in running}


# endregion

# %% 2. The idea: a `min` in both loops


# region: caps
def chunk_limit(token_budget: int, threshold: int, num_requests: int, adaptive: bool = False) -> int:
    """Return the token limit of one request in a step. `num_requests` run or wait; threshold 0 means no limit."""
    if threshold == 0 or num_requests == 1:
        return token_budget
    return max(threshold, token_budget // num_requests) if adaptive else threshold


def running_tokens(missing: int, limit: int, budget_left: int) -> int:
    """Return how many tokens a running request gets in this step."""
    return min(missing, limit, budget_left)


def admitted_tokens(missing: int, limit: int, budget_left: int, may_be_cut: bool = True) -> int:
    """Return how many tokens the request at the head of the queue gets; 0 means that the whole queue waits."""
    wanted = min(missing, limit)
    return min(wanted, budget_left) if may_be_cut or wanted <= budget_left else 0


# endregion


# region: mixed
def mixed(
    running: list[Request],
    waiting: deque[Request],
    token_budget: int,
    max_num_seqs: int = 8,
    threshold: int = 0,
    may_be_cut: bool = True,
) -> dict[str, int]:
    """Schedule running requests in order of admission, then waiting ones, under one budget, as vLLM does now."""
    scheduled: dict[str, int] = {}
    limit = chunk_limit(token_budget, threshold, len(running) + len(waiting))
    for request in running:
        if tokens := running_tokens(request.missing, limit, token_budget):
            scheduled[request.request_id] = tokens
            token_budget -= tokens
    while waiting and token_budget and len(running) < max_num_seqs:
        tokens = admitted_tokens(waiting[0].missing, limit, token_budget, may_be_cut)
        if not tokens:
            break
        running.append(waiting.popleft())
        scheduled[running[-1].request_id] = tokens
        token_budget -= tokens
    return scheduled


# endregion


def serve(policy: Policy, arrivals: Mapping[int, Sequence[Request]], most: int = 1000) -> Iterator[dict[str, int]]:
    """Yield each step's tokens until all requests are served, or `most` steps; `arrivals[i]` arrive before step i."""
    running, waiting, last = [], deque(), max(arrivals)
    for step in range(most):
        waiting.extend(arrivals.get(step, ()))
        if step > last and not running and not waiting:
            return
        scheduled = policy(running, waiting)
        yield scheduled
        for request in running:
            request.num_computed_tokens += scheduled.get(request.request_id, 0)
            if request.request_id in scheduled and request.missing == 0:  # it has caught up, so it samples
                request.num_tokens += 1
                request.max_tokens -= 1
        running[:] = [request for request in running if request.max_tokens > 0]


def chats_and_a_long_prompt() -> dict[int, list[Request]]:
    """Return two chats, and a prompt of 20 tokens that arrives before the third step."""
    return {0: [Request("a", 3, 7), Request("b", 2, 7)], 2: [Request("L", 20, 3)]}


def first_steps(count: int = 4) -> list[dict[str, int]]:
    """Solve the exercise on paper: 10 tokens a step, at most 5 of them for one request."""
    arrivals = {0: [Request("A", 14, 3)], 1: [Request("B", 9, 2), Request("C", 2, 4)]}
    steps = serve(partial(mixed, token_budget=10, threshold=5), arrivals)
    return list(islice(steps, count))


# %% 3. The cost of the pieces, and how much is free


# region: plan
def steps_of_a_prompt(prompt_tokens: int, token_budget: int, num_decodes: int) -> float:
    """Return how many steps a prompt takes beside `num_decodes` requests that each take a token per step."""
    left = token_budget - num_decodes
    return math.ceil(prompt_tokens / left) if left > 0 else math.inf


def keys_read_again(prompt_tokens: int, chunk: int) -> int:
    """Count the earlier chunks' keys that later chunks read in a layer: c · N(N − 1)/2 for N chunks of c tokens."""
    return sum(range(0, prompt_tokens, chunk))


def knee(flops: float, bandwidth: float, bytes_per_parameter: float) -> float:
    """Return the tokens above which a step's arithmetic takes longer than reading the weights: F · b / (2 · BW)."""
    return flops * bytes_per_parameter / (2 * bandwidth)


def budget_for(gap: float, parameters: float, bytes_per_parameter: float, flops: float, bandwidth: float) -> int:
    """Return the largest token budget whose step ends within `gap` seconds; 0 if reading the weights takes longer."""
    if parameters * bytes_per_parameter > gap * bandwidth:
        return 0
    return math.floor(gap * flops / (2 * parameters))


# endregion

# %% 4. The kernel: decodes and chunks in one launch, in tiles of two sizes


# region: kernel
@triton.jit
def find_tile(query_start_loc, tile, num_decodes, num_seqs, BLOCK_Q: tl.constexpr):
    """Return a tile's request, and its first token in it. Decodes come first and have a tile each.

    After them, chunk i begins at tile (start − num_decodes) // BLOCK_Q + i; bisect among the chunks.
    """
    low, high = num_decodes, num_seqs
    while low < high:
        middle = (low + high) // 2
        if (tl.load(query_start_loc + middle) - num_decodes) // BLOCK_Q + middle <= tile:
            low = middle + 1
        else:
            high = middle
    request, row = low - 1, tile * 0
    if tile < num_decodes:
        request = tile
    else:
        start = tl.load(query_start_loc + request)
        row = (tile - (start - num_decodes) // BLOCK_Q - request) * BLOCK_Q
    return request, row


@triton.jit
def attend_tile(
    out, q, k_cache, v_cache, query_start_loc, seq_lens, block_table, request, first, kv_head, table_width, scale,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Compute up to BLOCK_M // GROUP tokens of a request, starting at token `first`, with all heads of one group.

    Row i of the matmul is head i % GROUP of token i // GROUP: heads of a group read the same keys.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    row, column = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    start = tl.load(query_start_loc + request)
    queries = tl.load(query_start_loc + request + 1) - start
    context = tl.load(seq_lens + request) - queries
    token = first + row // GROUP
    head = (start + token).to(tl.int64) * GROUP * KV_HEADS + kv_head * GROUP + row % GROUP
    at = head[:, None] * HEAD_DIM + column[None, :]
    real = ((row < BLOCK_Q * GROUP) & (token < queries))[:, None] & (column < HEAD_DIM)[None, :]
    if first < queries:
        end = context + tl.minimum(first + BLOCK_Q, queries)
        table = block_table + request.to(tl.int64) * table_width
        result = attend_blocks(
            tl.load(q + at, mask=real, other=0.0), k_cache, v_cache, table, kv_head, end, context + token + 1, scale,
            BLOCK_SIZE, KV_HEADS, HEAD_DIM, BLOCK_D, BLOCK_T,
        )  # fmt: skip
        tl.store(out + at, result.to(out.dtype.element_ty), mask=real)


@triton.jit
def mixed_kernel(
    out, q, k_cache, v_cache, query_start_loc, seq_lens, block_table, num_decodes, num_seqs, table_width, scale,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, DECODE_M: tl.constexpr, CHUNK_M: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Compute a step's causal attention over paged K and V. Grid: (decodes + chunk rows // BLOCK_Q + chunks, KV heads).

    out, q [tokens, GROUP * KV_HEADS, HEAD_DIM], the decodes' rows first; k_cache, v_cache [blocks, BLOCK_SIZE,
    KV_HEADS, HEAD_DIM]; query_start_loc int32 [requests + 1], seq_lens int32 [requests], block_table int32 [requests,
    table_width]. float32 inside. A decode's program has DECODE_M rows and a chunk's CHUNK_M, BLOCK_Q = CHUNK_M // GROUP
    tokens. Reads K and V once for each tile, up to the last key visible to it; q and out once. 4 * HEAD_DIM FLOPs for
    each row and key.
    """
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    request, first = find_tile(query_start_loc, tile, num_decodes, num_seqs, CHUNK_M // GROUP)
    if tile < num_decodes:
        attend_tile(
            out, q, k_cache, v_cache, query_start_loc, seq_lens, block_table, request, first, kv_head, table_width,
            scale, GROUP, KV_HEADS, HEAD_DIM, BLOCK_D, BLOCK_SIZE, DECODE_M, BLOCK_T,
        )  # fmt: skip
    else:
        attend_tile(
            out, q, k_cache, v_cache, query_start_loc, seq_lens, block_table, request, first, kv_head, table_width,
            scale, GROUP, KV_HEADS, HEAD_DIM, BLOCK_D, BLOCK_SIZE, CHUNK_M, BLOCK_T,
        )  # fmt: skip


# endregion

DECODE_M, CHUNK_M, BLOCK_T = 16, 64, 32


def mixed_launch(
    out: Tensor, q: Tensor, caches: Tensor, starts: Tensor, seq_lens: Tensor, block_table: Tensor, num_decodes: int,
    chunk_m: int = CHUNK_M, block_t: int = BLOCK_T,
) -> Tensor:  # fmt: skip
    """Compute these requests' rows of `out`; the first `num_decodes` requests have one token each.

    caches [2, blocks, block_size, kv_heads, head_dim]; the other layouts are those of the kernel.
    """
    (_, heads, head_dim), (block_size, kv_heads), requests = q.shape, caches.shape[2:4], len(seq_lens)
    group = heads // kv_heads
    rows = int(starts[-1]) - num_decodes
    tiles = num_decodes + rows // (chunk_m // group) + requests - num_decodes
    if tiles:
        mixed_kernel[(tiles, kv_heads)](
            out, q, *caches, starts, seq_lens, block_table, num_decodes, requests, block_table.shape[1],
            1 / math.sqrt(head_dim), GROUP=group, KV_HEADS=kv_heads, HEAD_DIM=head_dim,
            BLOCK_D=max(16, triton.next_power_of_2(head_dim)), BLOCK_SIZE=block_size,
            DECODE_M=max(DECODE_M, triton.next_power_of_2(group)), CHUNK_M=chunk_m, BLOCK_T=block_t,
        )  # fmt: skip
    return out


def in_two_launches(
    out: Tensor, q: Tensor, caches: Tensor, starts: Tensor, seq_lens: Tensor, block_table: Tensor, num_decodes: int
) -> Tensor:
    """Compute the same rows with decodes in one launch and chunks in another."""
    mixed_launch(out, q, caches, starts[: num_decodes + 1], seq_lens[:num_decodes], block_table, num_decodes)
    chunks = (out[num_decodes:], q[num_decodes:], caches, starts[num_decodes:] - num_decodes)
    mixed_launch(*chunks, seq_lens[num_decodes:], block_table[num_decodes:], 0)
    return out


def tile_work(queries: Sequence[int], seq_lens: Sequence[int], group: int, tile_rows: Sequence[int]) -> dict[str, int]:
    """Count the work of one KV head in a step whose request i has tiles of `tile_rows[i]` rows and `BLOCK_T` keys.

    It counts `rows` and `real` ones among them, `scores` and those that the causal mask `keeps`, and `keys` read.
    """
    work: dict[str, int] = dict.fromkeys(("tiles", "rows", "real", "scores", "keeps", "keys"), 0)
    for new, length, size in zip(queries, seq_lens, tile_rows, strict=True):
        for first in range(0, new, size // group):
            end = length - new + min(first + size // group, new)
            work["tiles"] += 1
            work["rows"] += size
            work["keys"] += end
            work["scores"] += size * -(-end // BLOCK_T) * BLOCK_T
        work["real"] += new * group
        work["keeps"] += group * (new * (length - new) + new * (new + 1) // 2)
    return work


# %% The talk, in order


def main(arguments: Namespace) -> None:
    """Run the lesson from top to bottom."""
    device, control = begin("Lesson 10. Chunked prefill", arguments), Control()
    heading("1 and 2. The same requests, prefill first and mixed")
    ways = {"prefill first": partial(prefill_first, token_budget=32), "mixed": partial(mixed, token_budget=8)}
    steps = {name: list(serve(policy, chats_and_a_long_prompt())) for name, policy in ways.items()}
    figures: dict = {"steps": report.show_steps(steps)}
    heading("3. Chats and long prompts in the engine")
    with control.watch():
        figures["chats"] = report.measure_chats(arguments)
    heading("4. One launch or two")
    verify = partial(kernel_cases.verify_kernel, mixed_launch, in_two_launches, quick=arguments.quick)
    figures["kernel"] = prove(verify, device)
    figures["tiles"] = kernel_cases.compare_tiles(partial(tile_work, group=4))
    heading("5. The cost of the pieces")
    with control.watch():
        figures["again"] = pieces.measure_keys_read_again(keys_read_again, arguments)
    heading("6. How many tokens are free")
    with control.watch():
        figures["knee"] = pieces.measure_knee(knee, arguments)
    figures["gpus"] = report.show_gpus(knee, budget_for)
    report.close(figures, control.disturbance())
    keep(__file__, figures, arguments, report.draw, disturbance=control.record())


parser = partial(report.parser, __doc__)

if __name__ == "__main__":
    run(main, parser())
