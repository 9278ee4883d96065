"""What must be true of exercise 01, and of the script that solves it."""

import math
from types import SimpleNamespace

import torch

from minivllm.config import EMBEDDED_MODEL
from minivllm.models.attention import CausalAttention
from minivllm.models.loader import load_model


def _shape(layers, heads, kv_heads, head_dim, **more):
    return SimpleNamespace(
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        kv_lora_rank=None,
        **more,
    )


def _case(heads, kv_heads, head_dim, length, slots, seed=0):
    """A cache whose free slots hold garbage, a new token, and what attention over `length` + 1 tokens must give."""
    draw = torch.Generator().manual_seed(seed)
    q = torch.randn(heads, head_dim, generator=draw)
    k, v = torch.randn(2, kv_heads, head_dim, generator=draw)
    keys, values = torch.full((2, slots, kv_heads, head_dim), math.inf)
    keys[:length] = torch.randn(length, kv_heads, head_dim, generator=draw)
    values[:length] = torch.randn(length, kv_heads, head_dim, generator=draw)
    seen_keys, seen_values = torch.cat([keys[:length], k[None]]), torch.cat([values[:length], v[None]])
    expected = torch.empty(heads, head_dim)
    for head in range(heads):
        kv_head = head // (heads // kv_heads)
        weights = (seen_keys[:, kv_head].double() @ q[head].double() / math.sqrt(head_dim)).softmax(0)
        expected[head] = weights @ seen_values[:, kv_head].double()
    return (q, k, v, keys, values, length), expected


def _agrees(module, *case):
    arguments, expected = _case(*case)
    found = torch.as_tensor(module.decode_step(*arguments))
    assert found.shape == expected.shape, f"the result has shape {tuple(found.shape)}, not {tuple(expected.shape)}"
    error = (found.float() - expected).abs().max().item()
    assert error < 1e-4, f"off by {error:.2g} with {case[0]} heads on {case[1]} KV heads and {case[3]} tokens cached"


def check_bytes_per_token(module):
    """A token takes 131,072 bytes in Llama-3-8B, half of that in 8 bits, 524,288 in Llama-2-7B."""
    llama_3, llama_2 = _shape(32, 32, 8, 128), _shape(32, 32, 32, 128)
    for shape, size, wanted in ((llama_3, 2, 131072), (llama_3, 1, 65536), (llama_2, 2, 524288)):
        found = module.kv_bytes_per_token(shape, size)
        assert found == wanted, f"{found} bytes for {shape.num_key_value_heads} KV heads at {size} bytes, not {wanted}"


def check_bytes_of_a_latent_cache(module):
    """Stretch: DeepSeek-V3 keeps one vector of 512 + 64 numbers in each of 61 layers."""
    shape = _shape(61, 128, 128, 56, qk_rope_head_dim=64)
    shape.kv_lora_rank = 512
    found = module.kv_bytes_per_token(shape)
    assert found == 70272, f"{found} bytes, not 70272"


def check_first_token(module):
    """The first token sees only itself: the result is its own value."""
    _agrees(module, 4, 4, 8, 0, 3)


def check_new_token_sees_itself_and_no_further(module):
    """With 5 of 9 slots filled, the new token reads exactly 6: its own, but no garbage."""
    _agrees(module, 2, 2, 16, 5, 9)


def check_last_slot(module):
    """The last free slot can be filled."""
    _agrees(module, 2, 1, 16, 7, 8)


def check_groups_of_heads(module):
    """Of 6 query heads on 2 KV heads, the first 3 read one and the last 3 the other."""
    _agrees(module, 6, 2, 80, 33, 64)


def check_cache_is_written_in_place(module):
    """Slot `length` of the caller's keys and values is filled, and no other is touched."""
    (q, k, v, keys, values, length), _ = _case(4, 2, 8, 3, 6)
    before = keys.clone(), values.clone()
    module.decode_step(q, k, v, keys, values, length)
    for name, cache, old, new in (("keys", keys, before[0], k), ("values", values, before[1], v)):
        old[length] = new
        wrong = [slot for slot in range(len(cache)) if not torch.equal(cache[slot], old[slot])]
        assert not wrong, f"slot {wrong[0]} of {name} is not what it should be"


def check_same_text_as_without_a_cache(module):
    """In the embedded model it writes the same 16 tokens as the model without a cache."""
    model, config = load_model(EMBEDDED_MODEL, dtype="float32")
    prompt = list(range(300, 310))
    cached = _generate_with_cache(model, config, prompt, 16, module.decode_step)
    text = list(prompt)
    for _ in range(16):
        hidden = model(torch.tensor(text), torch.arange(len(text)), CausalAttention(config))
        text.append(int(model.compute_logits(hidden[-1:]).argmax()))
    first = next((index for index, (one, other) in enumerate(zip(cached, text)) if one != other), None)
    assert first is None, f"token {first - len(prompt) + 1} of the new ones differs"


def _generate_with_cache(model, config, prompt, new_tokens, decode_step):
    """Greedy tokens, every token of the prompt too fed one at a time through `decode_step`."""
    shape = (2, config.num_hidden_layers, len(prompt) + new_tokens, config.num_key_value_heads, config.head_dim)
    keys, values = torch.full(shape, math.nan)
    text = list(prompt)
    for position in range(len(prompt) + new_tokens - 1):

        def attend(layer, q, k, v, position=position):
            return torch.as_tensor(decode_step(q[0], k[0], v[0], keys[layer], values[layer], position))[None]

        hidden = model(torch.tensor(text[position : position + 1]), torch.tensor([position]), attend)
        if position >= len(prompt) - 1:
            text.append(int(model.compute_logits(hidden).argmax()))
    return text
