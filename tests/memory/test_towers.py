"""Weights of multimodal checkpoints, and of the language models in them: counted in full, or
refused by name.
"""

import json

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

from minivllm.config import ModelConfig
from minivllm.config.units import GIB
from minivllm.errors import MinivllmError, UnsupportedModelError
from minivllm.memory import memory_ledger, num_parameters, parameter_groups, routed_parameters, weight_bytes
from minivllm_simulate.known_models import HYBRIDS, known_model

TEXT = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
GDN = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 8,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 48}
SHARED = {**EXPERTS, "shared_expert_intermediate_size": 40}
LLAMA4 = {"intermediate_size_mlp": 112, "num_local_experts": 4, "interleave_moe_layer_step": 2}
TEXTS = {
    "gemma": {}, "gemma2": {}, "gemma3_text": {}, "gpt_oss": {"num_local_experts": 4}, "llama4_text": LLAMA4,
    "qwen3_next": {**GDN, **SHARED}, "qwen3_5_text": GDN, "qwen3_5_moe_text": {**GDN, **SHARED},
}  # fmt: skip

VIT = {
    "hidden_size": 32, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 56,
    "patch_size": 14,
}  # fmt: skip
QWEN = {"depth": 3, "hidden_size": 32, "intermediate_size": 72, "num_heads": 2, "out_hidden_size": 64}
ADAPTER = {"projector_input_dim": 24, "projector_output_dim": 24, "vision_output_dim": 24}
TOWERS = {
    "llava": ({"model_type": "llama"}, {"model_type": "clip_vision_model", **VIT}),
    "llava with SigLIP": ({"model_type": "llama"}, {"model_type": "siglip_vision_model", **VIT}),
    "llava with Pixtral": ({"model_type": "mistral"}, {"model_type": "pixtral", **VIT}),
    "mistral3": ({"model_type": "mistral"}, {"model_type": "pixtral", **VIT}),
    "gemma3": ({"model_type": "gemma3_text"}, {"model_type": "siglip_vision_model", "vision_use_head": False, **VIT}),
    "qwen2_vl": ({}, {"depth": 3, "embed_dim": 32, "num_heads": 2, "hidden_size": 64}),
    "qwen2_5_vl": ({}, QWEN),
    "qwen3_vl": ({}, {**QWEN, "deepstack_visual_indexes": [0, 1]}),
    "qwen3_vl_moe": (EXPERTS, {**QWEN, "deepstack_visual_indexes": [1]}),
    "qwen3_5": (GDN, QWEN),
    "llama4": (LLAMA4, {"model_type": "llama4_vision_model", **VIT, **ADAPTER}),
}


def stored(auto, config):
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in auto.from_config(config).parameters())


@pytest.mark.parametrize("model_type", TEXTS)
@pytest.mark.parametrize("head_dim", [16, 24])
def test_language_models_have_the_parameters_of_transformers(model_type, head_dim):
    config = CONFIG_MAPPING[model_type](**TEXT, head_dim=head_dim, **TEXTS[model_type])
    assert num_parameters(config.to_dict()) == stored(AutoModelForCausalLM, config)


@pytest.mark.parametrize("name", TOWERS)
@pytest.mark.parametrize("tied", [False, True])
def test_multimodal_models_have_the_parameters_of_transformers(name, tied):
    text, vision = TOWERS[name]
    family = name.split()[0]
    text = {**TEXT, "head_dim": 16, "tie_word_embeddings": tied, **text}
    config = CONFIG_MAPPING[family](text_config=text, vision_config=vision, tie_word_embeddings=tied)
    assert num_parameters(config.to_dict()) == stored(AutoModelForImageTextToText, config)


def test_llava_as_it_is_published():
    """huggingface.co/llava-hf/llava-1.5-7b-hf leaves out fields of the language model that have
    Llama's defaults.
    """
    vision = {
        "hidden_size": 1024, "image_size": 336, "intermediate_size": 4096, "model_type": "clip_vision_model",
        "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14, "projection_dim": 768,
    }  # fmt: skip
    text = {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32064, "torch_dtype": "float16"}
    llava = {"model_type": "llava", "text_config": text, "vision_config": vision}
    assert num_parameters(llava) == 7_063_427_072
    groups = parameter_groups(ModelConfig.from_dict(llava))
    assert groups["vision"] == 7_063_427_072 - num_parameters({**llava, "vision_config": None})
    assert memory_ledger(llava, "L4").rows[0].bytes > 7_063_427_072 * 2


