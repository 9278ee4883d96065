"""The models that come with the repository load unchanged, and compute what `transformers` computes
with them.
"""

import pytest
import torch
from safetensors import safe_open

from minivllm import LLM, SamplingParams
from minivllm.config import EMBEDDED_DRAFT, EMBEDDED_MODEL, EMBEDDED_SIBLINGS, ModelConfig
from minivllm.config.model import MODELS
from minivllm.memory import kv_bytes_per_token
from minivllm.models.latent_attention import causal_attention
from minivllm.models.loader import SINGLE_FILE, load_model
from minivllm.models.tokenizer import load_tokenizer
from minivllm_simulate.memory import num_parameters

OURS = (EMBEDDED_MODEL, EMBEDDED_DRAFT)
CODE = "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n"


def our_logits(directory, dtype, ids):
    model, config = load_model(directory, dtype=dtype)
    return model.compute_logits(model(ids, torch.arange(len(ids)), causal_attention(config)))


@pytest.mark.parametrize("directory", [*OURS, *EMBEDDED_SIBLINGS.values()], ids=lambda path: path.name)
@torch.inference_mode()
def test_logits_and_tokens_are_those_of_transformers_and_almost_the_same_in_bfloat16(directory):
    from transformers import AutoModelForCausalLM

    ids = torch.tensor(load_tokenizer(EMBEDDED_MODEL).encode(CODE * 4).ids)
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    exact, rounded = our_logits(directory, "float32", ids), our_logits(directory, "auto", ids)
    torch.testing.assert_close(exact, theirs(ids[None]).logits[0], atol=1e-4, rtol=1e-4)
    assert rounded.dtype == torch.bfloat16
    assert (exact.argmax(-1) == rounded.argmax(-1)).float().mean() > 0.9
    llm = LLM(directory, device="cpu", max_model_len=128)
    (output,) = llm.generate([CODE], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    tokens = theirs.generate(ids[None, : len(ids) // 4], max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert output.outputs[0].token_ids == tokens[0, len(ids) // 4 :].tolist()


@pytest.mark.parametrize("directory", OURS, ids=lambda path: path.name)
def test_shape_is_a_llama_with_grouped_heads(directory):
    config = ModelConfig.from_pretrained(directory)
    assert (config.model_type, config.dtype, config.vocab_size) == ("llama", "bfloat16", 4096)
    assert config.num_attention_heads > config.num_key_value_heads
    with safe_open(directory / SINGLE_FILE, framework="pt") as stored:
        assert num_parameters(config) == sum(stored.get_tensor(name).numel() for name in stored.keys())  # noqa: SIM118


def test_text_survives_the_tokenizer_that_all_of_them_have():
    tokenizer = load_tokenizer(EMBEDDED_MODEL)
    for text in (CODE, "", "# naïve → 数\n\t\x00", " " * 37):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert max(tokenizer.encode(CODE).ids) < 4096
    for directory in (EMBEDDED_DRAFT, *EMBEDDED_SIBLINGS.values()):
        assert load_tokenizer(directory).to_str() == tokenizer.to_str()


def test_siblings_differ_in_their_cache_and_not_in_their_parameters():
    configs = {kind: ModelConfig.from_pretrained(path) for kind, path in EMBEDDED_SIBLINGS.items()}
    cached = {kind: kv_bytes_per_token(config) // 2 // config.num_hidden_layers for kind, config in configs.items()}
    assert cached == {"mha": 256, "gqa": 64, "mqa": 32, "mla": 64}
    parameters = [num_parameters(config) for config in configs.values()]
    assert max(parameters) < 1.0003 * min(parameters)
    shapes = {(c.num_hidden_layers, c.hidden_size, c.num_attention_heads, c.vocab_size) for c in configs.values()}
    assert len(shapes) == 1


def test_all_weights_together_are_small():
    assert sum(path.stat().st_size for path in MODELS.glob("*/*.safetensors")) <= 24e6
