"""Check exercise 10 and the script that solves it, and serve requests with the learner's caps."""

import math
from functools import lru_cache, partial
from itertools import accumulate
from pathlib import Path

import torch

from minivllm.config import CacheConfig, Parts, SchedulerConfig
from minivllm.core.scheduler_output import ModelRunnerOutput
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler
from minivllm_lab.chunked_prefill.learner_policy import learner_policy
from minivllm_lab.kernel_trace import trace_kernel
from minivllm_lab.plugged import Plugged
from minivllm_lab.predict.workload import Replay, recorded
from minivllm.platforms.triton_utils import tl, triton

RECORDED = Path(__file__).parents[3] / "tests" / "conformance" / "data"


def _capped(module):
    return learner_policy(module.chunk_limit, module.running_tokens, module.admitted_tokens)


def _number(found, what):
    assert isinstance(found, int), f"{what} is {found!r}, not a whole number"
    return found


# ---- on paper --------------------------------------------------------------------------------------------------------


def check_prediction(module):
    """Steps 1 to 4 of A, B and C are what the engine's scheduler decides."""
    arrivals = {0: [("A", 14, 3)], 1: [("B", 9, 2), ("C", 2, 4)]}
    limits = SchedulerConfig(max_model_len=64, max_num_batched_tokens=12, long_prefill_token_threshold=5)
    scheduler, expected = Scheduler(limits, CacheConfig(num_gpu_blocks=99, enable_prefix_caching=False)), []
    for step in range(4):
        for name, prompt, output in arrivals.get(step, ()):
            scheduler.add_request(Request(name, [0] * prompt, max_tokens=output))
        decided, live = scheduler.schedule(), scheduler.requests
        expected.append(dict(decided.num_scheduled_tokens))
        done = [name for name in expected[-1] if live[name].num_computed_tokens == live[name].num_tokens]
        scheduler.update_from_output(decided, ModelRunnerOutput({name: [1] for name in done}))
    found = module.first_steps()
    assert isinstance(found, list), f"it returns {type(found).__name__}, not a list"
    assert len(found) == 4, f"{len(found)} steps, not 4"
    for number, (one, other) in enumerate(zip(found, expected), start=1):
        assert list(one.items()) == list(other.items()), f"step {number} is not {one}; go through it again from step 1"


# ---- the caps --------------------------------------------------------------------------------------------------------


def _limits(module, expected, hints=()):
    for arguments, right in expected:
        found = _number(module.chunk_limit(*arguments), f"chunk_limit{arguments}")
        hint = next((words for value, words in hints if value(arguments) == found), "")
        assert found == right, f"chunk_limit{arguments} is {found}, and {right} is right{hint}"


