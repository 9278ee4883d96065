"""Siblings of a model with other heads: sizes, intensity, and each GPU's share, by closed
formulas.
"""

import pytest
from refusals import assert_refused

from minivllm.memory import kv_bytes_per_token
from minivllm_lab.attention_heads import siblings
from minivllm_simulate.hardware import get_hardware
from minivllm_simulate.known_models import known_model
from minivllm_simulate.memory import num_parameters

LLAMA, LARGE, H100 = known_model("Llama-3.1-8B"), known_model("Llama-3.1-70B"), get_hardware("H100")


def test_a_sibling_differs_by_its_projections_alone():
    """A KV head costs a key and a value projection in each layer: 2 x hidden x head_dim
    parameters.
    """
    each = 2 * LLAMA.num_hidden_layers * LLAMA.hidden_size * LLAMA.head_dim
    for heads in (1, 2, 4, 8, 16, 32):
        assert num_parameters(siblings.with_kv_heads(LLAMA, heads)) - num_parameters(LLAMA) == (heads - 8) * each
    assert siblings.with_kv_heads(LLAMA, 8) == LLAMA


def test_a_latents_projections_are_counted_by_hand():
    rank, rope, heads, hidden, dim = 512, 64, 32, 4096, 128
    attention = hidden * heads * (dim + rope) + hidden * (rank + rope) + rank + rank * heads * 2 * dim
    attention += heads * dim * hidden
    plain = hidden * (32 + 2 * 8) * dim + 32 * dim * hidden
    assert num_parameters(siblings.with_latent(LLAMA, rank)) - num_parameters(LLAMA) == 32 * (attention - plain)
    assert kv_bytes_per_token(siblings.with_latent(LLAMA, rank), "bfloat16", 4) == 32 * (rank + rope) * 2


@pytest.mark.parametrize(
    ("name", "operations"),
    [("Llama-2-7b-hf", 1), ("Llama-3.1-8B", 4), ("Qwen2.5-7B", 7), ("Llama-3.1-70B", 8),
     ("DeepSeek-V3", 128 * (576 + 512) / 576)],
)  # fmt: skip
def test_in_16_bits_the_operations_for_each_byte_are_the_size_of_the_group(name: str, operations: float):
    assert siblings.decode_intensity(known_model(name)) == pytest.approx(operations)


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16, 32, 64])
def test_beyond_its_kv_heads_bytes_stay_and_operations_fall(tp: int):
    for heads in (1, 8, 64):
        share = siblings.ModelShare(siblings.with_kv_heads(LARGE, heads), H100, tp)
        assert share.bytes_per_token == 80 * 2 * max(1, heads // tp) * 128 * 2
        assert share.copies == max(1, tp // heads)
        assert share.bytes_per_token * tp == kv_bytes_per_token(share.model, "bfloat16") * share.copies
        assert share.intensity == 64 / tp / max(1, heads // tp)
    latent = siblings.ModelShare(siblings.with_latent(LARGE, 512), H100, tp)
    assert (latent.copies, latent.bytes_per_token) == (tp, 80 * 576 * 2)


def test_a_step_takes_no_less_than_reading_weights_and_keys():
    for heads, tp in ((8, 8), (64, 8), (8, 16), (1, 32)):
        share = siblings.ModelShare(siblings.with_kv_heads(LARGE, heads), H100, tp)
        read = share.cost.roofline.weight_bytes + 32 * 32768 * share.bytes_per_token
        assert 32 / share.tokens_per_second(32, 32768) > read / H100.bandwidth
    assert share.tokens_per_second(0, 1024) == 0


@pytest.mark.parametrize("heads", [1, 2, 8, 32])
@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16, 32])
def test_a_rank_keeps_what_its_query_heads_ask_and_nothing_else(heads: int, tp: int):
    """Neighbours among 32 query heads share a KV head; rank r has the r-th of `tp` equal parts."""
    for rank in range(tp):
        queries = range(rank * 32 // tp, (rank + 1) * 32 // tp)
        assert siblings.kv_heads_of_rank(rank, tp, heads) == sorted({query * heads // 32 for query in queries})


def test_what_cannot_be_shared_equally_is_refused():
    assert_refused("32 query heads cannot share 5", siblings.with_kv_heads, LLAMA, 5)
    assert_refused("cannot be divided over 64", siblings.ModelShare(LLAMA, H100, 64).fits, 1024)
