"""How many drafts a step makes: by a schedule of batch sizes, and by what drafting has cost so far."""

import random
import statistics

import pytest

from minivllm.config import CacheConfig, DraftingConfig, SchedulerConfig
from minivllm.core.async_scheduler import AsyncScheduler
from minivllm.core.drafting import DraftIfFaster, scheduled_drafts
from minivllm.core.output import ModelRunnerOutput
from minivllm.core.request import Request
from minivllm.core.scheduler import Scheduler

DRAFTS = 4


def test_a_batch_size_beyond_a_range_counts_as_its_last_one_and_no_draft_is_longer_than_allowed():
    schedule = [(1, 4, 5), (8, 15, 3), (16, 20, 0)]
    found = [scheduled_drafts(schedule, size, 4) for size in (1, 4, 7, 8, 15, 16, 20, 300)]
    assert found == [4, 4, 4, 3, 3, 0, 0, 0]


def step_seconds(tokens, slope):
    """A step takes 1 s while it is bound by memory, then a time in proportion to its tokens."""
    return max(1.0, slope * tokens)


def loss(*loads, seed, steps_ahead=0):
    """By how much the rule takes longer than the better of always and never drafting, load after load.

    A load is (tokens to generate for each request, requests, probability that a draft is accepted, cost of a token
    where computing is the limit, cost of drafting).
    """
    dice, rule = random.Random(seed), DraftIfFaster()
    spent = best = 0.0
    in_flight = [False] * steps_ahead  # whether each step, scheduled and not observed yet, is to end with drafting
    before = False
    for tokens, batch, acceptance, slope, drafting in loads:
        mean = sum(acceptance**place for place in range(DRAFTS + 1))
        with_drafts = step_seconds(batch * (DRAFTS + 1), slope) + drafting
        best += tokens * min(with_drafts / mean, step_seconds(batch, slope))
        made = 0.0
        while made < tokens:
            in_flight.append(rule.wants_drafts(batch))
            drafts = in_flight.pop(0)
            seconds = step_seconds(batch * (DRAFTS * before + 1), slope) + drafting * drafts
            gained = 1.0
            if before:
                gained = sum(1 + accepted(dice, acceptance) for _ in range(batch)) / batch
            seconds *= dice.lognormvariate(0.0, 0.05)
            rule.observe(batch, drafts, seconds, gained)
            spent, made, before = spent + seconds, made + gained, drafts
    return spent / best - 1


def accepted(dice, acceptance):
    """How many drafts in a row are accepted."""
    number = 0
    while number < DRAFTS and dice.random() < acceptance:
        number += 1
    return number


@pytest.mark.parametrize(
    "loads",
    [
        [(8000, 1, 0.8, 0.03, 0.1)],  # drafts gain much
        [(8000, 1, 0.0, 0.03, 0.5)],  # nothing is ever accepted
        [(8000, 2, 0.4, 0.03, 0.5)],  # nearly even
        [(3000, 64, 0.8, 0.03, 0.1)],  # steps are bound by computing
        [(4000, 1, 0.8, 0.03, 0.1), (3000, 64, 0.6, 0.03, 0.1)],  # other requests come
        [(3000, 64, 0.6, 0.03, 0.1), (6000, 2, 0.8, 0.03, 0.1)],  # and go
        [(6000, 4, 0.8, 0.03, 0.1), (6000, 4, 0.0, 0.03, 0.3)],  # the text becomes another, at the same size
        [(6000, 4, 0.0, 0.03, 0.3), (6000, 4, 0.8, 0.03, 0.1)],
    ],
)
def test_it_loses_no_more_than_three_percent_against_the_better_of_always_and_never(loads):
    assert statistics.mean(loss(*loads, seed=seed, steps_ahead=seed % 2) for seed in range(8)) < 0.03


