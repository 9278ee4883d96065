"""A decoder whose weights lie in panels computes what it did, and keeps none of them twice."""

import torch

from minivllm.config import EMBEDDED_MODEL
from minivllm.models.attention import CausalAttention
from minivllm.models.loader import load_model
from minivllm.worker.cpu import pack_linears, packed_forms


def test_a_packed_model_computes_what_it_did_and_gives_its_plain_weights_up():
    plain, packed = (load_model(EMBEDDED_MODEL, dtype="float32", device="cpu")[0] for _ in range(2))
    before = sum(parameter.nbytes for parameter in packed.layers.parameters())
    packed_bytes = pack_linears(packed)
    assert len(packed_forms(packed)) == 4 * 4 + 1
    assert packed_bytes == sum(form.panels.nbytes + form.bias.nbytes for form in packed_forms(packed))
    assert [name for name, _ in packed.named_parameters() if "proj" in name] == []
    head = plain.embed_tokens.weight.nbytes
    assert before <= packed_bytes + sum(p.nbytes for p in packed.layers.parameters()) - head <= 1.02 * before
    assert torch.equal(packed.embed_tokens.weight, plain.embed_tokens.weight), "the head's weight is the embedding too"
    assert pack_linears(packed) == packed_bytes, "packed once"
    ids = torch.arange(37) * 97 % plain.config.vocab_size
    hidden = [model(ids, torch.arange(37), CausalAttention(model.config)) for model in (plain, packed)]
    torch.testing.assert_close(hidden[1], hidden[0], rtol=1e-4, atol=1e-4)
    logits = [model.compute_logits(state) for model, state in zip((plain, packed), hidden, strict=True)]
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)
