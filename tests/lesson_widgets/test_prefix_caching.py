"""Lesson 05's prefix cache shows what the block pool finds, and falls off its cliff where it should."""

import xml.etree.ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.config import CacheConfig, SchedulerConfig
from minivllm.errors import MinivllmError
from minivllm.simulate.sharing import SHARING, sessions
from minivllm.simulate.virtual_clock import simulate
from widgets import prefix_caching as widget

MET = {"kind": "system", "users": 16, "turns": 4, "prefix": 1024}


@given(
    st.sampled_from(list(SHARING)),
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from(widget.TURNS),
    st.sampled_from([128, 256]),
    st.sampled_from(widget.POOLS),
)
@settings(max_examples=20, deadline=None)
def test_every_position_of_the_knobs_is_drawn(kind, users, turns, prefix, pool):
    state = widget.sweep(kind, users, turns, prefix, pool)
    ET.fromstring(widget.figure(state))
    assert widget.verdict(state).words
    assert 0 <= state.hit_rate <= state.endless_hit_rate < 1
    assert all(0 <= rate <= could < 1 for _, rate, could in state.curve)
    assert min(min(turn.found, turn.again, turn.first) for turn in state.turns) >= 0
    prompts = sum(one.prompt_tokens for one in sessions(SHARING[kind], users, turns, prefix))
    assert sum(turn.total for turn in state.turns) == prompts


def test_what_is_found_is_what_the_engines_pool_found():
    knobs = {"kind": "chat", "users": 8, "turns": 3, "prefix": 256, "pool": 2048}
    state = widget.sweep(**knobs)
    run = simulate(
        sessions(SHARING["chat"], 8, 3, 256),
        SchedulerConfig(max_model_len=4096, max_num_batched_tokens=8192),
        CacheConfig(num_gpu_blocks=1 + 2048 // 16),
        widget._cost(),
    )
    assert sum(turn.found for turn in state.turns) == sum(step.prefix_hits for step in run.steps)
    assert state.hit_rate == sum(step.prefix_hits for step in run.steps) / sum(s.prefix_queries for s in run.steps)
    assert {users: rate for users, rate, _ in state.curve}[8] == state.hit_rate


def test_the_cliff_is_where_what_must_stay_no_longer_fits():
    """A document of 512 tokens for each user in a pool of 4,096: four users fit beside whoever runs, sixteen do not."""
    state = widget.sweep(**widget.THRASH)
    rates = {users: rate for users, rate, _ in state.curve}
    endless = {users: could for users, _, could in state.curve}
    assert rates[4] == endless[4] > 0.7
    assert rates[16] == 0
    assert state.kept == 16 * 512 > state.pool
    assert widget.verdict(state).tone == "broken"
    assert "thrashes" in widget.verdict(state).words
    assert state.ttft > 1.3 * state.endless_ttft
    assert widget.verdict(widget.sweep(**{**widget.THRASH, "users": 4})).tone == "fine"


def test_one_prompt_for_all_survives_in_a_small_pool_and_agents_that_do_not_pause_keep_theirs():
    pool = {"users": 16, "turns": 4, "prefix": 512, "pool": 2048}
    for kind in ("system", "agent"):
        state = widget.sweep(kind, **pool)
        assert state.hit_rate == state.endless_hit_rate > 0.75
    assert widget.sweep("chat", **pool).hit_rate < widget.sweep("agent", **pool).endless_hit_rate
    assert "do not pause" in widget.figure(widget.sweep("agent", **pool))


def test_more_users_behind_one_prompt_find_more_and_users_of_their_own_do_not():
    shared = [rate for _, rate, _ in widget.sweep("system", pool=32768).curve]
    own = [rate for _, rate, _ in widget.sweep("documents", pool=32768).curve]
    assert shared == sorted(shared)
    assert shared[-1] > shared[0] + 0.2
    assert len(set(own)) == 1
    assert widget.sweep("none").hit_rate == 0
    assert "nothing to find" in widget.verdict(widget.sweep("none")).words


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({}, ["Share of prompt tokens found", "never evicts", "What must stay", "turn 3", "prefill skipped"]),
        (widget.THRASH, ["a document for each user", "the pool ends here", "evicted, computed again", "turn 4"]),
    ],
)
def test_the_picture_says_what_happens(knobs: dict, words: list[str]):
    picture = widget.figure(widget.sweep(**knobs))
    assert [word for word in words if word not in picture] == []


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"kind": "songs"}, "songs"),
        ({"users": 0}, "users"),
        ({"turns": 0}, "turns"),
        ({"prefix": 0}, "prefix"),
        ({"pool": 3}, "pool"),
        ({"pool": 512, "prefix": 1024}, "blocks"),
    ],
)
def test_input_that_makes_no_sense_is_refused_by_name(knobs: dict, words: str):
    with pytest.raises(MinivllmError, match=words):
        widget.sweep(**knobs)


def test_the_challenge_is_open_at_first_and_can_be_met():
    shown = widget.show()
    assert [name for _, name in shown.knobs["kind"].options] == list(SHARING)
    assert "Not yet." in shown.progress.value
    shown.set(**MET)
    assert "Met." in shown.progress.value
    shown.set(kind="chat")
    assert "Not yet." in shown.progress.value
