"""Ranks of a tensor-parallel group: which part of a model each has, and that their terms add up to
the whole.
"""

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models.small import SMALL
from refusals import assert_refused

from minivllm.config import ModelConfig
from minivllm.memory import kv_bytes_per_token
from minivllm.models.attention import CausalAttention
from minivllm.models.loader import checkpoint_slots, random_model
from minivllm.models.parallel import GroupCoordinator, possible_sizes, shard_config

CONFIG = ModelConfig.from_dict(SMALL)
CONFIG = dataclasses.replace(CONFIG, attention_bias=True, attention_output_bias=True, mlp_bias=True)


class ThreadedGroup(GroupCoordinator):
    """A group whose ranks are threads: each leaves its terms, and adds up all of them when every
    rank has arrived.
    """

    def __init__(self, rank: int, size: int, terms: list, everyone: threading.Barrier):
        super().__init__(rank, size)
        self.terms, self.everyone = terms, everyone

    def all_reduce(self, terms: torch.Tensor) -> torch.Tensor:
        self.terms[self.rank] = terms
        self.everyone.wait(10)
        total = torch.stack(self.terms).sum(0)
        self.everyone.wait(10)
        return total


def hidden_states(model) -> torch.Tensor:
    ids = torch.arange(20) % CONFIG.vocab_size
    with torch.inference_mode():
        return model(ids, torch.arange(20), CausalAttention(model.config))


@pytest.mark.parametrize("size", [2, 4])
def test_the_terms_of_all_ranks_add_up_to_the_whole_model(size):
    terms, everyone = [None] * size, threading.Barrier(size)
    groups = [ThreadedGroup(rank, size, terms, everyone) for rank in range(size)]
    models = [random_model(CONFIG, seed=1, group=group) for group in groups]
    with ThreadPoolExecutor(size) as pool:
        result = list(pool.map(hidden_states, models))
    for hidden in result:
        torch.testing.assert_close(hidden, hidden_states(random_model(CONFIG, seed=1)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_parts_of_all_ranks_are_the_stored_tensors(size):
    stored = {name: slot.target for name, slot in checkpoint_slots(random_model(CONFIG, seed=5)).items()}
    ranks = [checkpoint_slots(random_model(CONFIG, seed=5, group=GroupCoordinator(r, size))) for r in range(size)]
    for name, tensor in stored.items():
        slots = [rank[name] for rank in ranks]
        assert all(slot.shape == tensor.shape for slot in slots)
        if name.endswith(("o_proj.bias", "down_proj.bias")):
            assert torch.equal(sum(slot.target for slot in slots), tensor), "added once"
            continue
        parts = {slot.index: slot.target for slot in slots}
        assert len(parts) == slots[0].parts
        assert torch.equal(torch.cat([parts[index] for index in sorted(parts)], slots[0].dim), tensor)


def test_alone_nothing_is_exchanged():
    terms, group = torch.ones(3), GroupCoordinator()
    assert group.all_reduce(terms) is terms


def test_each_layer_reduces_two_vectors_a_token_and_the_last_only_those_that_are_sampled():
    reduced = []

    class Noting(GroupCoordinator):
        def all_reduce(self, terms):
            reduced.append(tuple(terms.shape))
            return terms

    model, ids = random_model(CONFIG, seed=1, group=Noting(0, 2)), torch.arange(7)
    model(ids, ids, CausalAttention(model.config), torch.tensor([2, 6]))
    each, wanted = (7, CONFIG.hidden_size), (2, CONFIG.hidden_size)
    assert reduced == [each] * (2 * CONFIG.num_hidden_layers - 2) + [wanted] * 2


INDIVISIBLE = [
    ({}, 3, "1, 2, 4$"),
    ({}, 8, "1, 2, 4$"),
    ({"intermediate_size": 22}, 4, "1, 2$"),
    ({"num_attention_heads": 12, "num_key_value_heads": 3}, 2, "1, 3, 6, 12$"),
    ({"num_attention_heads": 5, "num_key_value_heads": 5}, 2, "of 1$"),
]


@pytest.mark.parametrize(("changes", "size", "possible"), INDIVISIBLE)
def test_what_cannot_be_divided_is_refused_with_what_can(changes, size, possible):
    config = dataclasses.replace(CONFIG, **changes)
    assert_refused(possible, shard_config, config, size)


@given(
    kv_heads=st.integers(1, 12), group=st.integers(1, 6), width=st.integers(1, 240), size=st.integers(1, 80)
)  # fmt: skip
def test_a_size_is_possible_or_refused(kv_heads, group, width, size):
    config = dataclasses.replace(
        CONFIG, num_attention_heads=kv_heads * group, num_key_value_heads=kv_heads, intermediate_size=width
    )
    if size not in possible_sizes(config):
        assert_refused("", shard_config, config, size)
        return
    shard = shard_config(config, size)
    assert shard.num_attention_heads * size == config.num_attention_heads
    assert shard.intermediate_size * size == config.intermediate_size
    assert shard.num_attention_heads % shard.num_key_value_heads == 0
    assert kv_bytes_per_token(shard) == kv_bytes_per_token(config, tp=size)
