"""Check exercise 04 and the script that solves it, and serve requests with the learner's scheduler."""

import math
import random
from collections import deque
from functools import lru_cache
from itertools import accumulate
from types import SimpleNamespace

import torch

from minivllm.config import CacheConfig, Parts, SchedulerConfig
from minivllm.core.scheduler_output import ModelRunnerOutput
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler
from minivllm_lab.continuous_batching.learner_policy import CountedPool, learner_policy
from minivllm_lab.kernel_trace import trace_kernel
from minivllm_lab.plugged import Plugged
from minivllm.platforms.triton_utils import tl, triton

PUZZLE = {"A": (10, 3), "B": (4, 2), "C": (12, 4), "D": (3, 2)}
AMPLE = 4096


# ---- the engine's scheduler, and the learner's in the same loop ------------------------------------------------------


def engine_steps(arrivals, token_budget, max_num_seqs, blocks=AMPLE, block_size=16, threshold=0):
    """Return the tokens by request in each step of the engine's scheduler, and the requests that still wait then.

    `arrivals` lists, for each step, the (name, prompt, output) of the requests that come before it.
    """
    scheduler = Scheduler(
        SchedulerConfig(
            max_model_len=min(4096, blocks * block_size),
            max_num_batched_tokens=token_budget,
            max_num_seqs=max_num_seqs,
            long_prefill_token_threshold=threshold,
        ),
        CacheConfig(num_gpu_blocks=blocks + 1, block_size=block_size, enable_prefix_caching=False),
    )
    steps, coming = [], deque(arrivals)
    while coming or scheduler.has_unfinished_requests():
        for name, prompt, output in coming.popleft() if coming else ():
            scheduler.add_request(Request(name, [0] * prompt, max_tokens=output))
        decided, live = scheduler.schedule(), scheduler.requests
        steps.append((dict(decided.num_scheduled_tokens), [request.request_id for request in scheduler.waiting]))
        done = [name for name in steps[-1][0] if live[name].num_computed_tokens == live[name].num_tokens]
        scheduler.update_from_output(decided, ModelRunnerOutput({name: [1] for name in done}))
    return steps


def module_steps(module, arrivals, token_budget, max_num_seqs, blocks=AMPLE, block_size=16, threshold=0):
    """Return the same with the module's `schedule`."""
    running, waiting, steps, coming = [], deque(), [], deque(arrivals)
    pool = CountedPool(blocks, block_size)
    while coming or running or waiting:
        waiting.extend(_request(*lengths) for lengths in (coming.popleft() if coming else ()))
        alone = len(running) + len(waiting) == 1
        limit = token_budget if alone or not threshold else threshold
        given = module.schedule(running, waiting, pool, token_budget, limit, max_num_seqs)
        steps.append((given, [request.request_id for request in waiting]))
        for request in running:
            if request.request_id in given and request.num_computed_tokens == request.num_tokens:
                request.num_tokens += 1
                request.left -= 1
        pool.num_free_blocks += sum(request.num_blocks for request in running if request.left == 0)
        running = [request for request in running if request.left > 0]
        assert len(steps) < 2_000, "after 2,000 steps the requests are still not served"
    assert pool.num_free_blocks == blocks, f"{pool.num_free_blocks} of {blocks} blocks are free when all are served"
    return steps


def _request(name, prompt, output=5, computed=0, blocks=0):
    return SimpleNamespace(
        request_id=name, num_tokens=prompt, num_computed_tokens=computed, num_blocks=blocks, left=output
    )


def _decoding(name, known=20, blocks=2):
    return _request(name, known, computed=known - 1, blocks=blocks)


