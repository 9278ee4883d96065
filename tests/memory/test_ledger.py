"""Bytes of keys and values, tokens and requests that fit, weights, and the ledger that divides up a
GPU's memory.
"""

import dataclasses
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory.startup_logs import logs_of
from refusals import assert_refused

from minivllm.config import ModelConfig
from minivllm.config.units import GIB
from minivllm.errors import MinivllmError, UnsupportedModelError
from minivllm.memory import estimated_activation_peak, kv_bytes_per_token, kv_cache_tokens, max_concurrency
from minivllm_simulate.hardware import get_hardware
from minivllm_simulate.known_models import CONFIGS, known_model
from minivllm_simulate.memory import kv_groups, memory_ledger, num_parameters, rotary_table_bytes, weight_bytes
from minivllm_simulate.memory.adapters import adapter_parameters

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "hidden_size": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip

PUBLISHED = tomllib.loads(Path(__file__).with_name("published_figures.toml").read_text())


@pytest.mark.parametrize(("name", "kib"), PUBLISHED["kib_per_token"].items())
def test_bytes_per_token_are_the_published_figures(name, kib):
    assert kv_bytes_per_token(known_model(name)) == kib * 1024


def test_latent_attention_keeps_one_vector_whole_on_every_gpu():
    deepseek = known_model("DeepSeek-V3")
    assert kv_bytes_per_token(deepseek) == 61 * 576 * 2
    assert {kv_bytes_per_token(deepseek, tp=tp) for tp in (1, 2, 8, 16)} == {61 * 576 * 2}
    assert kv_bytes_per_token(deepseek, "fp8") == 61 * 576
    assert_refused("no heads", kv_bytes_per_token, deepseek, "int8_per_token_head")


@pytest.mark.parametrize(("tp", "heads"), [(1, 8), (2, 4), (4, 2), (8, 1), (16, 1), (64, 1)])
def test_heads_are_divided_and_then_held_several_times(tp, heads):
    assert kv_bytes_per_token(LLAMA, tp=tp) == 2 * 32 * heads * 128 * 2


HEAD_BYTES = [
    ("auto", 256), ("bfloat16", 256), ("float16", 256), ("float32", 512), ("fp8", 128), ("fp8_e4m3", 128),
    ("fp8_e5m2", 128), ("int8", 132), ("int8_per_token_head", 132), ("fp8_per_token_head", 132), ("nvfp4", 72),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "head_bytes"), HEAD_BYTES)
def test_dtypes_with_their_scales(dtype, head_bytes):
    assert kv_bytes_per_token(LLAMA, dtype) == 2 * 32 * 8 * head_bytes


