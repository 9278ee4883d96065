"""Check the part of exercise 11 that needs nothing but Python: a page runs these checks, too."""

import math
from functools import lru_cache, partial
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace

from minivllm.config import CacheConfig, SchedulerConfig
from minivllm.core.request import Request, RequestStatus
from minivllm.core.request_queue import create_request_queue
from minivllm.core.scheduler import Scheduler
from minivllm.core.scheduler_output import ModelRunnerOutput
from minivllm_lab.predict.workload import configs, recorded, Replay
from minivllm_lab.preemption.learner_policy import learner_policy

RECORDED = Path(__file__).parents[3] / "tests" / "conformance" / "data"


def _preempting(module):
    return learner_policy(module.schedule_running, module.resume_at)


def _close(found, right, what, hint=""):
    number = isinstance(found, (int, float)) and not isinstance(found, bool)
    assert number, f"{what} is {found!r}, not a number"
    assert math.isclose(found, right, rel_tol=1e-9), f"{what} is {found:.6g}, and {right:.6g} is right{hint}"


# ---- on paper --------------------------------------------------------------------------------------------------------


def check_prediction(module):
    """The preemptions and the tokens computed twice are those of the engine's scheduler."""
    limits = SchedulerConfig(max_model_len=8, max_num_batched_tokens=8)
    scheduler = Scheduler(limits, CacheConfig(num_gpu_blocks=6, block_size=2, enable_prefix_caching=False))
    for name, prompt, output in (("A", 3, 5), ("B", 3, 4)):
        scheduler.add_request(Request(name, [0] * prompt, max_tokens=output))
    steps = []
    while scheduler.has_unfinished_requests():
        decided, live = scheduler.schedule(), scheduler.requests
        steps.append(sorted(decided.preempted_req_ids))
        done = [n for n in decided.num_scheduled_tokens if live[n].num_computed_tokens == live[n].num_tokens]
        scheduler.update_from_output(decided, ModelRunnerOutput({name: [1] for name in done}))
    found = module.first_steps()
    assert isinstance(found, tuple), f"it returns {type(found).__name__}, not a list and a number"
    assert len(found) == 2, f"it returns {len(found)} values, not 2"
    for number, (one, right) in enumerate(zip(found[0], steps), start=1):
        assert list(one) == right, f"step {number} is not {one}; go through it again from step 1"
    assert len(found[0]) == len(steps), f"{len(found[0])} steps are not right"
    assert found[1] == scheduler.num_recomputed_tokens, f"{found[1]} tokens a second time is not right"


# ---- the victim, and what becomes of it ------------------------------------------------------------------------------


def _someone(name, priority=0, arrival=0.0):
    return SimpleNamespace(request_id=name, priority=priority, arrival_time=arrival)


def check_fcfs_takes_the_last_one_admitted(module):
    """First come, first served: the victim is the last in the list, whatever its arrival or priority."""
    for order in permutations([_someone("a", 0, 3.0), _someone("b", 9, 1.0), _someone("c", 5, 2.0)]):
        running = list(order)
        found = module.victim(running, "fcfs")
        said = getattr(found, "request_id", found)
        hint = ": a request that was preempted comes back as the last one, though it arrived early"
        assert found is order[-1], f"of {[one.request_id for one in order]} it says {said}{hint}"
        assert running == list(order), "the list has changed: `schedule_running` takes the victim out"


def check_priority_takes_the_least_urgent(module):
    """The victim has the greatest priority number, then the latest arrival; ties are free."""
    for who, right, hint in (
        ([_someone("a", 1), _someone("b", 7), _someone("c", 3)], "b", ": the greatest number is the least urgent"),
        ([_someone("a", 2, 5.0), _someone("b", 2, 1.0), _someone("c", 0, 9.0)], "a", ": of equals, the later arrival"),
        ([_someone("a", 2, 5.0), _someone("c", 2, 5.0), _someone("b", 2, 1.0)], "ac", ": b arrived first"),
        ([_someone("a", -1, 5.0), _someone("b", -3, 9.0)], "a", ": numbers may be negative"),
    ):
        for order in permutations(who):
            found = module.victim(list(order), "priority")
            said = getattr(found, "request_id", found)
            shown = [(one.request_id, one.priority, one.arrival_time) for one in order]
            assert any(found is one for one in order), f"of {shown} it says {said}, which is none of them"
            assert said in right, f"of {shown} it says {said}, and {' or '.join(right)} is right{hint}"


