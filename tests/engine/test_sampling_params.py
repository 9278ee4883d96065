"""Sampling parameters: vLLM's names and defaults, and a clear error for each value that makes no
sense.
"""

import re

import pytest
from refusals import assert_refused

from minivllm.sampling_params import SamplingParams

WRONG = [
    ({"n": 0}, "n is 0"), ({"n": 2, "temperature": 0.0}, "greedy"), ({"temperature": float("nan")}, "temperature"),
    ({"temperature": 2.1}, "from 0 (greedy) to 2"),
    ({"max_token": 5}, "SamplingParams has no argument 'max_token'; did you mean 'max_tokens'?"),
    ({"structured_outputs": {"json": "{}"}}, "it must be StructuredOutputsParams"),
    ({"stop": ["a", "\ud800"]}, "a stop string is not valid text: it has half a character"),
    ({"bad_words": ["\ud800"]}, "a bad word is not valid text: it has half a character"),
    ({"top_p": 0.0}, "top_p is 0.0"), ({"top_p": 1.5}, "above 0 and at most 1"), ({"top_k": -2}, "top_k is -2"),
    ({"min_p": 1.01}, "min_p"), ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -3}, "between -2 and 2"), ({"repetition_penalty": 1e-320}, "from 1e-06 to 1000000"),
    ({"max_tokens": 0}, "max_tokens is 0"), ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 5, "max_tokens": 4}, "above max_tokens"), ({"logprobs": -2}, "logprobs is -2"),
    ({"prompt_logprobs": "3"}, "prompt_logprobs"), ({"stop": ["a", ""]}, "none of them empty"),
    ({"stop": 5}, "stop is 5"), ({"stop": "a", "detokenize": False}, "detokenize=True"),
    ({"bad_words": "word"}, "bad_words"), ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": iter([3])}, "stop_token_ids is"), ({"allowed_token_ids": iter([3])}, "allowed_token_ids is"),
    ({"allowed_token_ids": []}, "one token id or more"), ({"extra_args": {"kv_transfer_params": 3}}, "extra_args is"),
    ({"logit_bias": {1: "a"}}, "logit_bias"), ({"logit_bias": {"1": 2.0}}, "logit_bias"), ({"seed": "x"}, "seed"),
    ({"output_kind": "delta"}, "output_kind"), ({"ignore_eos": "no"}, "ignore_eos is 'no'; it must be True or False"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "said"), WRONG, ids=[said for _, said in WRONG])
def test_a_wrong_value_is_named(settings, said):
    assert_refused(re.escape(said), SamplingParams, **settings)


def test_fields_are_assigned_freely_and_checked_when_they_are_used():
    params = SamplingParams(n=2)
    params.temperature = 0.0  # does not go with n = 2; the next line says what is meant
    params.n = 1
    assert params.clone() == params
    params.top_p = 3.0
    assert_refused(r"top_p is 3\.0", params.clone)
    with pytest.raises(AttributeError, match="max_token"):
        params.max_token = 3  # type: ignore[attr-defined]


TAKEN = [
    ({"top_k": -1}, {"top_k": 0}),
    ({"seed": -1, "logprobs": True}, {"seed": None, "logprobs": 1}),
    ({"temperature": 1e-9}, {"temperature": 1e-2, "is_greedy": False}),
    ({"temperature": 0.0}, {"temperature": 0.0, "is_greedy": True}),
    ({"logit_bias": {3: 1000.0, 4: -1000.0}}, {"logit_bias": {3: 100.0, 4: -100.0}}),
    ({"stop": "ab"}, {"stop_strings": ("ab",)}),
    ({}, {"stop_strings": ()}),
]


@pytest.mark.parametrize(("settings", "taken"), TAKEN, ids=str)
def test_a_value_is_brought_into_the_engines_form(settings, taken):
    params = SamplingParams(**settings)
    assert {name: getattr(params, name) for name in taken} == taken


def test_a_clone_shares_nothing_with_its_original():
    params = SamplingParams(stop=["a"], stop_token_ids=[1], bad_words=["b"], logit_bias={1: 1.0}, allowed_token_ids=[2])
    clone = params.clone()
    for name in ("stop", "stop_token_ids", "bad_words", "logit_bias", "allowed_token_ids"):
        assert getattr(clone, name) == getattr(params, name)
        assert getattr(clone, name) is not getattr(params, name)


def test_children_have_one_completion_and_a_seed_each():
    params = SamplingParams(n=3, seed=7, top_p=0.5)
    children = [params.child(index) for index in range(3)]
    assert [child.seed for child in children] == [7, 8, 9]
    assert all(child.n == 1 and child.top_p == 0.5 for child in children)
    assert SamplingParams(n=2).child(1).seed is None