SERVED = [
    ({"torch_dtype": "float32"}, 2),
    ({"torch_dtype": None}, 2),
    ({"torch_dtype": None, "dtype": "float16"}, 2),
    ({"quantization_config": {"quant_method": "fp8"}}, 2),
    ({"quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": None}}, 2),
    ({"quantization_config": {"kv_cache_scheme": {"type": "float", "num_bits": 8}}}, 1),
    ({"quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}}, 1),
]


@pytest.mark.parametrize(("changes", "expected"), SERVED)
def test_auto_is_the_dtype_that_would_be_served(changes, expected):
    assert kv_bytes_per_token({**LLAMA, **changes}) == 2 * 32 * 8 * 128 * expected


@pytest.mark.parametrize("tp", [3, 5, 6, 12, 0, -1, True, 1.0])
def test_heads_that_cannot_be_divided(tp):
    assert_refused("", kv_bytes_per_token, LLAMA, tp=tp)


FORGETFUL = {
    "mamba": {"model_type": "mamba", "hidden_size": 768, "num_hidden_layers": 24, "state_size": 16},
    "jamba": {**LLAMA, "model_type": "jamba", "attn_layer_period": 8, "mamba_d_state": 16},
    "hybrid by its fields alone": {**LLAMA, "model_type": "brand_new", "mamba_d_state": 16},
    "qwen3_next": {**LLAMA, "model_type": "qwen3_next", "full_attention_interval": 4},
    "linear layers": {**LLAMA, "layer_types": ["linear_attention", "full_attention"] * 16},
    "gemma3": {"model_type": "gemma3", "text_config": {**LLAMA, "model_type": "gemma3_text", "sliding_window": 512}},
    "gemma2": {**LLAMA, "model_type": "gemma2", "sliding_window": 4096},
    "gpt_oss": {**LLAMA, "model_type": "gpt_oss", "layer_types": ["sliding_attention", "full_attention"] * 16},
    "llama4": {**LLAMA, "model_type": "llama4_text", "attention_chunk_size": 8192},
    "mistral v0.1": {**LLAMA, "model_type": "mistral", "sliding_window": 4096},
    "windows from a layer on": {
        **LLAMA, "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 16,
    },
    "mixed layers": {**LLAMA, "sliding_window": 1024, "layer_types": ["sliding_attention"] * 31 + ["full_attention"]},
    "all layers windowed": {**LLAMA, "sliding_window": 1024, "layer_types": ["sliding_attention"] * 32},
    "shared caches": {**LLAMA, "model_type": "gemma3n_text", "num_kv_shared_layers": 10},
    "second cache": {**LLAMA, "model_type": "deepseek_v32", "kv_lora_rank": 512, "qk_rope_head_dim": 64},
    "second cache by its field": {**LLAMA, "model_type": "", "index_topk": 2048},
    "encoder and decoder": {**LLAMA, "is_encoder_decoder": True},
    "unknown type": {**LLAMA, "model_type": "never_heard_of"},
}  # fmt: skip


REASONS = {
    "mamba": "has 'state_size'", "linear layers": "linear_attention", "gemma2": "'gemma2' model is known to",
    "shared caches": "has 'num_kv_shared_layers'", "mistral v0.1": "last 4096 tokens",
    "mixed layers": "inside a window", "unknown type": "'never_heard_of' model is known to",
}  # fmt: skip
COUNTED_IN_GROUPS = ("gemma3", "gemma2", "llama4", "mistral v0.1")


@pytest.mark.parametrize(("name", "config"), FORGETFUL.items())
def test_models_that_do_not_keep_every_token_have_no_figure_per_token(name, config):
    with pytest.raises(UnsupportedModelError, match=REASONS.get(name)):
        kv_bytes_per_token(config)
    with pytest.raises(UnsupportedModelError):
        kv_cache_tokens(GIB, ModelConfig.from_dict(config))
    if name in COUNTED_IN_GROUPS:
        assert kv_groups(config).blocks_per_request(100) > 0
        return
    with pytest.raises(UnsupportedModelError):
        memory_ledger(config, "H100", max_model_len=1024)


PLAIN = {
    "window switched off": {
        **LLAMA, "model_type": "qwen2", "use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 8,
    },
    "no layer reaches the window": {
        **LLAMA, "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 32,
    },
    "window null": {**LLAMA, "model_type": "mistral", "sliding_window": None},
    "all layers full": {**LLAMA, "layer_types": ["full_attention"] * 32, "sliding_window": 4096},
    "unknown type that lists its layers": {**LLAMA, "model_type": "brand_new", "layer_types": ["full_attention"] * 32},
    "shape without a type": {key: LLAMA[key] for key in LLAMA if key != "model_type"},
    "attention in every layer": {**LLAMA, "model_type": "minimax_m2"},
    "no encoder": {**LLAMA, "is_encoder_decoder": False},
    "nested": {"model_type": "llava", "text_config": LLAMA},
}  # fmt: skip


@pytest.mark.parametrize("config", PLAIN.values(), ids=PLAIN)
def test_models_that_keep_every_token_are_counted(config):
    assert kv_bytes_per_token(config) == 2 * 32 * 8 * 128 * 2


@given(
    layers=st.integers(1, 100), kv_heads=st.integers(1, 16), group=st.integers(1, 8), head_dim=st.integers(1, 256),
    block_size=st.sampled_from([1, 8, 16, 64]), kv_bytes=st.integers(0, 2**40),
)  # fmt: skip
def test_tokens_are_whole_blocks_and_no_block_more_fits(layers, kv_heads, group, head_dim, block_size, kv_bytes):
    model = ModelConfig(layers, kv_heads * group, kv_heads, head_dim)
    tokens = kv_cache_tokens(kv_bytes, model, block_size)
    per_token = 2 * layers * kv_heads * head_dim * 2
    assert tokens % block_size == 0
    assert tokens * per_token <= kv_bytes < (tokens + block_size) * per_token


@pytest.mark.parametrize("log", logs_of("capacity"), ids=lambda log: log.source)
def test_capacity_equals_start_up_logs(log):
    model = known_model(log.model)
    fewest, most = (
        kv_cache_tokens(int((log.kv_gib + rounding) * GIB), model, kv_dtype=log.kv_dtype, tp=log.tp)
        for rounding in (-0.005, 0.005)
    )
    if log.tokens is not None:
        assert fewest <= log.tokens <= most
        fewest = most = log.tokens
    if log.max_model_len is not None:
        least, greatest = (round(max_concurrency(tokens, log.max_model_len), 2) for tokens in (fewest, most))
        assert least <= log.concurrency <= greatest


def test_fp8_cache_doubles_the_tokens_of_a_log():
    """Qwen3-8B on an A100 holds 389,872 tokens, and 779,760 with an fp8 cache
    (vllm-project/vllm#42058).
    """
    model = known_model("Qwen3-8B")
    kv_bytes = 779_760 * kv_bytes_per_token(model, "fp8")
    assert kv_cache_tokens(kv_bytes, model, kv_dtype="fp8") == 779_760
    assert kv_cache_tokens(kv_bytes, model) == 389_872


@pytest.mark.parametrize("log", logs_of("needed"), ids=lambda log: log.source)
def test_memory_of_one_request_equals_start_up_logs(log):
    needed = log.max_model_len * kv_bytes_per_token(known_model(log.model), tp=log.tp)
    assert round(needed / GIB, 2) == log.needed_gib


@pytest.mark.parametrize("log", logs_of("weights"), ids=lambda log: log.source)
def test_weights_equal_start_up_logs(log):
    model = known_model(log.model)
    assert abs((weight_bytes(model) + rotary_table_bytes(model)) / GIB - log.gib) < 1e-3


@pytest.mark.parametrize("log", logs_of("profiles"), ids=lambda log: log.source)
def test_ledger_equals_start_up_logs(log):
    hardware = dataclasses.replace(get_hardware("T4"), memory_bytes=int(log.total * GIB))
    ledger = memory_ledger(
        known_model(log.model), hardware, max_model_len=2048, gpu_memory_utilization=log.utilization,
        weights=int(log.weights * GIB), non_torch=int(log.non_torch * GIB),
        activation_peak=int(log.activations * GIB), cuda_graphs=0,
    )  # fmt: skip
    rounding = 0.005 * 5 * GIB  # five rounded figures
    assert abs(ledger.kv_bytes - log.kv * GIB) < rounding
    assert abs(ledger.num_blocks - log.blocks) <= rounding // (16 * ledger.bytes_per_token) + 1
    assert sum(row.bytes for row in ledger.rows) == hardware.memory_bytes


@pytest.mark.parametrize("log", logs_of("activations"), ids=lambda log: log.source)
def test_estimate_of_activations_is_near_start_up_logs(log):
    estimate = estimated_activation_peak(known_model(log.model), log.max_num_batched_tokens, log.max_num_seqs)
    assert estimate / GIB == pytest.approx(log.gib, rel=0.06)


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED["parameters"].items())
def test_parameters_are_those_of_the_stored_tensors(name, parameters):
    model = known_model(name)
    assert num_parameters(model) == parameters
    assert weight_bytes(model, "bfloat16") == 2 * parameters
    assert weight_bytes(model, "float32") == 4 * parameters
    assert weight_bytes(model, "int8") == parameters


