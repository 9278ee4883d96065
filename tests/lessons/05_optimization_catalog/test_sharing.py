"""Sessions repeat exactly what they claim to repeat, and a cache hits exactly that."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.config import CacheConfig, SchedulerConfig
from minivllm.errors import MinivllmError
from minivllm_lab.optimization_catalog.sharing import SHARING, sessions, sharing
from minivllm_simulate.cost_model import FittedCost
from minivllm_simulate.simulated_engine import GENERATED
from minivllm_simulate.virtual_clock import simulate

COST = FittedCost(per_step=6e-3, per_request=0.0, per_token=1e-5, per_pair=0.0)
CONFIG = SchedulerConfig(max_model_len=4096, max_num_batched_tokens=8192)


def hits(work, blocks: int) -> list[int]:
    run = simulate(work, CONFIG, CacheConfig(num_gpu_blocks=blocks), COST)
    return [request.num_cached_tokens for request in run.requests]


@given(st.sampled_from(list(SHARING.values())), st.integers(1, 6), st.integers(1, 4), st.sampled_from([16, 48, 100]))
@settings(max_examples=40, deadline=None)
def test_an_ample_cache_finds_what_there_is_to_find(kind, users, turns, prefix):
    assert hits(sessions(kind, users, turns, prefix), 4000) == kind.findable(users, turns, prefix)


def test_findable_by_hand():
    """40 tokens are two and a half blocks; 40 + 64 + 8 are seven, the last of which lacks a
    computed token.
    """
    assert sharing("documents").findable(2, 2, 40) == [0, 32, 0, 32]
    assert sharing("system").findable(2, 2, 40) == [0, 32, 32, 32]
    assert sharing("chat").findable(2, 2, 40) == [0, 96, 32, 96]
    assert sharing("none").findable(2, 2, 40) == [0, 0, 0, 0]


@given(st.sampled_from(list(SHARING.values())), st.integers(1, 5), st.integers(1, 4))
@settings(max_examples=30, deadline=None)
def test_turns_repeat_their_session_and_nothing_else(kind, users, turns):
    work = sessions(kind, users, turns, 40)
    assert len(work) == users * turns
    for index, request in enumerate(work):
        turn, ids = index % turns, request.prompt_token_ids
        assert ids is not None
        assert (request.after is None) == (turn == 0)
        if turn and kind.grows:
            before = work[index - 1].prompt_token_ids
            assert before is not None
            assert ids[: len(before) + kind.answer] == (*before, *[GENERATED] * kind.answer)
        assert (
            sum(ids[:40] == other.prompt_token_ids[:40] for other in work if other.prompt_token_ids)
            == {
                "all": users * turns,
                "user": turns,
                "request": 1,
            }[kind.prefix_of]
        )


@pytest.mark.parametrize(("name", "left"), [("documents", 0), ("chat", 512)])
def test_what_must_be_kept_is_where_the_cliff_is(name, left):
    """A pool with room for it and for the running requests hits everything; one for half of it hits
    nothing of a user's own.
    """
    kind, users, turns, prefix = sharing(name), 12, 3, 512
    work = sessions(kind, users, turns, prefix)
    kept, running = kind.kept(users, turns, prefix), 6 * (prefix + turns * (kind.question + kind.answer))
    assert hits(work, (kept + running) // 16) == hits(work, 4000)
    scarce = hits(work, max(kept // 2, prefix + 400) // 16)
    assert {result for index, result in enumerate(scarce) if index % turns} == {left}


def test_what_makes_no_sense_is_refused():
    with pytest.raises(MinivllmError, match="songs"):
        sharing("songs")
    with pytest.raises(MinivllmError, match="users"):
        sessions(sharing("chat"), 0, 1, 1)