class _Books:
    """Offers what `preempt` may call."""

    def __init__(self):
        self.freed = []

    def free(self, name):
        self.freed.append(name)


def check_preempt_keeps_the_tokens_and_nothing_else(module):
    """Blocks, computed tokens and drafts are gone, its tokens stay, the preemption is counted, and it waits."""
    for policy, order in (("fcfs", ["b", "a", "c"]), ("priority", ["a", "b", "c"])):
        waiting, books = create_request_queue(policy), _Books()
        for name, priority in (("a", 0), ("c", 2)):
            waiting.add_request(Request(name, [1], max_tokens=4, priority=priority))
        request = Request("b", [1, 2, 3], max_tokens=4, priority=1)
        request.append_output_token_id(9)
        request.status, request.num_computed_tokens, request.spec_token_ids = RequestStatus.RUNNING, 3, [4, 5]
        request.num_preemptions = 2
        module.preempt(request, waiting, books)
        assert books.freed == ["b"], f"memory.free was called with {books.freed}, and ['b'] is right"
        assert request.num_computed_tokens == 0, f"{request.num_computed_tokens} tokens still count as computed"
        tokens = list(request.all_token_ids)
        assert tokens == [1, 2, 3, 9], f"its tokens are {tokens}: those that it has generated are kept"
        assert request.spec_token_ids == [], "its drafts are still there: nobody has computed what stands before them"
        assert request.num_preemptions == 3, f"num_preemptions is {request.num_preemptions}, it was 2"
        assert request.status is RequestStatus.PREEMPTED, f"its status is {request.status!r}"
        found = [one.request_id for one in waiting]
        assert found == order, f"{policy}: {found} wait, and {order} is right: `prepend_requests` knows the policy"


# ---- the loop --------------------------------------------------------------------------------------------------------


