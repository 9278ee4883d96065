"""Lesson 05's waterfall shows what the lever model says, in the order that is asked for."""

import math
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.errors import MinivllmError
from minivllm.simulate.hardware import get_hardware
from minivllm.simulate.known_models import known_model
from minivllm.simulate.lever_checks import median_error
from minivllm.simulate.levers import LADDER, Levers, ladder
from widgets import optimization_catalog as widget

MET = {"gpu": "H100", "slots": 1}
VALUES = {
    "kv_dtype": ["auto", "int8", "fp8"],
    "weight_bits": [16, 8, 4],
    "speculative_tokens": [0, 3],
    "tensor_parallel": [1, 2, 4],
}


@given(
    st.fixed_dictionaries({rung.field: st.sampled_from(VALUES.get(rung.field, [True, False])) for rung in LADDER}),
    st.sampled_from(widget.GPUS),
    st.sampled_from(list(widget.WORKLOADS)),
    st.sampled_from([1, 4]),
    st.sampled_from(widget.RESERVATIONS),
    st.sampled_from(list(widget.ORDERS)),
)
@settings(max_examples=25, deadline=None)
def test_every_position_of_the_knobs_is_drawn(levers, gpu, requests, slots, max_model_len, order):
    state = widget.sweep(gpu, requests, slots, max_model_len, order=order, **levers)
    ET.fromstring(widget.figure(state))
    assert widget.verdict(state).words
    assert [rung.is_on for rung in state.rungs] == [
        levers[rung.field] != widget.OFF[rung.field] for rung in state.rungs
    ]
    on = [rung for rung in state.rungs if rung.is_on]
    if state.start and all(rung.result for rung in on):
        product = math.prod(rung.factor for rung in on)
        end = state.end
        assert end is not None
        assert end.tokens_per_second == pytest.approx(product * state.start.tokens_per_second)
    assert (state.end is None) == bool(state.refusal)


def test_the_rungs_are_the_simulators_ladder():
    state = widget.sweep(**widget.ON)
    expected = ladder(known_model(widget.MODEL), get_hardware("L4"), state.workload)
    assert state.start == expected[0][2]
    assert [rung.result for rung in state.rungs] == [result for _, _, result in expected[1:]]
    assert [rung.field for rung in state.rungs] == [rung.field for rung in LADDER]


def test_the_other_way_round_ends_at_the_same_place_by_other_steps():
    one, other = (widget.sweep(order=order) for order in widget.ORDERS)
    assert [rung.field for rung in other.rungs] == [rung.field for rung in reversed(one.rungs)]
    assert one.end == other.end
    assert other.factor("kv_cache") > 5 * one.factor("kv_cache"), "last, it finds a large batch to serve"
    assert other.factor("paging") == pytest.approx(1.0), "there is nothing to page before there is a cache"


def test_a_lever_that_is_off_changes_nothing_and_is_said_to_be_off():
    state = widget.sweep(paging=False, weight_bits=16)
    off = {rung.field: rung for rung in state.rungs if not rung.is_on}
    assert set(off) == {"paging", "weight_bits", "speculative_tokens", "tensor_parallel"}
    assert all(rung.factor == 1 and rung.result is None for rung in off.values())
    assert widget.figure(state).count(">off<") == 4
    nothing = widget.sweep(**widget.OFF)
    assert nothing.end == nothing.start
    assert "Nothing is on" in widget.verdict(nothing).words


def test_where_memory_is_scarce_paging_pays_and_where_it_is_ample_it_does_not():
    scarce, ample = widget.sweep(gpu="L4"), widget.sweep(gpu="H100", slots=16)
    assert scarce.factor("paging") > 1.8
    assert ample.factor("paging") < 1, "blocks are gathered as long as no kernel walks them"
    assert "Blocks are copied" in widget.verdict(ample).words
    assert widget.verdict(ample).tone == "tight"


def test_a_server_that_does_not_start_says_so_and_which_lever_lets_it():
    state = widget.sweep(max_model_len=8192)
    refused = [rung.field for rung in state.rungs if rung.is_on and rung.result is None]
    assert refused == ["kv_cache", "paging", "continuous_batching", "flash_attention"]
    assert "Before grouped-query attention is on" in widget.verdict(state).words
    assert widget.figure(state).count("does not start") == 4
    hopeless = widget.sweep(max_model_len=16384, gqa=False, weight_bits=16)
    assert widget.verdict(hopeless).tone == "broken"
    assert "max_model_len" in widget.verdict(hopeless).words


def test_the_picture_says_that_it_is_modelled_and_names_every_lever():
    picture = widget.figure(widget.sweep(**widget.ON))
    words = [
        f"modelled: off by {median_error():.0%}",
        "nothing on",
        "all that is on",
        "L4",
        "8 at once",
        *(rung.title for rung in LADDER[:7]),
    ]
    assert [word for word in words if word not in picture] == []
    assert "speculation, 3 drafts" in picture
    assert "2 GPUs" in picture


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"gpu": "abacus"}, "abacus"),
        ({"requests": "songs"}, "requests"),
        ({"order": "random"}, "order"),
        ({"slots": 0}, "slots"),
        ({"acceptance": 1.5}, "acceptance"),
        ({"lever": True}, "lever"),
        ({"weight_bits": 3}, "weight_bits"),
    ],
)
def test_input_that_makes_no_sense_is_refused_by_name(knobs: dict, words: str):
    with pytest.raises(MinivllmError, match=words):
        widget.sweep(**knobs)


def test_the_challenge_is_open_at_first_and_can_be_met():
    shown = widget.show()
    assert "Not yet." in shown.progress.value
    shown.set(**MET)
    assert "Met." in shown.progress.value
    shown.set(cuda_graphs=False)
    assert "Switch paging" in shown.progress.value


def test_every_lever_has_a_knob_and_the_buttons_turn_them():
    shown = widget.show()
    assert set(shown.knobs) == {*widget.SERVER, *(rung.field for rung in LADDER)}
    shown.set(**{**widget.START, **widget.OFF})
    assert shown.state.end == shown.state.start
    assert Levers(**{name: shown.values()[name] for name in widget.OFF}) == Levers()