def loss_where_few_steps_gain(gain, seed):
    """By how much the rule takes longer than drafting always, which gives `gain` times the tokens of drafting never.

    One request at a time. One step of five has all drafts accepted, the others none. The first step that verifies
    drafts takes thirty times as long, as one does that compiles.
    """
    dice, rule, every = random.Random(seed), DraftIfFaster(), 5
    cost = (1 + DRAFTS / every) / gain
    before, spent, made, compiled = False, 0.0, 0, False
    while made < 8000:
        drafts = rule.wants_drafts(1)
        gained = 1 + DRAFTS * (before and dice.random() < 1 / every)
        seconds = cost if before else 1.0
        compiling = 30.0 if before and not compiled else 1.0
        rule.observe(1, drafts, seconds * compiling * dice.lognormvariate(0.0, 0.08), float(gained))
        spent, made, compiled, before = spent + seconds, made + gained, compiled or before, drafts
    return spent / made * gain - 1


@pytest.mark.parametrize("gain", [1.1, 1.2, 1.3, 1.5])
def test_it_finds_what_most_steps_lose_and_few_gain(gain):
    assert statistics.mean(loss_where_few_steps_gain(gain, seed) for seed in range(8)) < 0.03


def loss_on_an_uneven_machine(batch, cost, seed, acceptance=0.3):
    """By how much the rule takes longer than the better mode; `cost`: of a token with drafts, against one without.

    The machine's speed changes between 1 and 1 / 1.65 every 150 steps or so, one step of 500 takes eight times as long,
    and all vary by 10 %.
    """
    dice, rule = random.Random(seed), DraftIfFaster()
    mean = sum(acceptance**place for place in range(DRAFTS + 1))
    pace, before, spent, made = 1.0, False, 0.0, 0.0
    for step in range(4000):
        if dice.random() < 1 / 150:
            pace = 1.65 if pace == 1.0 else 1.0
        drafts = rule.wants_drafts(batch)
        usual = cost * mean if before else 1.0
        gained = sum(1 + accepted(dice, acceptance) for _ in range(batch)) / batch if before else 1.0
        interrupted = 8.0 if dice.random() < 1 / 500 else 1.0
        rule.observe(batch, drafts, usual * pace * interrupted * dice.lognormvariate(0.0, 0.1), gained)
        if step >= 500:
            spent, made = spent + usual, made + gained
        before = drafts
    return spent / made / min(1.0, cost) - 1


@pytest.mark.parametrize(("batch", "cost"), [(8, 0.9), (32, 0.9), (32, 1.07)])
def test_a_machine_that_is_slow_for_a_while_does_not_mislead_it(batch, cost):
    assert statistics.mean(loss_on_an_uneven_machine(batch, cost, seed) for seed in range(8)) < 0.015


def test_steps_with_prompts_count_for_less_in_time_and_as_much_in_tokens():
    rule = DraftIfFaster()
    for seconds, tokens, prompt in ((12.0, 2.0, 0), (12.0, 2.0, 0), (15.0, 1.0, 30)):
        rule.observe(10, True, seconds, tokens, prompt)  # the first one follows a step without drafts
    assert rule._sizes(10).per_token(True) == pytest.approx(12 / 1.5, rel=0.01)


def test_a_mode_far_worse_is_tried_rarely_and_still_tried():
    rule, wanted = DraftIfFaster(), []
    for _ in range(5000):
        wanted.append(rule.wants_drafts(8))
        seconds = 5.0 if wanted[-1] else 1.0
        rule.observe(8, wanted[-1], seconds, 1.0)
    later = wanted[1000:]
    assert 0 < sum(later) < 0.01 * len(later)
    assert any(wanted[-2000:])