class _Counted:
    """Counts memory, and ends a loop that would never end."""

    def __init__(self, free, size=4):
        self.free_blocks, self.size, self.held, self.wants, self.asks = free, size, {}, {}, 0

    def wanted(self, request):
        self.asks += 1
        assert self.asks < 100, "it never ends: it asks for the same requests again and again"
        return self.wants[request.request_id]

    def allocate(self, request, num_tokens):
        self.asks += 1
        assert self.asks < 100, f"it never ends: {request.request_id} asks for blocks again and again"
        held = self.held.get(request.request_id, 0)
        missing = max(0, -(-(request.num_computed_tokens + num_tokens) // self.size) - held)
        if missing > self.free_blocks:
            return False
        self.free_blocks -= missing
        self.held[request.request_id] = held + missing
        return True

    def free(self, name):
        self.free_blocks += self.held.pop(name, 0)


def _run(module, states, free, budget, policy="fcfs"):
    """Run the loop on states (name, computed, wants, priority) of running requests."""
    memory, running, waiting = _Counted(free), [], create_request_queue(policy)
    for at, (name, computed, wants, priority) in enumerate(states):
        request = Request(name, [0] * (computed + wants), max_tokens=50, priority=priority, arrival_time=float(at))
        request.status, request.num_computed_tokens = RequestStatus.RUNNING, computed
        memory.held[name], memory.wants[name] = -(-computed // memory.size), wants
        running.append(request)
    found = module.schedule_running(running, waiting, memory, budget, policy)
    assert isinstance(found, tuple), f"it returns {type(found).__name__}, not (scheduled, preempted)"
    assert len(found) == 2, f"it returns {len(found)} values, not (scheduled, preempted)"
    scheduled, preempted = found
    return scheduled, [one.request_id for one in preempted], [one.request_id for one in running], memory


def _loop(module, cases):
    for what, states, free, budget, policy, right, hint in cases:
        scheduled, preempted, running, memory = _run(module, states, free, budget, policy)
        where = f"{what} ({policy}, budget {budget}, {free} blocks of 4 free)"
        assert preempted == right[1], f"{where}: preempted {preempted}, and {right[1]} is right{hint}"
        found = list(scheduled.items())
        assert found == list(right[0].items()), f"{where}: scheduled {scheduled}, and {right[0]} is right{hint}"
        stay = [name for name, *_ in states if name not in right[1]]
        assert running == stay, f"{where}: {running} still run, and {stay} is right"
        lost = [name for name in right[1] if name in memory.held]
        assert not lost, f"{where}: {lost[0]} still holds blocks"


def check_those_that_run_get_tokens(module):
    """In the order of the list, each gets what it wants and the budget has left; one that wants nothing is skipped."""
    _loop(module, (
        ("enough for all", [("a", 5, 1, 0), ("b", 8, 6, 0)], 9, 20, "fcfs", ({"a": 1, "b": 6}, []), ""),
        ("a small budget", [("a", 5, 1, 0), ("b", 8, 6, 0), ("c", 5, 1, 0)], 9, 4, "fcfs", ({"a": 1, "b": 3}, []),
         ": nobody gets zero tokens, and nobody more than is left"),
        ("one wants nothing", [("a", 5, 0, 0), ("b", 6, 1, 0)], 9, 4, "fcfs", ({"b": 1}, []), ": others go on"),
        ("nothing is left", [("a", 5, 4, 0), ("b", 8, 1, 0)], 1, 4, "fcfs", ({"a": 4}, []),
         ": without a token of the budget nobody needs a block"),
        ("nobody runs", [], 3, 8, "fcfs", ({}, []), ""),
    ))  # fmt: skip


def check_no_block_is_free(module):
    """The victim is preempted, and the request tries again, until it has its blocks or was the victim itself."""
    _loop(module, (
        ("a needs a block", [("a", 4, 1, 0), ("b", 8, 1, 0)], 0, 8, "fcfs", ({"a": 1}, ["b"]), ""),
        ("a needs three", [("a", 4, 12, 0), ("b", 4, 1, 0), ("c", 8, 1, 0)], 0, 20, "fcfs", ({"a": 12}, ["c", "b"]),
         ": one victim may not be enough"),
        ("the last one needs a block", [("a", 5, 1, 0), ("b", 4, 1, 0)], 0, 8, "fcfs", ({"a": 1}, ["b"]),
         ": it is the victim itself, and gets nothing"),
        ("one victim is enough", [("a", 4, 1, 0), ("b", 5, 1, 0), ("c", 9, 1, 0)], 0, 8, "fcfs",
         ({"a": 1, "b": 1}, ["c"]), ""),
    ))  # fmt: skip


def check_a_victim_may_stand_before_the_request(module):
    """A victim's tokens, chosen by priority, go back to the budget; requests after it move up; none is left out."""
    _loop(module, (
        ("a has its token already", [("a", 4, 1, 9), ("b", 8, 1, 0), ("c", 5, 1, 1)], 1, 2, "priority",
         ({"b": 1, "c": 1}, ["a"]), ": a's token goes back, and c is the next"),
        ("b is the worst, in the middle", [("a", 5, 1, 0), ("b", 4, 1, 9), ("c", 5, 1, 1)], 0, 8, "priority",
         ({"a": 1, "c": 1}, ["b"]), ": b preempts itself, and c goes on"),
        ("the victim comes later", [("a", 4, 1, 0), ("b", 5, 1, 1), ("c", 8, 1, 9)], 0, 8, "priority",
         ({"a": 1, "b": 1}, ["c"]), ""),
        ("b asks again for as many", [("a", 4, 3, 9), ("b", 8, 6, 0), ("c", 5, 3, 1)], 1, 5, "priority",
         ({"b": 2, "c": 3}, ["a"]), ": it tries again with the same number of tokens"),
        ("two before it", [("a", 4, 1, 8), ("b", 4, 1, 9), ("c", 4, 12, 0), ("d", 5, 1, 1)], 2, 20, "priority",
         ({"c": 12, "d": 1}, ["b", "a"]), ": the worst first"),
        ("all others", [("a", 4, 1, 8), ("b", 4, 1, 9), ("c", 4, 16, 0)], 2, 20, "priority", ({"c": 16}, ["b", "a"]),
         ""),
    ))  # fmt: skip


def check_resume(module):
    """Whole blocks that hit are not computed again; the last token always is."""
    for arguments, right, hint in (
        ((10, 2, 4), 8, ""), ((9, 0, 4), 0, ""), ((8, 2, 4), 4, ": its last token must be computed"),
        ((9, 2, 4), 8, ": only the last token is left"), ((4, 1, 4), 0, ": its last token must be computed"),
        ((33, 1, 16), 16, ""), ((1, 0, 16), 0, ""), ((5, 4, 1), 4, ""), ((5, 5, 1), 4, ": its last token"),
    ):  # fmt: skip
        found = module.resume_at(*arguments)
        assert found == right, f"resume_at{arguments} is {found!r}, and {right} is right{hint}"
        assert isinstance(found, int), f"resume_at{arguments} is {found!r}, not a whole number"


# ---- what it costs ---------------------------------------------------------------------------------------------------


def check_recompute_seconds(module):
    """Each token costs two operations for each parameter."""
    for arguments, right in (((10, 50, 1000), 1.0), ((1, 8.03e9, 494.7e12), 3.2464e-5), ((0, 50, 10), 0.0)):
        found = module.recompute_seconds(*arguments)
        hint = ". A token costs two operations a parameter" if right and found == right / 2 else ""
        right = 2 * arguments[0] * arguments[1] / arguments[2]
        _close(found, right, f"recompute_seconds{arguments}", hint)


def check_swap_seconds(module):
    """Out and back is twice the bytes; if the host has them already, they only come back."""
    for arguments, right in (
        ((10, 50, 1000), 1.0),
        ((10, 50, 1000, 1), 0.5),
        ((1, 131072, 50e9, 2), 2 * 131072 / 50e9),
    ):
        found = module.swap_seconds(*arguments)
        hint = ". Out, and back" if found in (right / 2, 2 * right) else ""
        _close(found, right, f"swap_seconds{arguments}", hint)


def check_break_even(module):
    """At that bandwidth both take the same time, for any number of tokens."""
    for size, parameters, flops, directions in ((50, 50, 1000, 2), (131072, 8.03e9, 494.7e12, 1), (640, 1e9, 1e12, 2)):
        found = module.break_even_bandwidth(size, parameters, flops, directions)
        right = directions * size / (2 * parameters / flops)
        hint = ". In one direction half as much is enough" if found in (2 * right, right / 2) else ""
        _close(found, right, f"break_even_bandwidth({size}, {parameters:g}, {flops:g}, {directions})", hint)


def check_effective_bandwidth(module):
    """A copy takes its time to begin, and then its bytes."""
    for piece, bandwidth, begin in ((100, 1000, 0.1), (32768, 50e9, 2.3e-6), (2**21, 50e9, 2.3e-6), (10, 7.0, 0.0)):
        found = module.effective_bandwidth(piece, bandwidth, begin)
        _close(found, piece / (begin + piece / bandwidth), f"effective_bandwidth({piece}, {bandwidth:g}, {begin})")


# ---- in the engine ---------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _recorded():
    """Return (name, workload, trace) of every workload in which vLLM's scheduler preempted, the shortest first."""
    preempting = (one for one in recorded(RECORDED) if any(row["preempted"] for row in one[2]))
    return sorted(preempting, key=lambda one: len(one[2]))


def check_vllm_decided_the_same(module):
    """In all 53 workloads in which vLLM v0.33.0 was recorded to preempt, 554 times, your loop decides the same."""
    for name, workload, trace in _recorded():
        served = Replay(workload, Scheduler(*configs(workload), _preempting(module)))
        for step, recorded_row in enumerate(trace):
            served.arrive()
            row = served.run()
            where = f"{name} ({workload['config']['policy']}), step {step}"
            for key, what in (("preempted", "preempted"), ("scheduled", "given"), ("waiting", "waiting")):
                found, right = row[key], recorded_row[key]
                assert found == right, f"{where}: {what} {found}, and in vLLM {right}"
