"""Check the part of exercise 04 that needs nothing but Python: a page runs these checks, too."""

import math
import random
from collections import deque
from types import SimpleNamespace

from minivllm.config import CacheConfig, SchedulerConfig
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler
from minivllm.core.scheduler_output import ModelRunnerOutput
from minivllm_lab.continuous_batching.learner_policy import CountedPool

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
    names = [str(100 + 17 * index % 31) for index in range(24)]  # their order is not that of arrival
    for seed in range(60):
        draw = random.Random(seed)
        budget, places, size = draw.choice([1, 3, 8, 16, 64]), draw.randint(1, 6), draw.choice([1, 4, 16])
        blocks = AMPLE if seed % 3 == 0 else -(-46 // size) + draw.randint(0, 40) // size
        limits = budget, places, blocks, size, draw.choice([0, 0, 2, 5])
        arrivals = [
            [(names[3 * step + i], draw.randint(1, 40), draw.randint(1, 6)) for i in range(draw.choice([0, 0, 1, 3]))]
            for step in range(8)
        ]
        ours, engines = module_steps(module, arrivals, *limits), engine_steps(arrivals, *limits)
        for step, ((one, queue), (other, others)) in enumerate(zip(ours, engines), start=1):
            where = f"workload {seed} (budget {budget}, {places} places, {blocks} blocks of {size}), step {step}: "
            _same(one, other, where)
            assert queue == others, f"{where}{queue} wait, and in the engine {others}"
        assert len(ours) == len(engines), f"workload {seed} takes {len(ours)} steps, the engine's {len(engines)}"