def _gives(module, running, waiting, expected, budget=64, limit=None, places=8, free=AMPLE, block_size=16):
    """Schedule a step from this state and check it; return the names in `running` and `waiting`, and free blocks."""
    running, waiting, pool = list(running), deque(waiting), CountedPool(free, block_size)
    everybody = {request.request_id: request for request in (*running, *waiting)}
    before = {name: request.num_computed_tokens for name, request in everybody.items()}
    held = free + sum(request.num_blocks for request in everybody.values())
    found = module.schedule(running, waiting, pool, budget, limit or budget, places)
    assert isinstance(found, dict), f"it returns {type(found).__name__}, not a dict"
    _same(found, expected, "")
    names = [request.request_id for request in running], [request.request_id for request in waiting]
    for name in names[0]:
        counted, given = everybody[name].num_computed_tokens - before[name], expected.get(name, 0)
        assert counted == given, f"{name} got {given} tokens, but {counted} are counted as computed"
        needed = math.ceil(everybody[name].num_computed_tokens / block_size)
        assert everybody[name].num_blocks >= needed, f"{name} holds {everybody[name].num_blocks} blocks, not {needed}"
    now = pool.num_free_blocks + sum(request.num_blocks for request in everybody.values())
    assert now == held, f"{held} blocks before the step, held or free, and {now} after it"
    return *names, pool.num_free_blocks


def _same(found, expected, where):
    if list(found.items()) == list(expected.items()):
        return
    if found == expected:
        hint = "the right tokens in another order. Running requests go in the order of admission, decodes or not"
    elif 0 in found.values():
        hint = "nobody is listed with 0 tokens"
    elif set(found) - set(expected):
        hint = f"{', '.join(sorted(set(found) - set(expected)))} should get nothing in this step"
    elif set(expected) - set(found):
        hint = f"{', '.join(sorted(set(expected) - set(found)))} should be in this step"
    else:
        hint = "the sizes differ"
    raise AssertionError(f"{where}it gives {found}, and {expected} is right: {hint}")


# ---- on paper --------------------------------------------------------------------------------------------------------


def check_prediction(module):
    """Steps 1 to 4 of the puzzle are what the engine's scheduler decides."""
    expected = engine_steps([[(name, *lengths) for name, lengths in PUZZLE.items()]], 12, 3)[:4]
    found = module.first_steps()
    assert isinstance(found, list), f"it returns {type(found).__name__}, not a list"
    assert len(found) == 4, f"{len(found)} steps, not 4"
    for step, (one, (other, _)) in enumerate(zip(found, expected), start=1):
        assert list(one.items()) == list(other.items()), f"step {step} is not {one}; go through it again from step 1"


# ---- the scheduler ---------------------------------------------------------------------------------------------------


def check_blocks_missing(module):
    """Blocks are counted whole, and those that a request holds count."""
    for held, tokens, size, expected in ((0, 1, 4, 1), (0, 5, 4, 2), (2, 9, 4, 1), (2, 8, 4, 0), (0, 12, 4, 3), (3, 5, 4, 0),
                                         (1, 33, 16, 2)):  # fmt: skip
        found = module.blocks_missing(_request("A", 1, blocks=held), tokens, size)
        hint = {
            tokens // size + 1 - held: ". A full block needs no further one",
            tokens // size - held: ". A block that is begun counts",
            math.ceil(tokens / size): f". It holds {held} already",
        }.get(found, "")
        hint = ". It has more than it needs, and gives none back" if found < 0 else hint
        assert found == expected, (
            f"{tokens} tokens in blocks of {size}, {held} held: {found}, and {expected} is right{hint}"
        )


def check_preemption_takes_the_memory_of_the_last(module):
    """The request admitted last returns its blocks, forgets what was computed, keeps its tokens, and is next."""
    running, waiting = [_decoding("A"), _decoding("B", 40, blocks=3)], deque([_request("C", 9)])
    pool, last = CountedPool(1, 16), running[1]
    module.preempt_last(running, waiting, pool)
    assert [one.request_id for one in running] == ["A"], f"{[one.request_id for one in running]} run, and A should"
    assert [one.request_id for one in waiting] == ["B", "C"], f"{[one.request_id for one in waiting]} wait, not B, C"
    assert last.num_tokens == 40, f"it has {last.num_tokens} tokens, not 40: what it has sampled stays known"
    assert last.num_computed_tokens == 0, f"{last.num_computed_tokens} tokens still count as computed"
    assert (last.num_blocks, pool.num_free_blocks) == (0, 4), (
        f"it holds {last.num_blocks} blocks and {pool.num_free_blocks} are free; 0 and 4 are right"
    )