@pytest.mark.parametrize(
    ("name", "billions"),  # arXiv 2508.10925, table 1; huggingface.co pages of the others, rounded
    [("gpt-oss-20b", 20.91), ("gpt-oss-120b", 116.83), ("gemma-3-4b-it", 4.30), ("gemma-3-27b-it", 27.43)],
)
def test_published_parameters(name, billions):
    assert num_parameters(known_model(name)) / 1e9 == pytest.approx(billions, abs=0.005)


@pytest.mark.parametrize(("name", "billions"), [("gpt-oss-20b", 3.61), ("gpt-oss-120b", 5.13)])  # the same table
def test_published_parameters_that_a_token_passes(name, billions):
    """OpenAI's count excludes the embedding."""
    model = known_model(name)
    resting = routed_parameters(model) * (1 - model.num_experts_per_tok / model.num_experts)
    passed = num_parameters(model) - resting - parameter_groups(model)["embedding"]
    assert passed / 1e9 == pytest.approx(billions, abs=0.005)


def test_in_llama_4_only_every_second_layer_has_experts():
    model = ModelConfig.from_dict({"model_type": "llama4_text", **TEXT, **LLAMA4})
    expert = 3 * model.hidden_size * model.moe_intermediate_size
    assert routed_parameters(model) == model.num_hidden_layers // 2 * 4 * expert


@pytest.mark.parametrize(("name", "gib"), [("gpt-oss-20b", 12.8), ("gpt-oss-120b", 60.8)])  # arXiv 2508.10925, table 1
def test_checkpoints_in_mxfp4(name, gib):
    assert weight_bytes(known_model(name)) / GIB == pytest.approx(gib, abs=0.05)


def test_weights_equal_a_start_up_log():
    """vLLM 0.19.0 logs "Model loading took 51.45 GiB" for gemma-3-27b-it, including what its
    kernels keep beside the weights.
    """
    assert 51.45 * 0.99 < weight_bytes(known_model("gemma-3-27b-it")) / GIB < 51.45


@pytest.mark.parametrize(
    ("outer", "named"),
    [
        ({"model_type": "got_ocr2", "vision_config": {"model_type": "got_ocr2_vision"}}, "got_ocr2_vision"),
        ({"model_type": "llava", "vision_config": {"model_type": "brand_new"}}, "brand_new"),
        ({"model_type": "llava", "vision_config": {"model_type": "clip_vision_model"}}, "'hidden_size'"),
        ({"model_type": "qwen2_audio", "audio_config": {"model_type": "qwen2_audio_encoder"}}, "audio_config"),
        ({"model_type": "both", "vision_config": {"x": 1}, "audio_config": {"x": 1}}, "vision_config and audio_config"),
    ],
)
def test_parts_that_are_not_counted_are_refused_by_name(outer, named):
    model = {**outer, "text_config": {"model_type": "llama", **TEXT}}
    with pytest.raises(UnsupportedModelError, match=named) as refused:
        weight_bytes(model)
    assert "give the size of all weights" in str(refused.value)
    assert memory_ledger(model, "L4", max_model_len=100, weights=GIB).rows[0].bytes == GIB


def test_a_checkpoint_at_hand_says_its_size(tmp_path):
    model = {"model_type": "got_ocr2", "dtype": "bfloat16", "vision_config": {"model_type": "x"}}
    (tmp_path / "config.json").write_text(json.dumps({**model, "text_config": {"model_type": "qwen2", **TEXT}}))
    with pytest.raises(UnsupportedModelError):
        weight_bytes(ModelConfig.from_pretrained(tmp_path))
    header = b'{"a":{"dtype":"BF16","shape":[50],"data_offsets":[0,100]}}'
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(100))
    config = ModelConfig.from_pretrained(tmp_path)
    assert weight_bytes(config) == 100
    with pytest.raises(MinivllmError):
        weight_bytes(config, tp=2)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 12345}}))
    assert weight_bytes(ModelConfig.from_pretrained(tmp_path)) == 12345


def test_towers_are_shared_out_over_gpus():
    whole, half = (parameter_groups(ModelConfig.from_dict(HYBRIDS["google/gemma-3-4b-it"]), tp) for tp in (1, 2))
    assert whole["vision"] / 2 < half["vision"] < whole["vision"]
