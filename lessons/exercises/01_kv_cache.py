"""Exercise 01. Write the KV cache: what it costs, one step with it, and the kernel that fills it.

Fill in the functions, then ask what is still missing:

    make check N=01

Needed: lesson 01 to the end of "The mechanism". As soon as the checks of your `kv_bytes_per_token` and `decode_step`
pass, the same command runs the engine with them.
"""

import math

import torch

from minivllm.platforms.triton_utils import tl, triton


def kv_bytes_per_token(config, bytes_per_element: int = 2) -> int:
    """Count the bytes that one token occupies in the KV cache, over all layers.

    `config` has num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim and more. Each layer keeps a key
    *and* a value for each *key-value* head; each is `head_dim` numbers of `bytes_per_element` bytes.

    Traps: K and V are two. Query heads keep nothing: a query is used once and forgotten.

    Stretch: `config.kv_lora_rank` is None for most models. Where it is a number (DeepSeek), a layer keeps one vector of
    `kv_lora_rank + qk_rope_head_dim` numbers for all heads together, and no separate K and V.

    >>> kv_bytes_per_token(llama_3_8b)   # 32 layers, 32 heads, 8 KV heads, head_dim 128
    131072
    """
    raise NotImplementedError("count what every layer keeps of one token, in bytes")


def decode_step(q, k, v, keys, values, length: int):
    """Put a new token's key and value into the cache, then let its query attend to everything up to itself.

    q       [heads, head_dim]            the new token's queries, one for each head
    k, v    [kv_heads, head_dim]         its keys and values
    keys,   [slots, kv_heads, head_dim]  the cache of one layer. Slots 0 to length - 1 hold earlier tokens;
    values                               the others hold garbage (which may be infinite)
    length                               how many tokens the cache holds before this one
    returns [heads, head_dim]            for each head: softmax(q · keys / sqrt(head_dim)) · values

    1. Write k and v into slot `length` of keys and values, in place.
    2. Query head h reads KV head h // (heads // kv_heads): neighbouring query heads share one.
    3. Score slots 0 to `length`, both included; softmax over the slots; the weighted sum of the values is the result.

    Traps: the new token sees itself, so read length + 1 slots and not one more. Without the division by
    sqrt(head_dim) the softmax grows too sharp. exp(100) is more than float32 holds: `torch.softmax` subtracts the
    largest score first, and so must you if you write it yourself. `torch.einsum` and a loop over heads are both fine.

    The lesson's step by hand, with 2 query heads on 1 KV head, and slots 0 and 1 in use:

    >>> q, k, v = [[0, 1, 0, 0], [1, 0, 2, 0]], [[0, 0, 2, 0]], [[0, 0, 1, 0]]
    >>> decode_step(q, k, v, keys, values, length=2)   # slot 0: (2, 0, 0, 0) and (1, 0, 0, 0); slot 1: (0, 2, 0, 0) …
    [[0.212, 0.576, 0.212, 0], [0.245, 0.090, 0.665, 0]]
    """
    raise NotImplementedError("write k and v into slot `length`, then attend over slots 0 to `length`")


@triton.jit
def append_token(cache, new, slot, WIDTH: tl.constexpr):
    """Kernel, step 1: copy one token's numbers into its slot, with one program.

    cache [slots, WIDTH] and new [WIDTH] are pointers to their first number; `slot` is an integer; WIDTH a power of two.

    `tl.arange(0, n)` gives the numbers 0 to n - 1, for a power of two n. `tl.load(pointer + numbers)` reads that many
    elements at once; `tl.store(pointer + numbers, elements)` writes them.

    >>> append_token[(1,)](cache, new, slot=1, WIDTH=4)   # elements 4 to 7 of the cache become those of `new`
    """
    raise NotImplementedError("load the WIDTH elements of `new`, and store them where slot `slot` begins")


@triton.jit
def append_heads(cache, new, slot, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Kernel, step 2: do the same with one program for each KV head; `tl.program_id(0)` is this program's head.

    cache [slots, kv_heads, HEAD_DIM], new [kv_heads, HEAD_DIM]; there are `tl.num_programs(0)` heads. HEAD_DIM may be
    any number; BLOCK is the smallest power of two that is at least HEAD_DIM.

    Trap: elements beyond HEAD_DIM belong to the next head, so to another program. `tl.load(..., mask=inside)` and
    `tl.store(..., mask=inside)` leave out the places where `inside` is false.

    >>> append_heads[(2,)](cache, new, slot=2, HEAD_DIM=3, BLOCK=4)   # head 0 writes 12 to 14, head 1 writes 15 to 17
    """
    raise NotImplementedError("copy this program's head, HEAD_DIM elements of the BLOCK places")


@triton.jit
def append_kernel(keys, values, k, v, lengths, slots, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Kernel, step 3: write a whole step, the K and V of each request's new token, with one program for each request.

    keys,   [requests, slots, WIDTH]  each request's cache in one layer; WIDTH is kv_heads * head_dim
    values
    k, v    [requests, WIDTH]         the new tokens
    lengths [requests], int32         how many tokens each cache holds: its new one goes into that slot
    slots                             how many one cache has
    BLOCK                             the smallest power of two that is at least WIDTH

    It must move 4 * WIDTH elements a request (K and V, read once and written once) and read one length.

    Traps: every request has its own length. Write nothing into a full cache (length = slots): the next slot belongs to
    its neighbour. `if` works on a loaded number. A cache may have more than 2**31 elements: on a
    GPU, `tl.program_id(0).to(tl.int64)` before anything is multiplied.
    """
    raise NotImplementedError("copy one row of k and one of v into this request's slot, unless its cache is full")