def check_running_requests_go_first(module):
    """Running requests get their tokens before a waiting prompt gets the rest."""
    running = [_decoding("A"), _decoding("B")]
    runs, waits, _ = _gives(module, running, [_request("C", 30)], {"A": 1, "B": 1, "C": 30})
    assert (runs, waits) == (["A", "B", "C"], []), f"afterwards {runs} run and {waits} wait"


def check_a_long_prompt_is_cut(module):
    """Of a prompt of 100 tokens, a step with 16 takes 15 beside a decode; the next step goes on at 15."""
    prompt = _request("B", 100)
    _gives(module, [_decoding("A")], [prompt], {"A": 1, "B": 15}, budget=16)
    _gives(module, [_decoding("A"), prompt], [], {"A": 1, "B": 15}, budget=16)
    assert prompt.num_computed_tokens == 30, f"{prompt.num_computed_tokens} tokens of the prompt are computed, not 30"


def check_the_order_is_that_of_admission(module):
    """A chunk that was admitted before a decode goes before it, and a full budget goes to the first in the list."""
    first = _request("A", 40, computed=32, blocks=2)
    _gives(module, [first, _decoding("B")], [_request("C", 25)], {"A": 8, "B": 1, "C": 25})
    first = _request("A", 40, computed=16, blocks=1)
    _gives(module, [first, _decoding("B"), _decoding("C")], [], {"A": 16}, budget=16)


def check_no_request_gets_more_than_the_chunk_limit(module):
    """A chunk ends at the limit, and the next request starts beside it, running or new."""
    prompts = [_request("B", 100), _request("C", 50), _request("D", 50)]
    _gives(module, [_decoding("A")], prompts, {"A": 1, "B": 8, "C": 8, "D": 3}, budget=20, limit=8)
    running = [_request("A", 40, computed=8, blocks=1), _decoding("B")]
    _gives(module, running, [], {"A": 8, "B": 1}, budget=20, limit=8)


def check_nobody_is_admitted_for_nothing(module):
    """When the budget is used up, the rest keeps waiting, and so does a small request behind a large one."""
    runs, waits, _ = _gives(module, [], [_request(name, 10) for name in "ABC"], {"A": 10, "B": 10}, budget=20)
    assert (runs, waits) == (["A", "B"], ["C"]), f"afterwards {runs} run and {waits} wait"


def check_places_are_limited(module):
    """No more than max_num_seqs run, including those admitted in this step."""
    waiting = [_request(name, 2) for name in "BCD"]
    runs, waits, _ = _gives(module, [_decoding("A")], waiting, {"A": 1, "B": 2, "C": 2}, places=3)
    assert (runs, waits) == (["A", "B", "C"], ["D"]), f"afterwards {runs} run and {waits} wait"


def check_budget_below_the_batch(module):
    """With a budget of 2, the first two of four decodes get a token and the others none."""
    _gives(module, [_decoding(name) for name in "ABCD"], [_request("E", 5)], {"A": 1, "B": 1}, budget=2)


def check_the_last_makes_room(module):
    """Without a free block the last request is preempted; the step then admits none, whatever was freed."""
    running = [_decoding("A", 13, blocks=3), _decoding("B", 7, blocks=2), _decoding("C", 6, blocks=2)]
    runs, waits, free = _gives(module, running, [_request("D", 2)], {"A": 1, "B": 1}, free=0, block_size=4)
    assert runs == ["A", "B"], f"afterwards {runs} run, and A and B should"
    assert waits == ["C", "D"], f"afterwards {waits} wait: C should be next, and nobody is admitted after a preemption"
    assert free == 1, f"{free} blocks are free: C returns 2, A takes 1"