def test_weights_of_a_tensor_parallel_rank():
    model = known_model("Meta-Llama-3-70B")
    first, two = weight_bytes(model), weight_bytes(model, tp=2)
    norms = (2 * 80 + 1) * 8192 * 2
    assert 2 * (two - norms) == first - norms
    replicated = weight_bytes(model, tp=16) * 16 - weight_bytes(model)
    assert replicated == 15 * norms + 80 * 8 * 128 * 2 * 8192 * 2


def test_weights_of_quantized_checkpoints_are_not_guessed():
    quantized = {**CONFIGS["Qwen/Qwen3-8B"], "quantization_config": {"quant_method": "awq"}}
    assert_refused("awq", weight_bytes, quantized)
    assert weight_bytes(quantized, "bfloat16") == weight_bytes(known_model("Qwen3-8B"))
    ledger = memory_ledger(quantized, "L4", max_model_len=4096, weights=int(5.7 * GIB))
    assert ledger.rows[0].bytes == int(5.7 * GIB)


def test_deepseeks_checkpoint_is_fp8_in_blocks():
    """The hub counts the numbers of each dtype in its files (the API's `safetensors.parameters` of
    the model).

    The files hold one layer more than the model, for drafts, with two norms, a projection, and
    copies of embedding and head.
    """
    held = 680_571_043_840 * 1 + 3_918_786_560 * 2 + 41_555_600 * 4
    with_draft_layer = {**CONFIGS["deepseek-ai/DeepSeek-V3"], "num_hidden_layers": 62}
    hidden, vocab = 7168, 129280
    beside = (2 * hidden * hidden + 2 * vocab * hidden + 3 * hidden) * 2
    assert weight_bytes(with_draft_layer) + beside == pytest.approx(held, rel=1e-5)
    deepseek = known_model("DeepSeek-V3")
    assert weight_bytes(deepseek) / GIB == pytest.approx(627, abs=1)  # not 1,250: eight H200 hold it
    assert memory_ledger(deepseek, "H200", tp=8, max_model_len=8192).tokens > 100_000
    other = {**CONFIGS["deepseek-ai/DeepSeek-V3"], "quantization_config": {"quant_method": "fp8"}}
    assert_refused("does not follow from its shape", weight_bytes, other)


