"""Lesson 11: its steps are the engine's, its kernel and formulas are right, its exercise catches
mistakes.
"""

import random
from collections import Counter

import pytest
import torch
from kernels.harness import assert_compiles
from lessons.harness import REPOSITORY, engine_step, exercise_test, figures_of_quick_run, script_path
from refusals import assert_refused

from minivllm.config import CacheConfig, SchedulerConfig
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler
from minivllm_lab.exercise import load
from minivllm_lab.preemption import cliff, report
from minivllm_lab.preemption.costs import break_even_bandwidth, recompute_seconds
from minivllm_lab.preemption.learner_policy import learner_policy
from minivllm_simulate.hardware import get_hardware
from minivllm_simulate.known_models import known_model

lesson = load(script_path("11"))
TEXT = (REPOSITORY / "lessons" / "11_preemption.md").read_text()

# ---- its steps are the engine's ------------------------------------------------------------------


def workload(seed: int) -> tuple[list[Request], int, int, int]:
    """Draw requests that arrive together, and the number of blocks of a small pool, their size, and
    the budget.
    """
    draw = random.Random(seed)
    requests = [
        Request(f"r{i}", [0] * draw.randint(1, 14), max_tokens=draw.randint(1, 14), priority=draw.randint(0, 2),
                arrival_time=float(i))
        for i in range(draw.randint(2, 7))
    ]  # fmt: skip
    longest = max(request.num_tokens + request.max_tokens for request in requests)
    size = draw.choice([1, 2, 4])
    blocks = max(-(-longest // size) + draw.randint(1, 6), 28 // size)
    return requests, blocks + 1, size, draw.choice([8, 20, 64])


def engine_steps(requests, blocks, size, budget, policy) -> tuple[list, Scheduler]:
    """Return what the engine's scheduler schedules in each step, and what it preempts."""
    limits = SchedulerConfig(max_model_len=28, max_num_batched_tokens=budget, max_num_seqs=8, policy=policy)
    pool = CacheConfig(num_gpu_blocks=blocks, block_size=size, enable_prefix_caching=False)
    scheduler, steps = Scheduler(limits, pool), []
    for request in requests:
        scheduler.add_request(request)
    while scheduler.has_unfinished_requests():
        decided = engine_step(scheduler)
        steps.append((list(decided.num_scheduled_tokens.items()), sorted(decided.preempted_req_ids)))
    return steps, scheduler


def run_lesson(engine, requests: list[Request]) -> list:
    """Run the lesson's engine to the end, and return its steps."""
    for request in requests:
        engine.waiting.add_request(request)
    return list(engine.steps())


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_the_steps_are_the_engines(policy):
    preemptions = 0
    for seed in range(60):
        expected, scheduler = engine_steps(*workload(seed), policy)
        requests, blocks, size, budget = workload(seed)
        engine = lesson.Engine(report.NoModel(blocks, size), policy, budget)
        steps = run_lesson(engine, requests)
        assert [(list(scheduled.items()), sorted(preempted)) for scheduled, preempted in steps] == expected, seed
        assert report.recomputed(engine, requests) >= scheduler.num_recomputed_tokens, seed
        preemptions += scheduler.num_preemptions
    assert preemptions > 40


def test_the_example_by_hand():
    engine = lesson.Engine(report.NoModel(6, 2), token_budget=8)
    requests = [Request(name, [1, 1, 1], max_tokens=count) for name, count in (("A", 5), ("B", 4))]
    steps = [preempted for _, preempted in run_lesson(engine, requests)]
    assert (steps, report.recomputed(engine, requests)) == lesson.first_steps()


def test_a_place_to_resume_that_cannot_be_is_one_line():
    rules = learner_policy(resume_at=lambda num_tokens, *_: num_tokens)
    scheduler = Scheduler(SchedulerConfig(max_model_len=16), CacheConfig(num_gpu_blocks=20, block_size=4), rules)
    scheduler.add_request(Request("a", [1] * 8, max_tokens=2))
    assert_refused("your resume_at returns 8 for 8 tokens", scheduler.schedule)


# ---- swap ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gathered", "copies"), [(False, 2 * 3 * 4), (True, 2)])
def test_swap_brings_every_bit_back_to_other_blocks(gathered, copies):
    cache = torch.randn(4, 12, 2, 1, 8)
    expected = cache[:, [3, 9, 1]].clone()
    space = lesson.SwapSpace(cache, 5, gathered)
    space.swap_out("a", [3, 9, 1])
    cache.fill_(float("nan"))
    space.swap_in("a", [2, 5, 7, 8])
    assert torch.equal(cache[:, [2, 5, 7]], expected)
    assert cache[:, 8].isnan().all()
    assert (len(space.free), space.num_copies) == (5, copies)


@pytest.mark.parametrize(("policy", "steps", "preempted"), [("fcfs", 15, 1), ("priority", 8, 0)])
def test_an_urgent_request_waits_for_those_that_run(policy, steps, preempted):
    """Its first token comes when another needs a block or ends, and only by priority it is spared."""
    engine = lesson.Engine(report.NoModel(12, 4), policy=policy)
    for at, (name, prompt) in enumerate((("a", 9), ("c", 11))):
        engine.waiting.add_request(Request(name, [1] * prompt, max_tokens=20, priority=5, arrival_time=float(at)))
    for _ in range(6):
        engine.step()
    urgent = Request("urgent", [1] * 10, max_tokens=20, arrival_time=9.0)
    engine.waiting.add_request(urgent)
    waited = 1
    while not urgent.status.is_finished:
        engine.step()
        waited += not urgent.num_output_tokens
    assert (waited, urgent.num_preemptions) == (steps, preempted)


# ---- the kernel ----------------------------------------------------------------------------------


def test_a_block_that_is_not_there_moves_nothing(device):
    assert report.verify_kernel(lesson.launch, device)["largest_error"] == 0


def test_it_compiles():
    arguments = {
        "addresses": torch.zeros(64, dtype=torch.int64), "blocks": torch.zeros(8, dtype=torch.int32),
        "slots": torch.zeros(8, dtype=torch.int32), "staging": torch.zeros(64, dtype=torch.int32), "words": 8192,
        "TO_STAGING": True, "BLOCK": 4096,
    }  # fmt: skip
    assert_compiles(lesson.swap_kernel, arguments)
    assert_compiles(lesson.swap_kernel, arguments | {"TO_STAGING": False})


# ---- the formulas --------------------------------------------------------------------------------


def test_attention_makes_long_requests_dearer_to_recompute():
    """Check the figures of the text, of the claim and of the notes' table."""
    gpu, (small, large) = get_hardware("H100"), map(known_model, ("Meta-Llama-3-8B", "Meta-Llama-3-70B"))

    def dearer(model, tokens):
        return recompute_seconds(model, gpu, tokens, attention=True) / recompute_seconds(model, gpu, tokens)

    lengths = (2048, 8192, 16384, 32768, 131072)
    more = {model: [round(100 * (dearer(model, tokens) - 1)) for tokens in lengths] for model in (small, large)}
    least = [break_even_bandwidth(small, gpu, 2) / 1e9 / dearer(small, tokens) for tokens in lengths]
    notes = (REPOSITORY / "lessons" / "notes" / "11_preemption.md").read_text()
    for row in (
        *(" | ".join(f"+{share} %" for share in shares) for shares in more.values()),
        " | ".join(f"{gb:.1f}" for gb in least),
    ):
        assert f"| {row} |" in notes

    eight, thirty_two, most = more[small][1], more[small][3], more[small][4]
    assert f"{eight} % at 8K tokens, {thirty_two} % at 32K, {most} % at 128K" in notes, "the claim"
    assert f"It adds {eight} % to\nrecomputing 8K tokens, but {most} % at 128K" in TEXT


def reasons_to_wait(monkeypatch, blocks: int) -> Counter:
    """Count why new requests wait after a step of the bet's run."""
    reasons, schedule = Counter(), Scheduler.schedule

    def counting(scheduler):
        before = scheduler.num_preemptions
        output, queue = schedule(scheduler), list(scheduler.waiting)
        reasons["steps"] += 1
        if any(not request.num_preemptions for request in queue):
            full = output.total_num_scheduled_tokens >= 2048
            preempted = scheduler.num_preemptions > before
            head = "victim" if queue[0].num_preemptions else "no room"
            reasons["preempted" if preempted else "budget" if full else head] += 1
        return output

    monkeypatch.setattr(Scheduler, "schedule", counting)
    cliff.run_of(blocks)
    return reasons


def test_new_requests_wait_for_room_and_behind_victims(monkeypatch):
    """Check the counts of the notes, and what the text concludes from them."""
    notes = (REPOSITORY / "lessons" / "notes" / "11_preemption.md").read_text()
    count = reasons_to_wait(monkeypatch, 450)
    steps = count.pop("steps")
    waiting = count.total()
    assert f"after {waiting:,} of {steps:,} steps. In {count['no room']:,} of these steps" in notes
    assert f"in {count['victim']:,} a victim stood at the head, {count['preempted']} had preempted" in notes
    assert f"and {count['budget']} had spent their token budget" in notes
    assert count["victim"] > count["no room"]
    assert "waited more often behind a victim than for room" in " ".join(TEXT.split())


@pytest.mark.parametrize("draw", [3, 4])
def test_the_bet_does_not_rest_on_one_draw_of_the_arrivals(draw):
    """Check the two of the notes' six runs that are furthest apart."""
    notes = (REPOSITORY / "lessons" / "notes" / "11_preemption.md").read_text()
    table = notes.partition("## The bet in six runs")[2]
    seconds, preemptions = (row.split("|")[draw].strip() for row in table.split("\n|")[3:5])
    pool = cliff.pool_of(450, draw)
    assert (seconds, preemptions) == (f"{pool.ttft:.2f}", str(pool.preemptions))
    assert pool.ttft > 10 * 0.05
    assert seconds in TEXT.partition("in [other runs]")[2].partition(" The")[0]


# ---- the script from outside ---------------------------------------------------------------------


def test_quick_run(tmp_path):
    figures = figures_of_quick_run("11", tmp_path)
    tokens = figures["tokens"]
    assert tokens["ample memory"]["again"] == tokens["V0's swap, block by block"]["again"] == 0
    assert tokens["recompute, fcfs"]["again"] == figures["trace"]["again"] == 46
    assert 0 < tokens["recompute, blocks found"]["again"] < 46
    assert tokens["V0's swap, block by block"]["copies"] == 8 * 12 * 2
    least = break_even_bandwidth(known_model("Meta-Llama-3-8B"), get_hardware("H100"), directions=2)
    assert figures["gpus"]["Meta-Llama-3-8B, H100"]["break_even_gb"] == pytest.approx(least / 1e9)
    waste = figures["waste"]
    assert waste["400"]["first_chunk"] > 3 * waste["400"]["whole"] > 0.4
    cliff = figures["cliff"]
    assert cliff["300"]["ttft"] > 5 * cliff["450"]["ttft"] > 10
    assert cliff["300"]["p99"] > 1.3 * cliff["450"]["p99"]
    thrash = figures["broken"]["thrash"]
    assert thrash["32"]["first_chunk"]["rate"] < 0.9 * thrash["16"]["first_chunk"]["rate"]
    assert thrash["32"]["whole"]["rate"] > thrash["16"]["whole"]["rate"]
    tier = figures["broken"]["tier"]
    assert tier["recompute"]["again"] > tier["with a host tier"]["again"] > 0
    assert tier["with a host tier"]["loaded"] > 0


# ---- the exercise --------------------------------------------------------------------------------


test_the_checks_catch = exercise_test("11")
