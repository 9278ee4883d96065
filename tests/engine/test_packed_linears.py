"""A decoder whose weights lie in panels computes what it did, and keeps none of them twice."""

import torch

from minivllm.config import EMBEDDED_MODEL
from minivllm.models.attention import CausalAttention
from minivllm.models.linear import (
    Linear,
    PanelLinearMethod,
    process_weights_after_loading,
    weight_bytes,
)
from minivllm.models.loader import load_model


def test_a_packed_model_computes_what_it_did_and_gives_its_plain_weights_up():
    plain, packed = (load_model(EMBEDDED_MODEL, dtype="float32", device="cpu")[0] for _ in range(2))
    layers, whole = weight_bytes(packed.layers), weight_bytes(packed)
    process_weights_after_loading(packed)
    linears = [module for module in packed.modules() if isinstance(module, Linear)]
    assert len(linears) == 4 * 4 + 1
    assert all(isinstance(linear.method, PanelLinearMethod) for linear in linears)
    assert [name for name, _ in packed.named_parameters() if "proj" in name] == []
    assert layers <= weight_bytes(packed.layers) <= 1.02 * layers
    head = plain.embed_tokens.weight.nbytes
    assert whole + head <= weight_bytes(packed) <= 1.02 * (whole + head), "the head's panels stand beside the embedding"
    assert torch.equal(packed.embed_tokens.weight, plain.embed_tokens.weight), "the head's weight is the embedding too"
    methods = [linear.method for linear in linears]
    process_weights_after_loading(packed)
    assert [linear.method for linear in linears] == methods, "packed once"
    ids = torch.arange(37) * 97 % plain.config.vocab_size
    hidden = [model(ids, torch.arange(37), CausalAttention(model.config)) for model in (plain, packed)]
    torch.testing.assert_close(hidden[1], hidden[0], rtol=1e-4, atol=1e-4)
    logits = [model.compute_logits(state) for model, state in zip((plain, packed), hidden, strict=True)]
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)