def test_parameters_of_unknown_types_are_not_guessed():
    with pytest.raises(UnsupportedModelError, match="olmo2"):
        num_parameters({**LLAMA, "model_type": "olmo2", "vocab_size": 1000, "intermediate_size": 100})
    assert_refused("vocab_size", num_parameters, LLAMA)


@given(
    utilization=st.floats(0.5, 1.0), tp=st.sampled_from([1, 2, 4, 8]), block_size=st.sampled_from([1, 16, 64]),
    name=st.sampled_from(["Qwen3-8B", "Llama-2-7b-hf", "DeepSeek-V2-Lite"]), dtype=st.sampled_from(["auto", "fp8"]),
)  # fmt: skip
def test_rows_of_the_ledger_sum_to_the_device(utilization, tp, block_size, name, dtype):
    ledger = memory_ledger(
        known_model(name), "H100", max_model_len=2048, gpu_memory_utilization=utilization, tp=tp, kv_dtype=dtype,
        block_size=block_size,
    )  # fmt: skip
    assert sum(row.bytes for row in ledger.rows) == get_hardware("H100").memory_bytes
    assert all(row.bytes >= 0 for row in ledger.rows)
    cache = next(row for row in ledger.rows if row.name == "KV cache")
    assert cache.bytes == ledger.num_blocks * block_size * ledger.bytes_per_token
    assert ledger.usable_blocks == ledger.num_blocks - 1
    assert ledger.tokens == kv_cache_tokens(ledger.kv_bytes, known_model(name), block_size, dtype, tp)
    assert ledger.concurrency == ledger.tokens / 2048