def check_a_step_that_preempted_admits_nobody(module):
    """No request is admitted after a preemption, even if the victim, which held a block too many, would fit again."""
    running = [_decoding("A", 13, blocks=3), _decoding("B", 5, blocks=3)]  # B's drafts were rejected, as in lesson 07
    runs, waits, free = _gives(module, running, [], {"A": 1}, free=0, block_size=4)
    assert (runs, waits, free) == (["A"], ["B"], 2), f"{runs} run, {waits} wait, {free} blocks are free"


def check_as_many_make_room_as_are_needed(module):
    """A chunk that needs three blocks preempts two requests of two blocks; the one admitted earlier is next."""
    running = [_request("A", 40, computed=8, blocks=2), _decoding("B", 7, blocks=2), _decoding("C", 6, blocks=2)]
    runs, waits, free = _gives(module, running, [], {"A": 12}, budget=12, free=0, block_size=4)
    assert (runs, waits, free) == (["A"], ["B", "C"], 1), f"{runs} run, {waits} wait, {free} blocks are free"


def check_the_last_preempts_itself(module):
    """If the last request itself finds no block, it is preempted, and those before it keep theirs."""
    running = [_decoding("A", 6, blocks=2), _decoding("B", 13, blocks=3)]
    runs, waits, free = _gives(module, running, [_request("C", 2)], {"A": 1}, free=0, block_size=4)
    assert (runs, waits, free) == (["A"], ["B", "C"], 3), f"{runs} run, {waits} wait, {free} blocks are free"


def check_all_known_tokens_must_fit(module):
    """A request is admitted only if all its known tokens would fit; then it takes only the blocks of its chunk."""
    runs, waits, _ = _gives(module, [], [_request("A", 17), _request("B", 2)], {}, free=4, block_size=4)
    assert (runs, waits) == ([], ["A", "B"]), (
        f"afterwards {runs} run and {waits} wait: A's 17 tokens need 5 blocks of 4, 4 are free, and B may not overtake"
    )
    _, _, free = _gives(module, [], [_request("A", 17)], {"A": 6}, budget=6, free=5, block_size=4)
    assert free == 3, f"{free} of 5 blocks are free after 6 tokens: it takes 2 now, not the 5 of all its tokens"


def check_nothing_to_do(module):
    """Without requests, the step is empty."""
    _gives(module, [], [], {})