def closed_load(drafting, *, batch, acceptance, slope, num_steps, prompt=128, answer=64, seed=1):
    """Tokens for each second, of the last half, while requests that end are followed by others with a prompt.

    `drafting`: always, never, or a rule that is asked; what it is told varies by 5 %.
    """
    dice, noise = random.Random(seed), random.Random(seed)
    left, fresh, before = [dice.randrange(1, answer + 1) for _ in range(batch)], [False] * batch, False
    spent = made = 0.0
    for step in range(num_steps):
        wanted = drafting if isinstance(drafting, bool) else drafting.wants_drafts(batch)
        prompts = sum(fresh) * prompt
        seconds = step_seconds(prompts + fresh.count(False) * (1 + DRAFTS * before), slope)
        gained = [1 + (accepted(dice, acceptance) if before and not new else 0) for new in fresh]
        gained = [min(pair) for pair in zip(gained, left, strict=True)]
        left = [was - now or answer for was, now in zip(left, gained, strict=True)]
        fresh = [one == answer for one in left]
        if not isinstance(drafting, bool):
            drafting.observe(batch, wanted, seconds * noise.lognormvariate(0, 0.05), sum(gained) / batch, prompts)
        before = wanted
        if step >= num_steps // 2:
            spent, made = spent + seconds, made + sum(gained)
    return made / spent


@pytest.mark.parametrize(("acceptance", "slope"), [(0.55, 0.015), (0.6, 0.03), (0.1, 0.01)])
def test_it_loses_little_where_most_steps_have_a_prompt(acceptance, slope):
    load = {"batch": 32, "acceptance": acceptance, "slope": slope, "num_steps": 1500}
    best = max(closed_load(True, **load), closed_load(False, **load))
    assert closed_load(DraftIfFaster(), **load) > 0.97 * best


def test_what_prompts_cost_is_taken_off_and_the_first_step_after_a_change_says_nothing():
    rule = DraftIfFaster()
    for drafted, seconds, prompt in ((True, 1, 0), (True, 21, 20), (True, 11, 10), (False, 50, 0), (False, 32, 30)):
        rule.observe(1, drafted, float(seconds), 1.0, prompt)
    rule.observe(1, True, 50.0, 1.0)
    assert [rule._sizes(1).per_token(drafting) for drafting in (False, True)] == pytest.approx([2.0, 1.0])


@pytest.mark.parametrize("scheduler_class", [Scheduler, AsyncScheduler])
def test_the_worker_is_told_how_many_drafts_to_make_and_that_many_places_are_kept(scheduler_class):
    ahead = scheduler_class is AsyncScheduler
    config = SchedulerConfig(
        max_model_len=64, async_scheduling=ahead,
        drafting=DraftingConfig(
            num_speculative_tokens=3, num_speculative_tokens_per_batch_size=[(1, 1, 3), (2, 2, 1), (3, 3, 0)]
        ),
    )  # fmt: skip
    scheduler = scheduler_class(config, CacheConfig(num_gpu_blocks=64, block_size=4))
    told = []
    for name in "abc":
        scheduler.add_request(Request(name, [1, 2, 3, 4], max_tokens=40))
        output = scheduler.schedule()
        told.append(output.num_spec_tokens_to_schedule)
        drafts = {request: [-1] * told[-1] for request in output.num_scheduled_tokens if told[-1]}
        sampled = {request: [7] for request in output.num_scheduled_tokens}
        invalid = {request: len(theirs) for request, theirs in output.scheduled_spec_decode_tokens.items()}
        scheduler.update_from_output(output, ModelRunnerOutput(sampled, num_invalid_spec_tokens=invalid))
        if not ahead:
            scheduler.update_draft_token_ids(drafts)
        places = {name: len(request.spec_token_ids) for name, request in scheduler.requests.items()}
        assert places == dict.fromkeys(places, told[-1])
    assert told == [3, 1, 0]


def test_without_a_rule_nothing_is_told():
    scheduler = Scheduler(
        SchedulerConfig(max_model_len=64, drafting=DraftingConfig(num_speculative_tokens=3)),
        CacheConfig(num_gpu_blocks=8),
    )
    assert scheduler.draft_if_faster is None
    scheduler.add_request(Request("a", [1, 2, 3, 4], max_tokens=4))
    assert scheduler.schedule().num_spec_tokens_to_schedule is None
