"""Caches of models whose layers differ in what they keep, compared with vLLM's start-up logs and
its rules.
"""

import math
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory.startup_logs import logs_of
from refusals import assert_refused

from minivllm.config import ModelConfig
from minivllm.config.units import GIB
from minivllm.errors import MinivllmError, UnsupportedModelError
from minivllm.memory import kv_bytes_per_token
from minivllm.memory.kv_layers import FullLayer
from minivllm_simulate.known_models import CONFIGS, HYBRIDS, known_model
from minivllm_simulate.memory import kv_groups, memory_ledger
from minivllm_simulate.memory.kv_layers import StateLayer, WindowLayer, form_groups

MODELS = tomllib.loads(Path(__file__).with_name("published_models.toml").read_text())


def config_of(name):
    return ModelConfig.from_dict(MODELS[name]) if name in MODELS else known_model(name)


@pytest.mark.parametrize("log", logs_of("hybrid"), ids=lambda log: f"{log.model}, {log.kv_gib} GiB")
def test_capacity_equals_start_up_logs(log):
    kv = kv_groups(
        config_of(log.model), log.kv_dtype, log.tp, max_num_batched_tokens=log.max_num_batched_tokens,
        steps_in_flight=log.steps_in_flight, states=log.states,
    )  # fmt: skip
    per_request = kv.blocks_per_request(log.max_model_len)
    half = 0.05 if log.kv_gib == 20.2 else 0.005  # the log's last digit
    least, most = (int((log.kv_gib + error) * GIB) // kv.block_bytes for error in (-half, half))
    if log.by_groups:
        figures = [blocks // len(kv.groups) * kv.groups[-1].block_size for blocks in (least, most)]
    else:
        figures = [int(blocks / per_request * log.max_model_len) for blocks in (least, most)]
    assert figures[0] <= log.tokens <= figures[1]
    assert figures[1] - figures[0] <= 0.011 * log.tokens  # the log's two decimals leave no more room
    blocks = range(least, most + 1)
    assert any(round(count / per_request, 2) == pytest.approx(log.concurrency, abs=0.006) for count in blocks)


def test_memory_of_one_request_equals_a_start_up_log():
    """gpt-oss-120b, with steps of 1,024 tokens, needs 4.54 GiB for 131,072 tokens
    (vllm-project/vllm#27508).
    """
    kv = kv_groups(known_model("gpt-oss-120b"), max_num_batched_tokens=1024, steps_in_flight=1)
    assert kv.blocks_per_request(131072) * kv.block_bytes / GIB == pytest.approx(4.54, abs=0.005)
    assert kv.blocks_per_request(131072) == 131072 // 16 + math.ceil((127 + 1024) / 16) + 1


BLOCKS = [
    ("Qwen3-Next-80B-A3B-Instruct", 2, 544, "Setting attention block size to 544 tokens (vLLM 0.10.2)"),
    ("Qwen3.5-27B", 1, 784, "vllm-project/vllm#40691: 290,864 tokens are 371 blocks of 784"),
]


@pytest.mark.parametrize(("name", "tp", "block_size", "published"), BLOCKS)
def test_a_block_of_attention_is_as_large_as_a_state(name, tp, block_size, published):
    layers = kv_groups(config_of(name), tp=tp).groups
    assert {layer.block_size for layer in layers} == {block_size}, published
    assert [type(layer) for layer in layers].count(StateLayer) == 3
    wide = kv_groups(config_of(name), tp=tp, gdn_checkpoints=True).groups
    assert all(layer.block_size % 64 == 0 and layer.block_size - block_size < 64 for layer in wide)
    assert [layer.states for layer in wide if isinstance(layer, StateLayer)] == [3, 3, 3]


def test_groups_of_gemma_4_are_the_published_ones():
    """The 12B model has 6 groups of 40 and 8 layers (tenstorrent/tt-metal#48283), and 16 and 64
    tokens per block (kvcached#396).
    """
    kv = kv_groups(MODELS["gemma-4-12B"])
    assert [(type(layer), layer.block_size) for layer in kv.groups] == [(WindowLayer, 16)] * 5 + [(FullLayer, 64)]
    assert {layer.page_bytes for layer in kv.groups} == {16 * 2 * 8 * 256 * 2}
    large = kv_groups(MODELS["gemma-4-31B"])
    assert [(type(layer), layer.block_size) for layer in large.groups] == [(WindowLayer, 16)] * 5 + [(FullLayer, 32)]
    assert large.block_bytes == 10 * 16 * 2 * 16 * 256 * 2


def test_layers_that_use_another_layers_cache_have_none():
    shared = {**MODELS["gemma-4-31B"], "num_kv_shared_layers": 30}
    assert kv_groups(shared).block_bytes * 2 == kv_groups(MODELS["gemma-4-31B"]).block_bytes


def test_chunked_attention_is_allocated_like_full_attention():
    """`VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE` is off by default
    (vllm-project/vllm#21761).
    """
    kv = kv_groups(MODELS["Llama-4-Scout"])
    assert kv.bytes_per_token == 48 * 2 * 8 * 128 * 2


def test_a_window_in_every_layer_is_one_group():
    mistral = {**CONFIGS["mistralai/Mistral-7B-v0.3"], "sliding_window": 4096}
    kv = kv_groups(mistral, max_num_batched_tokens=2048, steps_in_flight=1)
    assert len(kv.groups) == 1
    assert kv.bytes_per_token is None
    assert kv.blocks_per_request(2**20) == math.ceil((4095 + 2048) / 16) + 1
    assert kv.block_bytes == 32 * 2 * 8 * 128 * 2 * 16


@pytest.mark.parametrize("name", ["Qwen3-8B", "DeepSeek-V3", "Llama-2-7b-hf"])
def test_layers_that_keep_every_token_have_the_plain_figure(name):
    kv = kv_groups(known_model(name), tp=2)
    assert kv.bytes_per_token == kv_bytes_per_token(known_model(name), tp=2)
    assert kv.blocks_per_request(33) == 3


def test_groups_follow_the_rarest_kind_or_the_commonest_if_that_is_near():
    full, window = FullLayer(16, 100), WindowLayer(16, 100, 128)
    assert len(form_groups([full] * 10 + [window] * 52).groups) == 1 + 6  # the last group is padded
    near = form_groups([full] * 13 + [window] * 12)
    assert len(near.groups) == 2
    assert near.block_bytes == 13 * 100
    padded = form_groups([full, replace(window, page_bytes=70)])
    assert {layer.page_bytes for layer in padded.groups} == {100}
    assert {layer.block_size for layer in padded.groups} == {16}


@given(
    name=st.sampled_from(sorted(HYBRIDS)), length=st.integers(2, 40_000),
    gpu=st.sampled_from(["H100", "H200", "A100-80"]),
    dtype=st.sampled_from(["auto", "fp8"]),
    steps=st.sampled_from([512, 2048, 8192]),
)  # fmt: skip
def test_ledger_holds_what_it_says(name, length, gpu, dtype, steps):
    ledger = memory_ledger(
        HYBRIDS[name], gpu, max_model_len=length, tp=2, kv_dtype=dtype, max_num_batched_tokens=steps, weights=GIB
    )
    assert sum(row.bytes for row in ledger.rows) == ledger.device.memory_bytes
    assert ledger.num_blocks * ledger.kv.block_bytes <= ledger.kv_bytes
    assert ledger.tokens == int(ledger.concurrency * length)
    assert ledger.longest_request == length
    assert ledger.kv.blocks_per_request(length) >= ledger.kv.blocks_per_request(length - 1)


def test_a_request_that_does_not_fit_is_refused_with_the_length_that_would():
    asked = {"max_model_len": 131072, "weights": 74 * 10**9}
    with pytest.raises(MinivllmError, match=r"set max_model_len to \d+ or less") as refused:
        memory_ledger(known_model("gpt-oss-120b"), "H100", **asked)
    longest = int(str(refused.value).split("max_model_len to ")[1].split()[0])
    ledger = memory_ledger(known_model("gpt-oss-120b"), "H100", **{**asked, "max_model_len": longest})
    assert ledger.kv.blocks_per_request(longest) <= ledger.usable_blocks
    assert ledger.kv.blocks_per_request(longest + 1) > ledger.usable_blocks


UNCOUNTED = [
    ({"linear_num_value_heads": None}, "lacks one of"),
    ({"layer_types": ["linear_attention", "mamba"] * 20}, "its config has 'linear_num"),
    ({"model_type": "brand_new"}, "its config has 'linear_num"),
]


@pytest.mark.parametrize(("changes", "said"), UNCOUNTED)
def test_what_cannot_be_counted_is_refused_by_name(changes, said):
    with pytest.raises(UnsupportedModelError, match=said):
        kv_groups({**MODELS["Qwen3.6-35B-A3B"], **changes})


def test_states_that_do_not_fit_are_refused():
    assert_refused("divided over 3 GPUs", kv_groups, {**MODELS["Qwen3.5-27B"], "num_key_value_heads": 3}, tp=3)