def check_the_engine_decides_the_same(module):
    """On 60 random workloads, roomy and tight, every step and every queue equals that of the engine's scheduler."""
    for seed in range(60):
        draw = random.Random(seed)
        budget, places, size = draw.choice([1, 3, 8, 16, 64]), draw.randint(1, 6), draw.choice([1, 4, 16])
        blocks = AMPLE if seed % 3 == 0 else -(-46 // size) + draw.randint(0, 40) // size
        limits = budget, places, blocks, size, draw.choice([0, 0, 2, 5])
        arrivals = [
            [(f"{step}.{i}", draw.randint(1, 40), draw.randint(1, 6)) for i in range(draw.choice([0, 0, 1, 3]))]
            for step in range(8)
        ]
        ours, engines = module_steps(module, arrivals, *limits), engine_steps(arrivals, *limits)
        for step, ((one, queue), (other, others)) in enumerate(zip(ours, engines), start=1):
            where = f"workload {seed} (budget {budget}, {places} places, {blocks} blocks of {size}), step {step}: "
            _same(one, other, where)
            assert queue == others, f"{where}{queue} wait, and in the engine {others}"
        assert len(ours) == len(engines), f"workload {seed} takes {len(ours)} steps, the engine's {len(engines)}"


# ---- the kernel ------------------------------------------------------------------------------------------------------

BLOCK_Q, BLOCK_T = 4, 16


@triton.jit
def _owners_kernel(owners, query_start_loc, num_seqs, FIND: tl.constexpr, BLOCK_Q: tl.constexpr):
    tile = tl.program_id(0)
    tl.store(owners + tile, FIND(query_start_loc, tile, num_seqs, BLOCK_Q))


def _starts(lengths):
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def _clean(trace):
    """Check that no program writes what another one reads or writes, or touches memory beside its tensors."""
    for found in (trace.races, trace.out_of_bounds):
        assert not found, f"{found[0]}. Do rows that are not the request's have a mask?"


def check_rows_see_their_own_keys(module):
    """Stretch: each row sees the keys up to itself: a decode all, a prompt 1, 2, 3 …, a chunk its context and more."""
    for queries, lengths in (([1, 5, 6], [10, 5, 6]), ([4, 1, 3], [10, 1, 9]), ([2, 0, 8], [2, 7, 30])):
        visible = torch.full((sum(queries),), -1, dtype=torch.int32)
        seq_lens = torch.tensor(lengths, dtype=torch.int32)
        trace = trace_kernel(module.visible_kernel, (len(queries),), visible, _starts(queries), seq_lens, BLOCK=8)
        _clean(trace)
        expected = [n - new + row + 1 for new, n in zip(queries, lengths) for row in range(new)]
        found = visible.tolist()
        hint = ""
        if found == [one - 1 for one in expected]:
            hint = ": these are positions; a row sees its own key too"
        elif found == [row + 1 for new in queries for row in range(new)]:
            hint = ": the keys computed before are missing; seq_len - query_len of them come first"
        assert found == expected, f"{queries} rows of {lengths} keys see {found}, and {expected} is right{hint}"


def check_tiles_find_their_request(module):
    """Stretch: a tile belongs to the last request that does not begin after it, found by halving."""
    for queries in ([1, 5, 6], [4, 4], [1] * 9, [0, 3, 0, 0, 9], [17]):
        starts, tiles = _starts(queries), sum(queries) // BLOCK_Q + len(queries)
        first = [start // BLOCK_Q + index for index, start in enumerate(starts.tolist()[:-1])]
        expected = [max(i for i in range(len(queries)) if first[i] <= tile) for tile in range(tiles)]
        owners = torch.full((tiles,), -1, dtype=torch.int32)
        arguments = (owners, starts, len(queries))
        trace = trace_kernel(_owners_kernel, (tiles,), *arguments, FIND=module.find_sequence, BLOCK_Q=BLOCK_Q)
        found = owners.tolist()
        hint = (
            ": one too far; the last that does not begin *after* the tile" if found == [x + 1 for x in expected] else ""
        )
        assert found == expected, f"rows {queries}, tiles of {BLOCK_Q}: owners {found}, and {expected} is right{hint}"
        most = tiles * (math.floor(math.log2(len(queries))) + 1)
        read = trace.bytes_read // 4
        assert read <= most, (
            f"{tiles} tiles, {len(queries)} requests: {read} entries read, {most} are enough if you halve"
        )


QUERIES, LENGTHS, GROUP, KV_HEADS, HEAD_DIM = [1, 5, 6, 0, 9], [40, 5, 22, 3, 9], 3, 2, 20


def _attention_by_row(q, keys, values):
    """Compute attention in float64, row by row."""
    out, starts, firsts = torch.empty_like(q), _starts(QUERIES).tolist(), _starts(LENGTHS).tolist()
    for index, (new, length) in enumerate(zip(QUERIES, LENGTHS)):
        for row in range(new):
            mine = slice(firsts[index], firsts[index] + length - new + row + 1)
            for head in range(GROUP * KV_HEADS):
                k, v = keys[mine, head // GROUP], values[mine, head // GROUP]
                weights = torch.softmax(k @ q[starts[index] + row, head] / math.sqrt(HEAD_DIM), 0)
                out[starts[index] + row, head] = weights @ v
    return out


@lru_cache(maxsize=1)  # two checks look at one launch
def _traced(module):
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(sum(QUERIES), GROUP * KV_HEADS, HEAD_DIM, generator=draw)
    keys, values = torch.randn(2, sum(LENGTHS), KV_HEADS, HEAD_DIM, generator=draw)
    out = torch.full_like(q, float("nan"))
    trace = trace_kernel(
        module.ragged_kernel, (len(q) // BLOCK_Q + len(QUERIES), GROUP * KV_HEADS), out, q, keys, values,
        _starts(QUERIES), _starts(LENGTHS), len(QUERIES), HEAD_DIM**-0.5, GROUP=GROUP, KV_HEADS=KV_HEADS,
        HEAD_DIM=HEAD_DIM, BLOCK_D=32, BLOCK_Q=BLOCK_Q, BLOCK_T=BLOCK_T,
    )  # fmt: skip
    return trace, out, _attention_by_row(q.double(), keys.double(), values.double())


def check_one_launch_serves_all(module):
    """Stretch: one launch serves a decode, a prompt, a chunk, an empty request and a prompt of several tiles."""
    trace, out, expected = _traced(module)
    _clean(trace)
    starts = _starts(QUERIES).tolist()
    for index, new in enumerate(QUERIES):
        rows = slice(starts[index], starts[index] + new)
        missing = torch.isnan(out[rows]).any(-1).any(-1)
        assert not missing.any(), f"request {index}: row {int(missing.int().argmax())} of its {new} is not written"
        off = (out[rows].double() - expected[rows]).abs()
        what = f"request {index}, {new} rows of {LENGTHS[index]} keys, is off by {float(off.max()) if new else 0:.2g}"
        heads = off.amax((0, 2)) > 1e-4 if new else torch.zeros(1, dtype=torch.bool)
        hint = (
            f", in heads {heads.nonzero().flatten().tolist()} only: which KV head is theirs?" if not heads.all() else ""
        )
        assert not heads.any(), what + hint


def check_only_keys_that_are_seen_are_read(module):
    """Stretch: each tile and head reads K and V once, up to the last key that it sees; `out` is written once."""
    trace, out, _ = _traced(module)
    ends = [
        length - new + min(tile + BLOCK_Q, new)
        for new, length in zip(QUERIES, LENGTHS)
        for tile in range(0, new, BLOCK_Q)
    ]
    whole = [length for new, length in zip(QUERIES, LENGTHS) for _ in range(0, new, BLOCK_Q)]
    row = 4 * HEAD_DIM * GROUP * KV_HEADS  # bytes of all heads
    least, other = 2 * sum(ends) * row + len(out) * row, 2 * sum(whole) * row + len(out) * row
    tiles = len(out) // BLOCK_Q + len(QUERIES)
    most = least + tiles * GROUP * KV_HEADS * 4 * (4 + math.floor(math.log2(len(QUERIES))) + 1)
    hint = " Do all tiles read to the end of their request?" if trace.bytes_read >= other else ""
    assert trace.bytes_read <= most, f"{trace.bytes_read:,} bytes read, and {most:,} are enough.{hint}"
    assert trace.bytes_written == len(out) * row, f"{trace.bytes_written:,} bytes written; out has {len(out) * row:,}"


# ---- in the engine ---------------------------------------------------------------------------------------------------


def plug(module) -> Plugged:
    """Let the learner's `schedule` decide every step of the engine, on a pool so small that it must preempt."""
    return Plugged(
        parts=Parts(policy=learner_policy(module.schedule)),
        engine_args={
            "num_gpu_blocks_override": 12, "block_size": 4, "max_model_len": 40, "max_num_batched_tokens": 12,
            "enable_prefix_caching": False,
        },
    )  # fmt: skip
