"""Weights from files: where each tensor goes, and the errors for checkpoints that do not fit."""

import dataclasses
import json

import pytest
import torch
from models.small import SMALL
from refusals import assert_refused
from safetensors.torch import save_file

from minivllm.config import ModelConfig
from minivllm.errors import UnsupportedModelError
from minivllm.models import loader
from minivllm.models.attention import CausalAttention
from minivllm.models.decoder import Decoder
from minivllm.models.loader import INDEX_FILE, SINGLE_FILE, checkpoint_slots, load_model, load_weights, random_model
from minivllm.models.tokenizer import load_tokenizer

CONFIG = ModelConfig.from_dict(SMALL)


@pytest.fixture
def model() -> Decoder:
    return random_model(CONFIG, seed=3)


@pytest.fixture
def tensors(model):
    return {name: slot.target.clone() for name, slot in checkpoint_slots(model).items()}


@pytest.fixture
def directory(tmp_path, tensors):
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    save_file(tensors, tmp_path / SINGLE_FILE)
    return tmp_path


def logits(model):
    ids = torch.arange(20) % CONFIG.vocab_size
    return model.compute_logits(model(ids, torch.arange(20), CausalAttention(CONFIG)))


NAMES = [
    "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight", "model.layers.0.self_attn.k_proj.weight",
    "model.layers.1.mlp.up_proj.weight", "model.layers.1.self_attn.q_norm.weight",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_missing_or_misshapen_tensor_is_named(model, tensors, name):
    wrong = dict(tensors)
    wrong[name] = torch.cat((tensors[name], tensors[name]))
    assert_refused(name, load_weights, model, wrong.items())
    del wrong[name]
    assert_refused(name, load_weights, model, wrong.items())


def test_integers_where_the_config_says_nothing_of_them_are_refused(model, tensors):
    name = "model.layers.0.self_attn.q_proj.weight"
    wrong = {**tensors, name: tensors[name].to(torch.int8)}
    assert_refused(f"{name}.*torch.int8.*quantization_config", load_weights, model, wrong.items())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_that_is_not_finite_is_named(model, tensors, name, bad):
    """One number that is not finite is enough, at either end of the tensor."""
    for place in (0, -1):
        tensor = tensors[name].clone()
        tensor.view(-1)[place] = bad
        words = f"'{name}' of the checkpoint holds NaN or infinity"
        assert_refused(words, load_weights, model, {**tensors, name: tensor}.items())


def test_a_number_beyond_the_dtype_is_refused_as_what_it_becomes(tensors):
    wide = {name: tensor * 1e30 for name, tensor in tensors.items()}
    load_weights(random_model(CONFIG, dtype="bfloat16"), wide.items())
    half = random_model(CONFIG, dtype="float16")
    assert_refused(r"and \d+ more, or numbers beyond float16", load_weights, half, wide.items())


TOO_LARGE = [
    ("vocab_size", 10**12), ("vocab_size", 2**63 - 1), ("num_hidden_layers", 10**9), ("hidden_size", 10**9),
    ("head_dim", 10**10), ("intermediate_size", 10**13), ("max_position_embeddings", 10**12),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), TOO_LARGE)
def test_a_model_beyond_the_memory_is_refused_before_anything_is_allocated(monkeypatch, name, value):
    monkeypatch.setattr(torch, "empty", lambda *_, **__: pytest.fail("something was allocated"))
    if name == "max_position_embeddings":
        monkeypatch.undo()  # the weights are small; their table is not
    assert_refused(r"takes [\d,.]+ GiB, and this", random_model, dataclasses.replace(CONFIG, **{name: value}))


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}


NO_MODELS = [
    ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0, "high_freq_factor": 4.0}}, "must be above the second"),
    ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0, "high_freq_factor": 1.0}}, "must be above the second"),
    ({"rope_scaling": YARN, "rope_theta": 1.0}, "yarn needs a value above 1"),
    *(({"rope_scaling": {"rope_type": kind}}, r"factor|original") for kind in ("linear", "llama3", "yarn")),
    *(({name: 0}, name) for name in ("vocab_size", "intermediate_size", "max_position_embeddings")),
]