def check_the_threshold_limits(module):
    """With other requests, one gets the threshold at most; without a threshold, the whole budget."""
    cases = (((8192, 512, 3), 512), ((64, 5, 2), 5), ((65_536, 0, 7), 65_536), ((1, 0, 1), 1), ((16, 1, 200), 1))
    _limits(module, cases, [(lambda a: 0, ": 0 means no threshold"), (lambda a: a[0] // a[2], ": it is not adaptive")])


def check_a_lone_request_has_the_whole_budget(module):
    """Without other requests the threshold is off; one more, running or waiting, turns it on."""
    cases = (((8192, 512, 1), 8192), ((12, 5, 1), 12), ((12, 5, 2), 5), ((12, 0, 1), 12), ((12, 3, 1, True), 12))
    _limits(module, cases, [(lambda a: a[1], ": it starves nobody, so nothing is gained")])


def check_an_adaptive_limit_is_a_fair_share_at_least(module):
    """An adaptive limit is an equal share of the budget if that is more than the threshold."""
    cases = (
        ((8192, 512, 4, True), 2048),
        ((8192, 512, 100, True), 512),
        ((12, 4, 2, True), 6),
        ((12, 4, 3, True), 4),
        ((13, 2, 4, True), 3),
        ((12, 0, 3, True), 12),
        ((8192, 512, 4, False), 512),
    )
    hints = [
        (lambda a: min(a[1], a[0] // a[2]), ": it raises the limit, and never lowers it"),
        (lambda a: a[0] // a[2], ": where no threshold is set there is nothing to adapt"),
    ]
    _limits(module, cases, hints)


def check_running_requests_get_what_is_left(module):
    """A running request gets what it lacks, up to the limit and the rest of the budget."""
    for arguments, right in (
        ((1000, 512, 8192), 512), ((1000, 512, 300), 300), ((200, 512, 300), 200), ((1, 512, 8), 1), ((7, 5, 0), 0),
        ((9, 9, 9), 9), ((1, 5, 0), 0), ((100_000, 20_000, 30_000), 20_000),
    ):  # fmt: skip
        found = _number(module.running_tokens(*arguments), f"running_tokens{arguments}")
        assert found == right, f"running_tokens{arguments} is {found}, and {right} is right"


def check_a_waiting_prompt_is_cut(module):
    """The head of the queue gets what it lacks, up to the limit and the rest of the budget."""
    for arguments, right in (
        ((1000, 512, 300), 300), ((1000, 512, 512), 512), ((1000, 5000, 300), 300), ((20, 512, 300), 20),
        ((5, 1, 9), 1),
    ):  # fmt: skip
        found = _number(module.admitted_tokens(*arguments), f"admitted_tokens{arguments}")
        assert found == right, f"admitted_tokens{arguments} is {found}, and {right} is right"


def check_without_chunked_prefill_the_budget_cuts_nobody(module):
    """A prompt that may not be cut waits for a step with room for what it wants, which the limit still caps."""
    for arguments, right, hint in (
        ((1000, 2048, 300, False), 0, ": 300 are left, so it would be cut"),
        ((1000, 2048, 1000, False), 1000, ": it fits exactly"),
        ((1000, 2048, 999, False), 0, ""),
        ((20, 2048, 300, False), 20, ""),
        ((1000, 512, 512, False), 512, ": under the limit it wants 512, and these fit"),
        ((1000, 512, 600, False), 512, ": under the limit it wants 512, and these fit"),
        ((1000, 512, 511, False), 0, ": under the limit it wants 512, and 511 are left"),
        ((1000, 2048, 300, True), 300, ": it may be cut"),
    ):
        found = _number(module.admitted_tokens(*arguments), f"admitted_tokens{arguments}")
        assert found == right, f"admitted_tokens{arguments} is {found}, and {right} is right{hint}"


# ---- what it costs ---------------------------------------------------------------------------------------------------


def check_steps_of_a_prompt(module):
    """A prompt takes what decodes leave of each step; if they leave nothing, it is never computed."""
    for arguments, right in (
        ((1000, 256, 56), 5), ((1000, 1000, 0), 1), ((1001, 1000, 0), 2), ((8, 9, 8), 8), ((1, 256, 255), 1),
        ((1, 64, 64), math.inf), ((100, 64, 70), math.inf), ((100_000, 16_384, 0), 7), ((100_001, 100_000, 0), 2),
    ):  # fmt: skip
        found = module.steps_of_a_prompt(*arguments)
        whole = found == math.inf or isinstance(found, int)
        assert whole, f"steps_of_a_prompt{arguments} is {found!r}, not a whole number"
        assert found == right, f"steps_of_a_prompt{arguments} is {found}, and {right} is right"


def check_keys_read_again(module):
    """Each chunk reads all keys before it: c · N(N − 1)/2 in N whole chunks, and the last one may be smaller."""
    for prompt, chunk in ((8, 8), (8, 4), (10, 4), (9, 3), (1, 1), (5, 1), (1000, 64), (64, 1000)):
        right = sum(start for start in range(0, prompt, chunk))
        found = _number(module.keys_read_again(prompt, chunk), f"keys_read_again({prompt}, {chunk})")
        hint = ". The first read of a key does not count" if found == right + prompt else ""
        hint = ". A smaller last chunk reads the keys before it, too" if prompt % chunk and found < right else hint
        assert found == right, f"keys_read_again({prompt}, {chunk}) is {found}, and {right} is right{hint}"


def check_knee(module):
    """The knee is where a step's operations take as long as its bytes."""
    for flops, bandwidth, size, right in (
        (1000, 10, 2, 100), (989.4e12, 3.35e12, 2, 295.34), (312e12, 2.039e12, 2, 153.02),
        (312e12, 2.039e12, 0.5, 38.25), (100e9, 25e9, 4, 8),
    ):  # fmt: skip
        found = module.knee(flops, bandwidth, size)
        hint = ". A token costs two operations a parameter" if math.isclose(found, 2 * right, rel_tol=1e-3) else ""
        hint = ". Fewer bytes are read sooner" if size == 0.5 and found > right else hint
        assert math.isclose(found, right, rel_tol=1e-3), f"{found:.4g}, and {right:.4g} tokens are right{hint}"


def check_budget_for(module):
    """The largest budget in time; 0 where the weights alone take longer; the two times run side by side."""
    for arguments, right in (
        ((0.5, 10, 2, 1000, 100), 25), ((0.1, 10, 2, 1000, 100), 0), ((0.2, 10, 2, 1000, 100), 10),
        ((0.05, 8e9, 2, 900e12, 3e12), 2812), ((0.005, 8e9, 2, 900e12, 3e12), 0), ((0.01, 8e9, 2, 900e12, 3e12), 562),
        ((0.5, 10, 4, 996, 100), 24), ((0.3, 10, 4, 1000, 100), 0), ((0.06, 10, 0.5, 1000, 100), 3),
        ((0.5, 1e9, 2, 900e12, 3e12), 225_000), ((0.5, 10, 2, 10, 100), 0),
    ):  # fmt: skip
        found = _number(module.budget_for(*arguments), f"budget_for{arguments}")
        gap, parameters, size, flops, bandwidth = arguments
        summed = max(0, math.floor((gap - parameters * size / bandwidth) * flops / (2 * parameters)))
        hint = ". Reading and computing go on at the same time" if right and found == summed else ""
        assert found == right, f"budget_for{arguments} is {found}, and {right} is right{hint}"


# ---- the kernel ------------------------------------------------------------------------------------------------------

SHAPE, OTHER_SHAPE = (3, 2, 20), (4, 1, 24)
"""Query heads of a group, KV heads, head dim."""
BLOCK_SIZE, DECODE_M, CHUNK_M, BLOCK_T = 4, 4, 16, 16
QUERIES, LENGTHS, DECODES = [1, 1, 7, 5, 1, 11], [9, 30, 7, 18, 21, 25], 2
"""Two decodes, then chunks: a whole prompt, a later chunk, a chunk of one token, one of several tiles."""


@triton.jit
def _tiles_kernel(found, query_start_loc, num_decodes, num_seqs, FIND: tl.constexpr, BLOCK_Q: tl.constexpr):
    request, first = FIND(query_start_loc, tl.program_id(0), num_decodes, num_seqs, BLOCK_Q)
    tl.store(found + 2 * tl.program_id(0), request)
    tl.store(found + 2 * tl.program_id(0) + 1, first)


@triton.jit
def _attend_kernel(
    out, q, k_cache, v_cache, query_start_loc, seq_lens, block_table, request, first, width, scale,
    ATTEND: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    mine, its = tl.load(request), tl.load(first)
    ATTEND(
        out, q, k_cache, v_cache, query_start_loc, seq_lens, block_table, mine, its, tl.program_id(0), width, scale,
        GROUP, KV_HEADS, HEAD_DIM, BLOCK_D, BLOCK_SIZE, BLOCK_M, BLOCK_T,
    )  # fmt: skip


def _starts(lengths):
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def _clean(trace):
    for found in (trace.races, trace.out_of_bounds):
        assert not found, f"{found[0]}. Do rows that are not the request's have a mask?"


def _tiles(queries, decodes, tile):
    """List (request, first token) of every tile, by the rule."""
    starts = _starts(queries).tolist()
    first = [i if i < decodes else (starts[i] - decodes) // tile + i for i in range(len(queries))]
    found = []
    for number in range(decodes + (starts[-1] - decodes) // tile + len(queries) - decodes):
        owner = number if number < decodes else max(i for i in range(decodes, len(queries)) if first[i] <= number)
        found.append((owner, 0 if number < decodes else (number - first[owner]) * tile))
    return found


def check_tiles_find_their_request(module):
    """Stretch: a decode's tile is its own; a chunk's tile is found by halving, among the chunks alone."""
    mixed = ([1, 1, 7, 3], 2), ([1, 17], 1), ([1, 1, 1, 5, 1, 8], 3), ([1] * 5 + [3] * 24, 5)
    cases = *mixed, ([1, 1, 1], 3), ([9, 4, 4], 0)
    for queries, decodes in cases:
        expected = _tiles(queries, decodes, 4)
        found = torch.full((len(expected), 2), -1, dtype=torch.int32)
        arguments = found, _starts(queries), decodes, len(queries)
        trace = trace_kernel(_tiles_kernel, (len(expected),), *arguments, FIND=module.find_tile, BLOCK_Q=4)
        tiles, where = [tuple(one) for one in found.tolist()], f"rows {queries}, {decodes} decodes, tiles of 4"
        for number, (one, right) in enumerate(zip(tiles, expected)):
            hint = ": a decode's tile is the request of its number" if number < decodes else ""
            assert one == right, f"{where}: tile {number} is {one}, and {right} is right{hint}"
        most = len(expected) * (math.floor(math.log2(max(1, len(queries) - decodes))) + 3)
        read = trace.bytes_read // 4
        assert read <= most, f"{where}: {read} entries read, {most} are enough if you halve"


@lru_cache(maxsize=2)
def _case(shape):
    group, kv_heads, head_dim = shape
    draw = torch.Generator().manual_seed(0)
    counts = [-(-length // BLOCK_SIZE) for length in LENGTHS]
    ids, table = iter((torch.randperm(sum(counts), generator=draw) + 1).tolist()), torch.zeros(6, max(counts)).int()
    for row, count in enumerate(counts):
        table[row, :count] = torch.tensor([next(ids) for _ in range(count)])
    q = torch.randn(sum(QUERIES), group * kv_heads, head_dim, generator=draw)
    caches = torch.randn(2, sum(counts) + 1, BLOCK_SIZE, kv_heads, head_dim, generator=draw)
    starts, out = _starts(QUERIES).tolist(), torch.empty_like(q, dtype=torch.float64)
    for index, (new, length) in enumerate(zip(QUERIES, LENGTHS)):
        keys, values = caches[:, table[index].long()].flatten(1, 2)[:, :length].double()
        for row in range(new):
            for head in range(group * kv_heads):
                k, v = (one[: length - new + row + 1, head // group] for one in (keys, values))
                weights = torch.softmax(k @ q[starts[index] + row, head].double() / math.sqrt(head_dim), 0)
                out[starts[index] + row, head] = weights @ v
    return q, caches, table, out


def _sizes(shape):
    group, kv_heads, head_dim = shape
    return {
        "GROUP": group, "KV_HEADS": kv_heads, "HEAD_DIM": head_dim, "BLOCK_D": triton.next_power_of_2(head_dim),
        "BLOCK_SIZE": BLOCK_SIZE, "BLOCK_T": BLOCK_T,
    }  # fmt: skip


def check_a_tile_attends_for_a_whole_group(module):
    """Stretch: a tile has the tokens of one request, each with all heads of the group, and writes no other row."""
    for shape, request, first, rows in (
        (SHAPE, 1, 0, 4), (SHAPE, 3, 0, 16), (SHAPE, 5, 5, 16), (SHAPE, 5, 10, 16), (SHAPE, 2, 10, 16),
        (OTHER_SHAPE, 5, 4, 16),
    ):  # fmt: skip
        _attends(module, shape, request, first, rows)


def _attends(module, shape, request, first, rows):
    """Run one tile; its rows are right, and no other row is written."""
    q, caches, table, expected = _case(shape)
    starts, (group, kv_heads, head_dim) = _starts(QUERIES).tolist(), shape
    out = torch.full_like(q, float("nan"))
    place = (torch.tensor([number], dtype=torch.int32) for number in (request, first))
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    arguments = out, q, *caches, _starts(QUERIES), lengths, table, *place, table.shape[1], head_dim**-0.5
    sizes = {"ATTEND": module.attend_tile, "BLOCK_M": rows, **_sizes(shape)}
    trace = trace_kernel(_attend_kernel, (kv_heads,), *arguments, **sizes)
    _clean(trace)
    begin = starts[request] + first
    end = max(begin, min(begin + rows // group, starts[request + 1]))
    what = f"tokens {first} to {first + end - begin} of request {request}, {group} heads of {head_dim} a group"
    written = ~torch.isnan(out).any(-1).any(-1)
    others = [token for token in written.nonzero().flatten().tolist() if not begin <= token < end]
    assert not others, f"{what}: row {others[0]} is written, which is not in this tile"
    assert written[begin:end].all(), f"{what}: a row, or a head of it, is not written"
    off = (out[begin:end].double() - expected[begin:end]).abs().amax((0, 2)) if end > begin else torch.zeros(1)
    wrong = (off > 1e-4).nonzero().flatten().tolist()
    hint = ", only in some heads: row i is head i % GROUP" if wrong and len(wrong) < group * kv_heads else ""
    assert not wrong, f"{what} is off by {float(off.max()):.2g}{hint}"


@lru_cache(maxsize=3)
def _traced(module, decode_rows=DECODE_M, shape=SHAPE):
    q, caches, table, expected = _case(shape)
    group, kv_heads, head_dim = shape
    out, tile = torch.full_like(q, float("nan")), CHUNK_M // group
    tiles = DECODES + (len(q) - DECODES) // tile + len(QUERIES) - DECODES if decode_rows == DECODE_M else DECODES
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    arguments = out, q, *caches, _starts(QUERIES), lengths, table, DECODES, len(QUERIES), table.shape[1], head_dim**-0.5
    sizes = {"DECODE_M": decode_rows, "CHUNK_M": CHUNK_M, **_sizes(shape)}
    trace = trace_kernel(module.mixed_kernel, (tiles, kv_heads), *arguments, **sizes)
    return trace, out, expected


def check_one_launch_serves_the_step(module):
    """Stretch: one launch computes a step's decodes and chunks: all rows right, none written twice."""
    for shape in (SHAPE, OTHER_SHAPE):
        trace, out, expected = _traced(module, shape=shape)
        _clean(trace)
        starts = _starts(QUERIES).tolist()
        for index, new in enumerate(QUERIES):
            rows = slice(starts[index], starts[index] + new)
            missing = torch.isnan(out[rows]).any(-1).any(-1)
            where = f"{shape[0]} heads a group, request {index}"
            assert not missing.any(), f"{where}: token {int(missing.int().argmax())} of its {new} is not written"
            off = float((out[rows].double() - expected[rows]).abs().max())
            assert off < 1e-4, f"{where}, {new} tokens of {LENGTHS[index]} keys, is off by {off:.2g}"


def check_each_kind_has_tiles_of_its_size(module):
    """Stretch: decodes have DECODE_M rows, chunks CHUNK_M; keys are read once a tile, up to the last that it sees."""
    trace, out, _ = _traced(module)
    group, kv_heads, head_dim = SHAPE
    tile, ends = CHUNK_M // group, list(LENGTHS[:DECODES])
    for new, length in zip(QUERIES[DECODES:], LENGTHS[DECODES:]):
        ends += [length - new + min(first + tile, new) for first in range(0, new, tile)]
    row = 4 * kv_heads * head_dim
    for name in ("k_cache", "v_cache"):
        read, right = trace.arguments[name].bytes_read, sum(ends) * row
        hint = ". Do tiles read to the end of their request?" if read > right else ". Are tiles larger than CHUNK_M?"
        assert read == right, f"{read:,} bytes of {name} are read, and {right:,} are right{hint}"
    assert trace.bytes_written == out.nbytes, f"{trace.bytes_written:,} bytes written; out has {out.nbytes:,}"
    _, out, _ = _traced(module, group - 1)
    written = ~torch.isnan(out[:DECODES])
    assert not written.any(), f"with DECODE_M {group - 1}, too few for {group} heads, decodes are computed. By whom?"


# ---- in the engine ---------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _recorded():
    """Return (name, workload, trace) of every workload recorded from vLLM's scheduler, those with a threshold first."""
    return sorted(recorded(RECORDED), key=lambda one: not one[1]["config"]["long_prefill_token_threshold"])


def check_vllm_decided_the_same(module):
    """In all 12,718 steps of 74 workloads recorded from vLLM v0.33.0, your caps lead to what its scheduler decided."""
    for name, workload, trace in _recorded():
        served = Replay(workload, partial(Scheduler, policy=_capped(module)))
        for step, right in enumerate(trace):
            served.arrive()
            row = served.run()
            config = workload["config"]
            sizes = f"budget {config['max_num_batched_tokens']}, threshold {config['long_prefill_token_threshold']}"
            cut = "" if config["enable_chunked_prefill"] else ", nothing may be cut"
            where = f"{name} ({sizes}{cut}), step {step}"
            assert row["scheduled"] == right["scheduled"], (
                f"{where}: {dict(row['scheduled'])}, and in vLLM {dict(right['scheduled'])}"
            )


def plug(module) -> Plugged:
    """Use the learner's caps in both loops of the engine, with a threshold, a small budget and a tight pool."""
    return Plugged(
        parts=Parts(policy=_capped(module)),
        engine_args={
            "num_gpu_blocks_override": 16, "block_size": 4, "max_model_len": 48, "max_num_batched_tokens": 12,
            "long_prefill_token_threshold": 3, "long_prefill_token_threshold_adaptive": True,
            "enable_prefix_caching": False,
        },
    )  # fmt: skip
