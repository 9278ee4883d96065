"""Reading `config.json`: the four families, old and new spellings, and the errors for configs that
cannot work.
"""

import json
import math

import pytest
from refusals import assert_refused

from minivllm.config import ModelConfig

LLAMA3 = {"rope_type": "llama3", "factor": 8.0}
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "rope_scaling": LLAMA3,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
}  # fmt: skip
QWEN2 = {"model_type": "qwen2", "sliding_window": 4096}
WINDOW_FROM = QWEN2 | {"use_sliding_window": True}
FULL, WINDOW = "full_attention", "sliding_attention"


def without(*names, **changes):
    return {**{name: value for name, value in LLAMA.items() if name not in names}, **changes}


def test_fields_of_a_llama_config():
    config = ModelConfig.from_dict(LLAMA)
    assert (config.architecture, config.model_type, config.dtype) == ("LlamaForCausalLM", "llama", "bfloat16")
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (32, 8, 128)
    assert (config.rope_theta, config.rope_scaling) == (500000.0, LLAMA3)
    assert config.eos_token_ids == (128001, 128008, 128009)
    assert not any((config.attention_bias, config.qk_norm, config.mlp_bias, config.tie_word_embeddings))
    assert hash(config) == hash(ModelConfig.from_dict(LLAMA))


def test_rope_parameters_of_transformers_5_say_the_same():
    new = without("rope_theta", "rope_scaling", rope_parameters={"rope_theta": 5e5, **LLAMA3})
    assert ModelConfig.from_dict(new) == ModelConfig.from_dict(LLAMA)


SPELLINGS = [
    ({"rope_theta": 1e6, "rope_scaling": None}, {"rope_theta": 1e6, "rope_scaling": None}),
    ({"rope_theta": None, "rope_scaling": None}, {"rope_theta": 10000.0, "rope_scaling": None}),
    ({"rope_parameters": {"rope_theta": 3e4, "rope_type": "default"}}, {"rope_theta": 3e4, "rope_scaling": None}),
    ({"rope_scaling": {"type": "linear", "factor": 2}}, {"rope_scaling": {"rope_type": "linear", "factor": 2}}),
    ({"rope_parameters": {FULL: {"rope_theta": 7.0, "rope_type": "default"}}}, {"rope_theta": 7.0}),
    ({"head_dim": None}, {"head_dim": 128}),
    ({"head_dim": 64}, {"head_dim": 64}),
    ({"hidden_size": 1024, "head_dim": 128}, {"head_dim": 128}),
    ({"num_key_value_heads": None}, {"num_key_value_heads": 32}),
    ({"num_key_value_heads": None, "model_type": "falcon", "multi_query": True}, {"num_key_value_heads": 1}),
    ({"dtype": "float16"}, {"dtype": "float16"}),
    ({"torch_dtype": "torch.float16"}, {"dtype": "float16"}),
    ({"torch_dtype": None}, {"dtype": "float32"}),
    ({"eos_token_id": None}, {"eos_token_ids": ()}),
    ({"eos_token_id": 0}, {"eos_token_ids": (0,)}),
    ({"hidden_activation": "gelu_pytorch_tanh"}, {"hidden_act": "gelu_pytorch_tanh"}),  # as Gemma spells it
    ({"model_type": "mistral", "sliding_window": 4096}, {"sliding_window": 4096}),
    ({"model_type": "mistral", "sliding_window": None}, {"sliding_window": None}),
    (QWEN2 | {"use_sliding_window": False}, {"sliding_window": None}),
    (QWEN2, {"sliding_window": None}),
    (WINDOW_FROM | {"max_window_layers": 0}, {"sliding_window": 4096}),
    (WINDOW_FROM | {"max_window_layers": 30}, {"layer_types": (*[FULL] * 30, WINDOW, WINDOW)}),
    (WINDOW_FROM | {"max_window_layers": 9}, {"sliding_window": None}),
    ({"sliding_window": 4096, "layer_types": [FULL] * 32}, {"sliding_window": None}),
    ({"sliding_window": 4096, "layer_types": [WINDOW] * 32}, {"sliding_window": 4096}),
]


@pytest.mark.parametrize(("changes", "fields"), SPELLINGS, ids=str)
def test_what_a_config_says_in_any_spelling(changes, fields):
    config = ModelConfig.from_dict({**LLAMA, **changes})
    assert {name: getattr(config, name) for name in fields} == fields


def test_gpt2_names():
    config = ModelConfig.from_dict(
        {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024}
    )
    assert (config.num_hidden_layers, config.head_dim, config.hidden_size) == (12, 64, 768)
    assert (config.intermediate_size, config.max_position_embeddings) == (3072, 1024)


