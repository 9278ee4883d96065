"""What must be true of exercise 04, and of the script that solves it."""

import random
from collections import deque
from types import SimpleNamespace

from minivllm.core.output import ModelRunnerOutput
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler
from minivllm.config import CacheConfig, SchedulerConfig

PUZZLE = {"A": (10, 3), "B": (4, 2), "C": (12, 4), "D": (3, 2)}


def engine_steps(arrivals, token_budget, max_num_seqs):
    """Tokens by request in every step of the engine's scheduler, where memory is ample.

    `arrivals` lists, for each step, the (name, prompt, output) of the requests that come before it.
    """
    scheduler = Scheduler(
        SchedulerConfig(max_model_len=4096, max_num_batched_tokens=token_budget, max_num_seqs=max_num_seqs),
        CacheConfig(num_gpu_blocks=4096, enable_prefix_caching=False),
    )
    steps, coming = [], deque(arrivals)
    while coming or scheduler.has_unfinished_requests():
        for name, prompt, output in coming.popleft() if coming else ():
            scheduler.add_request(Request(name, [0] * prompt, max_tokens=output))
        decided = scheduler.schedule()
        steps.append(dict(decided.num_scheduled_tokens))
        live = scheduler.requests
        done = [name for name in steps[-1] if live[name].num_computed_tokens == live[name].num_tokens]
        scheduler.update_from_output(decided, ModelRunnerOutput({name: [1] for name in done}))
    return steps


def module_steps(module, arrivals, token_budget, max_num_seqs):
    """The same with the module's `schedule`."""
    running, waiting, steps, coming = [], deque(), [], deque(arrivals)
    while coming or running or waiting:
        waiting.extend(_request(*lengths) for lengths in (coming.popleft() if coming else ()))
        steps.append(module.schedule(running, waiting, token_budget, max_num_seqs))
        for request in running:
            if request.request_id in steps[-1] and request.num_computed_tokens == request.num_tokens:
                request.num_tokens += 1
                request.left -= 1
        running = [request for request in running if request.left > 0]
        assert len(steps) < 10_000, "after 10,000 steps the requests are still not served"
    return steps


def _request(name, prompt, output=5, computed=0):
    return SimpleNamespace(
        request_id=name, num_tokens=prompt, num_computed_tokens=computed, num_output_placeholders=0, left=output
    )


def _decoding(name, known=20):
    return _request(name, known, computed=known - 1)


def _gives(module, running, waiting, budget, places, expected):
    running, waiting = list(running), deque(waiting)
    everybody = [*running, *waiting]
    before = {request.request_id: request.num_computed_tokens for request in everybody}
    found = module.schedule(running, waiting, budget, places)
    assert isinstance(found, dict), f"it returns {type(found).__name__}, not a dict"
    assert list(found.items()) == list(expected.items()), f"it gives {found}, and {expected} is right"
    for request in everybody:
        counted = request.num_computed_tokens - before[request.request_id]
        given = expected.get(request.request_id, 0)
        assert counted == given, f"{request.request_id} got {given} tokens, but {counted} are counted as computed"
    return [request.request_id for request in running], [request.request_id for request in waiting]


def check_prediction(module):
    """Steps 1 to 4 of the puzzle are what the engine's scheduler decides."""
    expected = engine_steps([[(name, *lengths) for name, lengths in PUZZLE.items()]], 12, 3)[:4]
    found = module.first_steps()
    assert isinstance(found, list), f"it returns {type(found).__name__}, not a list"
    assert len(found) == 4, f"{len(found)} steps, not 4"
    for step, (one, other) in enumerate(zip(found, expected), start=1):
        assert list(one.items()) == list(other.items()), f"step {step} is not {one}; go through it again from step 1"


def check_running_requests_go_first(module):
    """Decodes get their token before a waiting prompt gets the rest, in the order of admission."""
    running = [_decoding("A"), _decoding("B")]
    order = _gives(module, running, [_request("C", 30)], 64, 8, {"A": 1, "B": 1, "C": 30})
    assert order == (["A", "B", "C"], []), f"afterwards {order[0]} run and {order[1]} wait"


def check_a_long_prompt_is_cut(module):
    """Of a prompt of 100 tokens, a step with 16 takes 15 beside a decode; the next step goes on at 15."""
    prompt = _request("B", 100)
    _gives(module, [_decoding("A")], [prompt], 16, 8, {"A": 1, "B": 15})
    _gives(module, [_decoding("A"), prompt], [], 16, 8, {"A": 1, "B": 15})
    assert prompt.num_computed_tokens == 30, f"{prompt.num_computed_tokens} tokens of the prompt are computed, not 30"


def check_nobody_is_admitted_for_nothing(module):
    """When the budget is gone, the rest keeps waiting; a small request behind a large one too."""
    order = _gives(module, [], [_request(name, 10) for name in "ABC"], 20, 8, {"A": 10, "B": 10})
    assert order == (["A", "B"], ["C"]), f"afterwards {order[0]} run and {order[1]} wait"


def check_places_are_limited(module):
    """No more than max_num_seqs run, those admitted in this step included."""
    waiting = [_request(name, 2) for name in "BCD"]
    order = _gives(module, [_decoding("A")], waiting, 64, 3, {"A": 1, "B": 2, "C": 2})
    assert order == (["A", "B", "C"], ["D"]), f"afterwards {order[0]} run and {order[1]} wait"


def check_budget_below_the_batch(module):
    """With a budget of 2, the first two of four decodes get a token and the others none."""
    _gives(module, [_decoding(name) for name in "ABCD"], [_request("E", 5)], 2, 8, {"A": 1, "B": 1})


def check_no_phases(module):
    """A chunk of a prompt, a decode and a new prompt share a step; what was sampled before counts as known."""
    middle, resumed = _request("A", 40, computed=32), _request("C", 25)
    _gives(module, [middle, _decoding("B")], [resumed], 64, 8, {"A": 8, "B": 1, "C": 25})


def check_nothing_to_do(module):
    """Without requests, the step is empty."""
    _gives(module, [], [], 64, 8, {})


def check_the_engine_decides_the_same(module):
    """On 40 random workloads, every step equals the step of the engine's scheduler."""
    for seed in range(40):
        draw = random.Random(seed)
        budget, places = draw.choice([1, 3, 8, 16, 64]), draw.randint(1, 6)
        arrivals = [
            [(f"{step}.{i}", draw.randint(1, 40), draw.randint(1, 6)) for i in range(draw.choice([0, 0, 1, 3]))]
            for step in range(8)
        ]
        ours, engines = module_steps(module, arrivals, budget, places), engine_steps(arrivals, budget, places)
        for step, (one, other) in enumerate(zip(ours, engines), start=1):
            assert list(one.items()) == list(other.items()), (
                f"workload {seed} (budget {budget}, {places} places), step {step}: {one}, and the engine {other}"
            )
        assert len(ours) == len(engines), f"workload {seed} takes {len(ours)} steps, the engine's {len(engines)}"