@pytest.mark.parametrize(("changes", "words"), NO_MODELS, ids=str)
def test_a_config_that_makes_no_model_is_refused_by_name(changes, words):
    assert_refused(words, random_model, dataclasses.replace(CONFIG, **changes))


def test_an_unknown_dtype_is_refused():
    assert_refused("int4", random_model, CONFIG, dtype="int4")


def test_unexpected_tensor_is_named(model, tensors):
    more = {**tensors, "model.layers.2.mlp.up_proj.weight": torch.zeros(24, 16)}
    assert_refused(r"layers\.2", load_weights, model, more.items())
    twice = [*tensors.items(), ("lm_head.weight", tensors["lm_head.weight"])]
    assert_refused("twice", load_weights, model, twice)


def test_tensors_that_follow_from_the_config_are_passed_over(tensors):
    tied = random_model(dataclasses.replace(CONFIG, tie_word_embeddings=True))
    old = {**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    load_weights(tied, old.items())
    assert tied.lm_head.weight is tied.embed_tokens.weight
    assert torch.equal(tied.lm_head.weight, tensors["model.embed_tokens.weight"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", torch.float16])
def test_weights_are_converted(directory, dtype):
    model, _ = load_model(directory, dtype=dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {loader.torch_dtype(dtype)}
    assert torch.get_default_dtype() == torch.float32


def test_files_that_are_not_there_or_broken(directory):
    contents = (directory / SINGLE_FILE).read_bytes()
    (directory / SINGLE_FILE).write_bytes(contents[: len(contents) // 2])
    assert_refused("safetensors", load_model, directory)
    for broken in ("{}", "[]", "{", '{"weight_map": 5}', '{"weight_map": {"a": 5}}', '{"weight_map": {"a": ["b"]}}'):
        (directory / INDEX_FILE).write_text(broken)
        assert_refused("index", load_model, directory)
    (directory / INDEX_FILE).write_text(json.dumps({"weight_map": {"model.norm.weight": "two.safetensors"}}))
    assert_refused(r"two\.safetensors", load_model, directory)
    (directory / INDEX_FILE).unlink()
    (directory / SINGLE_FILE).unlink()
    assert_refused(r"model\.safetensors", load_model, directory)
    assert_refused(r"tokenizer\.json", load_tokenizer, directory)
    (directory / "tokenizer.json").write_text("{}")
    assert_refused("cannot be read as a tokenizer", load_tokenizer, directory)


NOT_COMPUTED = [
    {"model_type": "gemma2"}, {"hidden_act": "gelu"}, {"quantization": "awq"},
    {"layer_types": ("sliding_attention", "full_attention")},
    {"rope_scaling": {"rope_type": "dynamic", "factor": 2}},
    {"architecture": "Qwen3MoeForCausalLM"}, {"architecture": "GemmaForCausalLM"},
    {"num_experts": 8, "moe_intermediate_size": 32},
    {"kv_lora_rank": 16},
    {"cache_exception": "some of its layers keep a state"},
]  # fmt: skip


@pytest.mark.parametrize("changes", NOT_COMPUTED)
def test_what_the_decoder_does_not_compute_is_refused(changes):
    with pytest.raises(UnsupportedModelError):
        random_model(dataclasses.replace(CONFIG, **changes))


def test_random_models_are_the_same_for_the_same_seed():
    assert torch.equal(logits(random_model(CONFIG, seed=1)), logits(random_model(CONFIG, seed=1)))
    assert not torch.equal(logits(random_model(CONFIG, seed=1)), logits(random_model(CONFIG, seed=2)))


def test_lengths_that_do_not_add_up(model):
    ids = torch.arange(20)
    assert_refused(r"\b20\b", model, ids, ids, CausalAttention(CONFIG, [10, 9]))