FAMILIES = [
    ("llama", None, False, False, False),
    ("llama", True, True, True, False),
    ("mistral", None, False, False, False),
    ("qwen2", None, True, False, False),
    ("qwen2", False, True, False, False),
    ("qwen3", False, False, False, True),
    ("qwen3", True, True, True, True),
]


@pytest.mark.parametrize(("model_type", "says", "attention", "output", "norm"), FAMILIES)
def test_biases_and_norms_of_each_family(model_type, says, attention, output, norm):
    config = ModelConfig.from_dict({**LLAMA, "model_type": model_type, "attention_bias": says})
    assert (config.attention_bias, config.attention_output_bias, config.qk_norm) == (attention, output, norm)


def test_text_config_of_a_multimodal_model():
    text = without("torch_dtype", "eos_token_id")
    config = ModelConfig.from_dict({"model_type": "llava", "dtype": "float16", "eos_token_id": 7, "text_config": text})
    assert (config.model_type, config.dtype, config.eos_token_ids) == ("llama", "float16", (7,))


def test_require_names_the_first_that_is_missing():
    assert_refused("vocab_size", ModelConfig(2, 4, 4, 32, hidden_size=8).require, "hidden_size", "vocab_size")


def test_from_pretrained_reads_directory_and_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert ModelConfig.from_pretrained(tmp_path) == ModelConfig.from_dict(LLAMA)
    assert ModelConfig.from_pretrained(str(tmp_path / "config.json")) == ModelConfig.from_dict(LLAMA)


@pytest.mark.parametrize("contents", ["{", "[1, 2]", '{"model_type": "llama"}', "\x00"])
def test_from_pretrained_says_which_model_is_wrong(tmp_path, contents):
    (tmp_path / "config.json").write_text(contents)
    assert_refused("config", ModelConfig.from_pretrained, tmp_path)


def test_from_pretrained_without_a_model(tmp_path, monkeypatch):
    assert_refused(r"no config\.json", ModelConfig.from_pretrained, tmp_path)
    for name in ("./nowhere", "/no/where", "a/b/c", ""):
        assert_refused("no model directory", ModelConfig.from_pretrained, name)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in ("nobody/no-such-model", "no such model!"):
        assert_refused("cannot be fetched", ModelConfig.from_pretrained, name)


WRONG = [
    *(({name: None}, name) for name in ("num_hidden_layers", "num_attention_heads", "hidden_size")),
    *(
        ({name: value}, name)
        for name in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
        for value in (0, -1, "32", 1.5, True)
    ),
    ({"num_key_value_heads": 5}, ""),
    ({"hidden_size": 4097}, ""),
    ({"kv_lora_rank": 512}, ""),
    ({"layer_types": [FULL]}, ""),
    ({"model_type": 5}, "'model_type' must be a text"),
    ({"architectures": "X"}, "'architectures' must be a list"),
    ({"layer_types": 5}, "'layer_types' must be a list"),
    ({"quantization_config": "gptq"}, "'quantization_config' must be a mapping"),
    ({"rope_parameters": "x"}, "'rope_parameters' must be a mapping"),
    ({"rope_scaling": []}, "'rope_scaling' must be a mapping"),
    ({"rope_scaling": {"rope_type": "linear", "factor": "x"}}, "'factor' .* must be from 0 to 1e.15, not 'x'"),
    *(
        ({name: value}, f"'{name}' must be a number above 0, not ")
        for name in ("rms_norm_eps", "rope_theta")
        for value in ("x", True, 0, -1e-6, math.nan, math.inf, 10**400)
    ),
    ({"layer_norm_epsilon": -1, "rms_norm_eps": None}, "'rms_norm_eps' must be a number above 0, not -1"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "'rope_theta' must be a number above 0"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 1e300}}, "'factor' .* must be from 0 to"),
    ({"vocab_size": 2**63}, r"'vocab_size' must be a positive whole number below 2\^63"),
    ({"sliding_window": "x"}, "'sliding_window' must be a whole number"),
    ({"eos_token_id": "x"}, "'eos_token_id' must be a token id or a list of them"),
    ({"eos_token_id": [1, 2.0]}, "'eos_token_id' must be a token id or a list of them"),
    ({"num_experts": 4, "n_shared_experts": "x"}, "'n_shared_experts'"),
    ({"num_experts": 4, "first_k_dense_replace": -1}, "'first_k_dense_replace'"),
]


@pytest.mark.parametrize(("changes", "named"), WRONG, ids=str)
def test_a_value_that_cannot_be_is_named(changes, named):
    assert_refused(named, ModelConfig.from_dict, {**LLAMA, **changes})
