"""Lesson 10. Chunked prefill: what does one long prompt do to everyone else?

Puts a long prompt among running chats twice: as vLLM V0 did, in a step of its own, and as vLLM does now, in pieces
beside the chats' next tokens, which takes one `min` in two loops. Then the kernel that serves such a step in one
launch, what the pieces cost, and how many tokens of a step are free. You learn to choose a budget.

    uv run python vllm/10_chunked_prefill.py                      # under a minute on a laptop, no GPU needed
    uv run python vllm/10_chunked_prefill.py --prompt 1000 --quick
"""

import math
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from minivllm.platforms.triton_utils import tl, triton
from minivllm_lab.chunked_prefill import report
from minivllm_lab.cli import run
from minivllm_lab.disturbance import Control
from minivllm_lab.key_walk import attend_blocks
from minivllm_lab.lesson import begin, keep
from minivllm_lab.proof import prove
from minivllm_lab.tables import heading

# %% 1. The pain: whole prompts in steps of their own, as vLLM V0 had them


@dataclass
class Request:
    """`num_tokens` are known, `num_computed_tokens` of them are in the KV cache; it may sample `max_tokens` more."""

    request_id: str
    num_tokens: int
    max_tokens: int
    num_computed_tokens: int = 0

    @property
    def missing(self) -> int:
        """Known tokens that are not computed: a prompt, or the one token that was sampled last."""
        return self.num_tokens - self.num_computed_tokens


Policy = Callable[[list[Request], deque[Request]], dict[str, int]]
"""Who gets how many tokens in the next step; moves those it admits from `waiting` to the end of `running`."""


# region: prefill_first
def prefill_first(
    running: list[Request], waiting: deque[Request], token_budget: int, max_num_seqs: int = 8
) -> dict[str, int]:
    """V0: whole prompts of those that wait. Only a step that admits nobody has a token for each that runs."""
    given: dict[str, int] = {}
    while waiting and len(running) < max_num_seqs and waiting[0].missing <= token_budget - sum(given.values()):
        running.append(waiting.popleft())
        given[running[-1].request_id] = running[-1].missing
    return given or {request.request_id: request.missing for request in running}


# endregion

# %% 2. The idea: a `min` in both loops


