"""A decoder whose weights are packed into panels computes the same, and keeps no weight twice."""

import pytest
import torch

from minivllm.config import EMBEDDED_MODEL
from minivllm.kernels.cpu.linear_choice import SETTING
from minivllm.models import linear as linear_module
from minivllm.models.attention import CausalAttention
from minivllm.models.linear import GatedLinear, Linear, PanelLinearMethod, process_weights_after_loading, weight_bytes
from minivllm.models.loader import load_model


def test_a_packed_model_computes_what_it_did_and_gives_its_plain_weights_up(monkeypatch):
    pytest.importorskip("numba", reason="panels are numba's")
    monkeypatch.setenv(SETTING, "panels")
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


@pytest.mark.parametrize("kind", [Linear, GatedLinear])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_with_both_layouts_takes_each_for_its_numbers_of_rows(monkeypatch, kind, dtype):
    pytest.importorskip("numba", reason="panels are numba's")
    monkeypatch.setattr(linear_module, "most_rows_in_panels", lambda weight, gated: 3.0)
    torch.manual_seed(0)
    plain, both = (kind(48, 64, bias=True).to(dtype) for _ in range(2))
    for parameter, copy in zip(plain.parameters(), both.parameters(), strict=True):
        parameter.normal_(std=0.2)
        copy.copy_(parameter)
    process_weights_after_loading(both)
    assert isinstance(both.method, PanelLinearMethod)
    multiplied = []
    monkeypatch.setattr(linear_module.PanelLinear, "__call__", counted(linear_module.PanelLinear.__call__, multiplied))
    for rows in (1, 3, 4, 70):
        x = torch.randn(rows, 48).to(dtype)
        torch.testing.assert_close(both(x), plain(x), rtol=2e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-5)
    assert multiplied == [1, 3]


def counted(product, rows):
    def count(self, x, **named):
        rows.append(len(x))
        return product(self, x, **named)

    return count
