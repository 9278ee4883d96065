"""Test the GPU engine benchmark as far as a CPU can: what it counts, and that the engines take
turns.
"""

import random

import pytest
import torch
from refusals import assert_refuses

from minivllm import SamplingParams
from minivllm.config import EMBEDDED_MODEL
from minivllm_lab.engines.inside import runner_of


@pytest.fixture(scope="module")
def llms(bench):
    return bench.engines(str(EMBEDDED_MODEL), "cpu", quick=True)[0]


def test_the_engines_differ_in_one_thing(llms, bench):
    assert {name: runner_of(llm).draft_tokens_handler.keeps_drafts for name, llm in llms.items()} == {
        bench.AHEAD: True,
        bench.WAITING: False,
    }
    prompts = bench.prompts_of(2, 10, 4000, random.Random(0))
    params = SamplingParams(temperature=0.0, max_tokens=8)
    answers = [
        [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
        for llm in llms.values()
    ]
    assert answers[0] == answers[1], "random weights of one seed"


def numbers_in_products(config) -> int:
    """Count the elements of all weight matrices except the head's."""
    heads = 2 * config.num_attention_heads + 2 * config.num_key_value_heads
    return config.num_hidden_layers * config.hidden_size * (heads * config.head_dim + 3 * config.intermediate_size)


def test_the_floor_is_what_a_step_reads(llms, bench):
    config = runner_of(llms[bench.AHEAD]).config
    decoded = bench.decode(llms, 2, 10, bandwidth=1e9, rounds=1)
    numbers = numbers_in_products(config) + config.vocab_size * config.hidden_size
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    assert config.tie_word_embeddings, "so the embedding is read by the head"
    assert decoded["floor_ms"] == pytest.approx((4 * numbers + 2 * (10 + 64) * per_token) / 1e6, rel=0.01)
    assert decoded["share_of_floor"] == pytest.approx(decoded["floor_ms"] / decoded["ahead_ms"], rel=0.01)
    assert decoded["tokens_per_s"] == pytest.approx(2000 / decoded["ahead_ms"], rel=0.01)
    assert decoded["gain"] == pytest.approx(decoded["waiting_ms"] / decoded["ahead_ms"], rel=0.01, abs=0.005)


def test_the_operations_of_a_prefill(llms, bench, monkeypatch):
    config = runner_of(llms[bench.AHEAD]).config
    monkeypatch.setattr(bench, "serve", lambda llm, prompts, answer: 1e-4)
    result = bench.prefill(llms[bench.AHEAD], 2, 30, rounds=1)
    attention = 4 * config.head_dim * config.num_attention_heads * config.num_hidden_layers * 2 * 30 * 31 / 2
    operations = 2 * numbers_in_products(config) * 60 + attention + 2 * 2 * config.vocab_size * config.hidden_size
    assert result["tokens_per_s"] == 600_000
    assert result["tflops"] == pytest.approx(operations / 1e-4 / 1e12, rel=0.01)


def test_without_a_gpu_it_says_what_to_do(bench, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert_refuses(bench, about="no CUDA device here")
