"""The models that come with the repository load as they are, and compute what `transformers` computes with them."""

import pytest
import torch
from safetensors import safe_open

from minivllm.config import EMBEDDED_DRAFT, EMBEDDED_MODEL
from minivllm.memory import num_parameters
from minivllm.models.attention import CausalAttention
from minivllm.models.loader import SINGLE_FILE, load_model
from minivllm.models.tokenizer import load_tokenizer

MODELS = pytest.mark.parametrize("directory", [EMBEDDED_MODEL, EMBEDDED_DRAFT], ids=lambda path: path.name)
CODE = "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n"


def our_logits(directory, dtype, ids):
    model, config = load_model(directory, dtype=dtype)
    return model.compute_logits(model(ids, torch.arange(len(ids)), CausalAttention(config)))


@MODELS
@torch.inference_mode()
def test_logits_are_those_of_transformers(directory):
    from transformers import AutoModelForCausalLM

    ids = torch.tensor(load_tokenizer(directory).encode(CODE * 4).ids)
    expected = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)(ids[None]).logits[0]
    torch.testing.assert_close(our_logits(directory, "float32", ids), expected, atol=1e-4, rtol=1e-4)


@MODELS
@torch.inference_mode()
def test_bfloat16_chooses_almost_the_same_tokens(directory):
    ids = torch.tensor(load_tokenizer(directory).encode(CODE * 4).ids)
    exact, rounded = our_logits(directory, "float32", ids), our_logits(directory, "auto", ids)
    assert rounded.dtype == torch.bfloat16
    assert (exact.argmax(-1) == rounded.argmax(-1)).float().mean() > 0.9


@MODELS
def test_shape_is_a_llama_with_grouped_heads(directory):
    _, config = load_model(directory)
    assert (config.model_type, config.dtype, config.vocab_size) == ("llama", "bfloat16", 4096)
    assert config.num_attention_heads > config.num_key_value_heads
    with safe_open(directory / SINGLE_FILE, framework="pt") as stored:
        assert num_parameters(config) == sum(stored.get_tensor(name).numel() for name in stored.keys())  # noqa: SIM118


@MODELS
def test_text_survives_the_tokenizer(directory):
    tokenizer = load_tokenizer(directory)
    for text in (CODE, "", "# naïve → 数\n\t\x00", " " * 37):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert max(tokenizer.encode(CODE).ids) < 4096


def test_draft_speaks_the_same_tokens():
    assert load_tokenizer(EMBEDDED_MODEL).get_vocab() == load_tokenizer(EMBEDDED_DRAFT).get_vocab()