def test_request_that_does_not_fit_is_refused_with_the_length_that_would():
    model = known_model("Llama-3.1-8B")
    with pytest.raises(MinivllmError, match="max_model_len") as refusal:
        memory_ledger(model, "L4")
    longest = memory_ledger(model, "L4", check=False).longest_request
    assert str(longest) in str(refusal.value)
    assert memory_ledger(model, "L4", max_model_len=longest).max_model_len == longest
    assert_refused(str(longest), memory_ledger, model, "L4", max_model_len=longest + 1)


def test_null_block_is_not_for_requests():
    model, block = ModelConfig(1, 1, 1, 64), 16 * 2 * 64 * 2
    arguments = {"weights": 0, "activation_peak": 0, "non_torch": 0, "cuda_graphs": 0, "gpu_memory_utilization": 1.0}
    hardware = dataclasses.replace(get_hardware("T4"), memory_bytes=4 * block)
    assert memory_ledger(model, hardware, max_model_len=48, **arguments).tokens == 64
    assert_refused("48 or less", memory_ledger, model, hardware, max_model_len=64, **arguments)


def test_nothing_left_for_the_cache():
    assert_refused("nothing is left", memory_ledger, known_model("Llama-2-13b-hf"), "T4", max_model_len=1)
    assert_refused("nothing is left", kv_cache_tokens, -1, LLAMA)


WHOLE = known_model("Llama-3.1-8B")


NONSENSE = [
    (lambda: kv_cache_tokens("1", WHOLE), "kv_bytes.*'1'"),
    (lambda: kv_cache_tokens(float("nan"), WHOLE), "kv_bytes.*nan"),
    (lambda: max_concurrency(None, 100), "tokens.*None"),
    (lambda: max_concurrency(-1, 100), "tokens.*-1"),
    (lambda: weight_bytes(WHOLE, []), r"dtype.*\[\]"),
    (lambda: rotary_table_bytes(WHOLE, "int3"), "dtype.*int3"),
    (lambda: kv_bytes_per_token(WHOLE, "int3"), "KV cache 'int3'"),
    (lambda: max_concurrency(100, 0), "max_model_len.*0"),
    (lambda: adapter_parameters(WHOLE, 0), "rank"),
    (lambda: adapter_parameters(WHOLE, 8, ("lm_head",)), "lm_head"),
    (lambda: adapter_parameters(known_model("DeepSeek-V2-Lite"), 8), "ordinary attention"),
    (lambda: memory_ledger(WHOLE, None), "GPU None"),
    (lambda: memory_ledger(WHOLE, "H100", gpu_memory_utilization="x"), "gpu_memory_utilization.*'x'"),
    (lambda: memory_ledger(WHOLE, "H100", gpu_memory_utilization=1.5), "gpu_memory_utilization.*1.5"),
    (lambda: memory_ledger(WHOLE, "H100", block_size=0), "block_size.*0"),
    (lambda: memory_ledger(WHOLE, "H100", max_model_len=-5), "max_model_len.*-5"),
    (lambda: memory_ledger(WHOLE, "H100", max_num_seqs=0), "max_num_seqs.*0"),
    (lambda: memory_ledger(WHOLE, "H100", weights=-1), "weights.*-1"),
    (lambda: memory_ledger(WHOLE, "H100", non_torch="1"), "outside torch.*'1'"),
]


@pytest.mark.parametrize(("ask", "said"), NONSENSE)
def test_nonsense_is_named(ask, said):
    assert_refused(said, ask)