# region: caps
def chunk_limit(token_budget: int, threshold: int, num_requests: int, adaptive: bool = False) -> int:
    """The most tokens that one request may get in a step. `num_requests` run or wait; threshold 0 is none."""
    if threshold == 0 or num_requests == 1:
        return token_budget
    return max(threshold, token_budget // num_requests) if adaptive else threshold


def running_tokens(missing: int, limit: int, budget_left: int) -> int:
    """Tokens of a request that runs."""
    return min(missing, limit, budget_left)


def admitted_tokens(missing: int, limit: int, budget_left: int, may_be_cut: bool = True) -> int:
    """Tokens of the request at the head of the queue; 0: it waits, and all behind it."""
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
    """vLLM now: those that run in the order of admission, then those that wait, all under one budget."""
    given: dict[str, int] = {}
    limit = chunk_limit(token_budget, threshold, len(running) + len(waiting))
    for request in running:
        if tokens := running_tokens(request.missing, limit, token_budget):
            given[request.request_id] = tokens
            token_budget -= tokens
    while waiting and token_budget and len(running) < max_num_seqs:
        tokens = admitted_tokens(waiting[0].missing, limit, token_budget, may_be_cut)
        if not tokens:
            break
        running.append(waiting.popleft())
        given[running[-1].request_id] = tokens
        token_budget -= tokens
    return given


# endregion


def serve(policy: Policy, arrivals: Mapping[int, Sequence[Request]], most: int = 1000) -> Iterator[dict[str, int]]:
    """The tokens of each step until all are served, `most` steps at most. Before step i come `arrivals[i]`."""
    running, waiting, last = [], deque(), max(arrivals)
    for step in range(most):
        waiting.extend(arrivals.get(step, ()))
        if step > last and not running and not waiting:
            return
        given = policy(running, waiting)
        yield given
        for request in running:
            request.num_computed_tokens += given.get(request.request_id, 0)
            if request.request_id in given and request.missing == 0:  # it has caught up, so it samples
                request.num_tokens, request.max_tokens = request.num_tokens + 1, request.max_tokens - 1
        running[:] = [request for request in running if request.max_tokens > 0]


def chats_and_a_long_prompt() -> dict[int, list[Request]]:
    """Two chats run; before the third step comes a prompt of 20 tokens."""
    return {0: [Request("a", 3, 7), Request("b", 2, 7)], 2: [Request("L", 20, 3)]}


def first_steps(count: int = 4) -> list[dict[str, int]]:
    """The exercise on paper: 12 tokens a step, at most 5 of them for one request."""
    arrivals = {0: [Request("A", 14, 3)], 1: [Request("B", 9, 2), Request("C", 2, 4)]}
    steps = serve(partial(mixed, token_budget=12, threshold=5), arrivals)
    return [given for _, given in zip(range(count), steps, strict=False)]


# %% 3. What it costs, and how much is free


# region: plan
def steps_of_a_prompt(prompt_tokens: int, token_budget: int, num_decodes: int) -> float:
    """Steps until a prompt is computed while so many requests take a token each out of every step."""
    left = token_budget - num_decodes
    return math.ceil(prompt_tokens / left) if left > 0 else math.inf


def keys_read_again(prompt_tokens: int, chunk: int) -> int:
    """Keys of earlier chunks that later ones read, in each layer; c · N(N − 1)/2 for N whole chunks of c tokens."""
    return sum(range(0, prompt_tokens, chunk))


def knee(flops: float, bandwidth: float, bytes_per_parameter: float) -> float:
    """Tokens from which on a step's arithmetic takes longer than reading the weights: F · b / (2 · BW)."""
    return flops * bytes_per_parameter / (2 * bandwidth)


def budget_for(gap: float, parameters: float, bytes_per_parameter: float, flops: float, bandwidth: float) -> int:
    """The most tokens of a step that ends within `gap` seconds; 0 if reading the weights takes longer."""
    if parameters * bytes_per_parameter > gap * bandwidth:
        return 0
    return math.floor(gap * flops / (2 * parameters))


# endregion

# %% 4. The kernel: decodes and chunks in one launch, each with tiles of its own size


# region: kernel
@triton.jit
def find_tile(query_start_loc, tile, num_decodes, num_seqs, BLOCK_Q: tl.constexpr):
    """Whose is a tile, and which of its rows come first. Decodes stand first and have a tile each.

    Behind them chunk i begins at tile (start − num_decodes) // BLOCK_Q + i, a bisection among the chunks.
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
    """Up to BLOCK_M // GROUP tokens of a request, `first` the first of them, with all heads of one group.

    Row i of the matrix product is head i % GROUP of token i // GROUP: heads of a group read the same keys.
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
    """Causal attention of a step over paged K and V. Grid: (decodes + chunk rows // BLOCK_Q + chunks, KV heads).

    out, q [tokens, GROUP * KV_HEADS, HEAD_DIM], the decodes' rows first; k_cache, v_cache [blocks, BLOCK_SIZE,
    KV_HEADS, HEAD_DIM]; query_start_loc int32 [requests + 1], seq_lens int32 [requests], block_table int32 [requests,
    table_width]. float32 inside. A decode's program has DECODE_M rows and a chunk's CHUNK_M, BLOCK_Q = CHUNK_M // GROUP
    tokens. Reads K and V once for each tile, up to the last key that it sees; q and out once. 4 * HEAD_DIM FLOPs for
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
    """Writes the rows of `out` that belong to these requests, whose first `num_decodes` have one token each.

    caches [2, blocks, block_size, kv_heads, head_dim]; the other layouts are the kernel's.
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
    """The same rows: decodes in one launch, chunks in another."""
    mixed_launch(out, q, caches, starts[: num_decodes + 1], seq_lens[:num_decodes], block_table, num_decodes)
    chunks = (out[num_decodes:], q[num_decodes:], caches, starts[num_decodes:] - num_decodes)
    mixed_launch(*chunks, seq_lens[num_decodes:], block_table[num_decodes:], 0)
    return out


def tile_work(queries: Sequence[int], seq_lens: Sequence[int], group: int, tile_rows: Sequence[int]) -> dict[str, int]:
    """Counts for one KV head of a step whose request i has tiles of `tile_rows[i]` rows, `BLOCK_T` keys at a time.

    `rows` computed and `real` ones among them, `scores` computed and those that the causal mask `keeps`, `keys` read.
    """
    found: dict[str, int] = dict.fromkeys(("tiles", "rows", "real", "scores", "keeps", "keys"), 0)
    for new, length, size in zip(queries, seq_lens, tile_rows, strict=True):
        for first in range(0, new, size // group):
            end = length - new + min(first + size // group, new)
            found["tiles"] += 1
            found["rows"] += size
            found["keys"] += end
            found["scores"] += size * -(-end // BLOCK_T) * BLOCK_T
        found["real"] += new * group
        found["keeps"] += group * (new * (length - new) + new * (new + 1) // 2)
    return found


# %% The talk, in order


def main(arguments: Namespace) -> None:
    """Run the lesson from top to bottom."""
    device, control = begin("Lesson 10. Chunked prefill", arguments), Control()
    report.load(arguments, device)
    heading("1 and 2. The same requests, prefill first and mixed")
    ways = {"prefill first": partial(prefill_first, token_budget=32), "mixed": partial(mixed, token_budget=8)}
    steps = {name: list(serve(policy, chats_and_a_long_prompt())) for name, policy in ways.items()}
    found: dict = {"steps": report.show_steps(steps)}
    report.show_engine_lines()
    found["order"] = report.show_order()
    heading("3. Chats and long prompts in the engine")
    with control.watch():
        found["chats"] = report.measure_chats(arguments)
    report.recall_servers()
    heading("4. One launch or two")
    found["kernel"] = prove(partial(report.verify_kernel, mixed_launch, in_two_launches, quick=arguments.quick), device)
    with control.watch():
        found["launches"] = report.compare_launches(partial(tile_work, group=4), device)
    heading("5. What the pieces cost")
    with control.watch():
        found["again"] = report.measure_keys_read_again(keys_read_again, arguments)
    heading("6. How many tokens are free")
    with control.watch():
        found["knee"] = report.measure_knee(knee, arguments)
    found["gpus"] = report.show_gpus(knee, budget_for)
    heading("7. Break it")
    found["broken"] = report.break_it(serve, mixed, steps_of_a_prompt, Request)
    report.close(found, control.disturbance())
    keep(__file__, found, arguments, report.draw, disturbance=control.record())


parser = partial(report.parser, __doc__)

if __name__ == "__main__":
    run(main, parser())
