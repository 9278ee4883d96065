"""Exercise 01. Write the KV cache: what it costs, and one step with it.

Fill in the two functions, then ask what is still missing:

    make check N=01

Needed: lesson 01 up to "The mechanism". The solution is in vllm/01_kv_cache.py; try first.
"""

import math

import torch


def kv_bytes_per_token(config, bytes_per_element: int = 2) -> int:
    """How many bytes does one token occupy in the KV cache, over all layers?

    `config` has num_hidden_layers, num_attention_heads, num_key_value_heads and head_dim. Each layer keeps a key *and*
    a value for each *key-value* head; each is `head_dim` numbers of `bytes_per_element` bytes.

    Traps: K and V are two. The query heads keep nothing: queries are used once and forgotten.

    Stretch: `config.kv_lora_rank` is None for most models. Where it is a number (DeepSeek), a layer keeps one vector of
    `kv_lora_rank + qk_rope_head_dim` numbers for all heads together, and no separate K and V.

    >>> kv_bytes_per_token(llama_3_8b)   # 32 layers, 32 heads, 8 KV heads, head_dim 128
    131072
    """
    raise NotImplementedError("count what every layer keeps of one token, in bytes")


def decode_step(q, k, v, keys, values, length: int):
    """One new token arrives. Put its key and value into the cache, then let its query see everything up to itself.

    q       [heads, head_dim]            the new token's queries, one for each head
    k, v    [kv_heads, head_dim]         its keys and values
    keys,   [slots, kv_heads, head_dim]  the cache of one layer. Slots 0 to length - 1 hold earlier tokens;
    values                               what lies in the others is garbage (it may be infinite)
    length                               how many tokens the cache holds before this one
    returns [heads, head_dim]            for each head: softmax(q · keys / sqrt(head_dim)) · values

    1. Write k and v into slot `length` of keys and values, in place.
    2. Query head h reads KV head h // (heads // kv_heads): neighbouring query heads share one.
    3. Score slots 0 to `length`, both included; softmax over the slots; the weighted sum of the values is the result.

    Traps: the new token sees itself, so there are length + 1 slots to read and not one more. Without the division by
    sqrt(head_dim) the softmax grows too sharp. `torch.einsum` or a loop over heads: both are fine.
    """
    raise NotImplementedError("write k and v into slot `length`, then attend over slots 0 to `length`")
