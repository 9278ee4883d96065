"""Test that the model of a prefix cache finds and evicts what the engine's own scheduler and pool
do.
"""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulate.linear_cost import LinearCost

from minivllm.config import CacheConfig
from minivllm.core.scheduler import Scheduler
from minivllm_lab.optimization_catalog.prefix_reuse import CONFIG, Load, reuse
from minivllm_lab.optimization_catalog.sharing import SHARING, sessions, sharing
from minivllm_simulate.virtual_clock import simulate

COST = LinearCost(per_step=6e-3, per_token=1e-5)
DOCUMENTS = Load(sharing("documents"), 8, 3, 512)


loads = st.builds(
    Load, st.sampled_from(list(SHARING.values())), st.integers(1, 6), st.integers(1, 4),
    st.sampled_from([48, 100, 256]), st.booleans(),
)  # fmt: skip


@given(loads, st.integers(80, 400))
@settings(max_examples=25, deadline=None)
def test_watching_changes_nothing(load, blocks):
    work = sessions(load.kind, load.users, load.turns, load.prefix, at_random=load.at_random)
    run = simulate(work, Scheduler(CONFIG, CacheConfig(num_gpu_blocks=1 + blocks)), COST)
    watched = reuse(load, blocks, COST)
    assert watched.found == tuple(request.num_cached_tokens for request in run.requests)
    assert watched.ttfts == tuple(request.ttft for request in run.requests)
    assert watched.prompts == tuple(request.prompt_tokens for request in work)
    assert not any(watched.wrong)
    assert all(result <= could for result, could in zip(watched.found, load.findable(), strict=True))


def test_only_the_first_and_last_steps_of_a_request_are_decided(monkeypatch: pytest.MonkeyPatch):
    decided, schedule = [], Scheduler.schedule
    monkeypatch.setattr(Scheduler, "schedule", lambda self: decided.append(self) or schedule(self))
    requests = len(reuse(DOCUMENTS, 400, COST).prompts)
    assert len(decided) <= 3 * requests < DOCUMENTS.kind.answer * requests


@given(loads)
@settings(max_examples=25, deadline=None)
def test_an_ample_pool_evicts_nothing_and_a_larger_one_changes_nothing(load):
    ample = reuse(load, load.ample_blocks, COST)
    assert ample.evicted == 0
    assert ample == reuse(load, load.ample_blocks + 500, COST)
    assert list(ample.found) == load.findable()
    assert all(not admission.lost for admission in ample.admissions)


def test_what_is_lost_is_lost_block_by_block_and_never_more_than_there_was():
    tight = reuse(DOCUMENTS, 4 * 32, COST)
    served = [index for admission in tight.admissions for index in admission.requests]
    assert sorted(served) == list(range(24))
    held: Counter[int] = Counter()
    for admission in tight.admissions:
        for user, blocks in admission.lost:
            held[user] -= blocks
            assert held[user] >= 0
        for index in admission.requests:
            held[index // 3] = 32
    assert 0 < sum(blocks for admission in tight.admissions for _, blocks in admission.lost) <= tight.evicted
    assert set(tight.found) == {0}


def test_findable_by_hand():
    """40 tokens are two and a half blocks; 40 + 64 + 8 are seven, the last of which lacks a
    computed token.
    """
    by_hand = {"documents": [0, 32, 0, 32], "system": [0, 32, 32, 32], "chat": [0, 96, 32, 96], "none": [0, 0, 0, 0]}
    assert {name: sharing(name).findable(2, 2, 40) for name in by_hand} == by_hand


@pytest.mark.parametrize(("name", "left"), [("documents", 0), ("chat", 512)])
def test_what_must_be_kept_is_where_the_cliff_is(name, left):
    """A pool with room for it and for the running requests hits everything; one for half of it hits
    nothing of a user's own.
    """
    kind, users, turns, prefix = sharing(name), 12, 3, 512
    load = Load(kind, users, turns, prefix)
    kept, running = kind.kept(users, turns, prefix), 6 * (prefix + turns * (kind.question + kind.answer))
    assert list(reuse(load, (kept + running) // 16, COST).found) == load.findable()
    scarce = reuse(load, max(kept // 2, prefix + 400) // 16, COST).found
    assert {result for index, result in enumerate(scarce) if index % turns} == {left}
