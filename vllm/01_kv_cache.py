"""Lesson 01. The KV cache: why it exists, what it costs, and what it does to a GPU's memory.

Builds generation without and with a cache, the Triton kernels that a cache needs, and the ledger of a card. You learn
why keys and values may be kept, how many bytes a token takes in any model, and why decode waits for memory.

    uv run python vllm/01_kv_cache.py                       # under a minute on two cores, no GPU needed
    uv run python vllm/01_kv_cache.py --gpu H100 --serve Qwen3-8B --max-model-len 32768
"""

import math
import time
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.config import ModelConfig
from minivllm.errors import MinivllmError
from minivllm.memory import MemoryLedger
from minivllm.platforms.triton_utils import tl, triton
from minivllm_lab.cli import run
from minivllm_lab.disturbance import Control
from minivllm_lab.kv_cache import report
from minivllm_lab.kv_cache.race import race
from minivllm_lab.kv_cache.reservation import unused_shares
from minivllm_lab.lesson import begin, keep
from minivllm_lab.progress import track
from minivllm_lab.proof import furthest, prove, show_errors
from minivllm_lab.tables import console, heading
from minivllm_simulate.known_models import known_model
from minivllm_simulate.memory import memory_ledger


# %% 1. The pain: without a cache, every new token pays for all the others again
# region: attention
def attention(q: Tensor, k: Tensor, v: Tensor, first: int = 0) -> Tensor:
    """Attend causally: query i is at position `first + i` and sees every position up to its own.

    q [queries, heads, head_dim]; k and v [positions, kv_heads, head_dim] -> [queries, heads, head_dim].
    """
    group, exact = q.shape[1] // k.shape[1], torch.promote_types(q.dtype, torch.float32)
    k, v = (x.to(exact).repeat_interleave(group, dim=1) for x in (k, v))  # a group of query heads per KV head
    scores = torch.einsum("qhd,khd->hqk", q.to(exact), k) / math.sqrt(q.shape[-1])
    positions = first + torch.arange(len(q), device=q.device)
    future = torch.arange(len(k), device=q.device) > positions[:, None]
    weights = scores.masked_fill(future, -math.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)


# endregion


# region: generate
class Generation(NamedTuple):
    """A prompt with its continuation so far, the tokens that went through the model, and the seconds of each step."""

    tokens: list[int]
    token_passes: int
    seconds: list[float]


@torch.inference_mode()
def write(model, prompt: list[int], new_tokens: int, cache: "KVCache | None" = None) -> Iterator[Generation]:
    """Continue greedily, a token a step. Feed what the cache does not hold yet; without a cache, the whole text."""
    tokens, token_passes, seconds = list(prompt), 0, []
    device = model.embed_tokens.weight.device
    attend = cache.attend if cache else lambda layer, q, k, v: attention(q, k, v)
    for _ in range(new_tokens):
        start = time.perf_counter()
        known = cache.length if cache else 0
        fed = torch.tensor(tokens[known:], device=device)
        positions = torch.arange(known, len(tokens), device=device)
        hidden = model(fed, positions, attend)
        if cache:
            cache.length += len(fed)
        tokens.append(int(model.compute_logits(hidden[-1:]).argmax()))
        token_passes += len(fed)
        seconds.append(time.perf_counter() - start)
        yield Generation(tokens, token_passes, seconds)


def generate(model, prompt: list[int], new_tokens: int, cache: "KVCache | None" = None) -> Generation:
    """Write the whole continuation."""
    *_, last = write(model, prompt, new_tokens, cache)
    return last


# endregion


# %% 2. The idea: the keys and values of earlier tokens never change, so keep them
# region: cache
def decode_step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, length: int) -> Tensor:
    """Write the new token's key and value into slot `length`, then attend over slots 0 to `length`.

    q [heads, head_dim]; k, v [kv_heads, head_dim]; keys, values [slots, kv_heads, head_dim], changed in place
    -> [heads, head_dim].
    """
    keys[length], values[length] = k, v
    return attention(q[None], keys[: length + 1], values[: length + 1], first=length)[0]


class KVCache:
    """Keys and values of one request: `max_model_len` slots in each layer, reserved before its length is known."""

    def __init__(self, config: ModelConfig, max_model_len: int, like: Tensor) -> None:
        shape = (2, config.num_hidden_layers, max_model_len, config.num_key_value_heads, config.head_dim)
        self.keys, self.values = like.new_zeros(shape)
        self.length = 0  # slots that hold a token

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store the new keys and values of one layer and attend: the whole prompt first, then token by token."""
        keys, values, start, end = self.keys[layer], self.values[layer], self.length, self.length + len(q)
        if len(q) == 1:
            return decode_step(q[0], k[0], v[0], keys, values, start)[None]
        keys[start:end], values[start:end] = k, v
        return attention(q, keys[:end], values[:end], first=start)


# endregion


def compare_generation(model, tokenizer, prompt: list[int], new_tokens: int) -> dict:
    """Write the same text without and with a cache; count the work, and time a token against its position."""
    cache = KVCache(model.config, len(prompt) + new_tokens, model.embed_tokens.weight)
    generate(model, prompt, 2)  # warm up
    steps = partial(write, model, prompt, new_tokens)
    without, cached = race(steps(), steps(cache), tokenizer)
    assert without.tokens == cached.tokens, "the cache changed the text"
    return report.show_generation(len(prompt), without, cached)


# %% 3. What it costs: bytes per token, by one formula
# region: bytes
def kv_bytes_per_token(config: ModelConfig, bytes_per_element: int = 2) -> int:
    """Count the bytes of one token's K and V over all layers and KV heads (not query heads)."""
    if config.kv_lora_rank:  # DeepSeek's latent attention keeps one narrow vector in place of all heads
        width = config.kv_lora_rank + config.qk_rope_head_dim
    else:
        width = 2 * config.num_key_value_heads * config.head_dim
    return config.num_hidden_layers * width * bytes_per_element


# endregion

# %% 4. The kernels: append to the cache, and attend over it
BLOCK_T = 64  # tokens that the attention kernel reads at a time


# region: kernels
@triton.jit
def append_token(cache, new, slot, WIDTH: tl.constexpr):
    """Write one token into its slot. Grid: (1,). cache [slots, WIDTH]; new [WIDTH]; WIDTH is a power of two."""
    column = tl.arange(0, WIDTH)
    tl.store(cache + slot * WIDTH + column, tl.load(new + column))


@triton.jit
def append_heads(cache, new, slot, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Write one token with a program for each head: cache [slots, kv_heads, HEAD_DIM]; new [kv_heads, HEAD_DIM]."""
    head, column = tl.program_id(0), tl.arange(0, BLOCK)
    inside = column < HEAD_DIM
    target = (slot * tl.num_programs(0) + head) * HEAD_DIM + column
    tl.store(cache + target, tl.load(new + head * HEAD_DIM + column, mask=inside), mask=inside)


@triton.jit
def append_kernel(keys, values, k, v, lengths, slots, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Write one new token's K and V for each request. Grid: (requests,).

    keys, values [requests, slots, kv_heads, head_dim]; k, v [requests, kv_heads, head_dim]; lengths [requests], int32.
    Moves 4 * WIDTH elements a request (K and V, read and written), WIDTH = kv_heads * head_dim. No arithmetic.
    """
    request = tl.program_id(0).to(tl.int64)  # 64 bits: a cache has more than 2^31 elements
    slot = tl.load(lengths + request)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    source = request * WIDTH + column
    target = (request * slots + slot) * WIDTH + column
    if slot < slots:  # a full request must not write into its neighbour's first slot
        tl.store(keys + target, tl.load(k + source, mask=inside), mask=inside)
        tl.store(values + target, tl.load(v + source, mask=inside), mask=inside)


@triton.jit
def decode_kernel(
    out, q, keys, values, lengths, slots, scale,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Attend with one query per request over its first `lengths[request]` slots. Grid: (requests, heads).

    q, out [requests, heads, head_dim]; keys, values as above; any float dtype, float32 inside.
    Must read 2 * length * kv_heads * head_dim elements a request; does 4 * length * heads * head_dim FLOPs.
    """
    # 1. Which query is this program's, and how many slots hold a token?
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(lengths + request)
    column = tl.arange(0, BLOCK_D)
    in_head = column < HEAD_DIM
    row = (request * GROUP * KV_HEADS + head) * HEAD_DIM + column
    query = tl.load(q + row, mask=in_head, other=0.0).to(tl.float32) * scale
    # 2. Where do its KV head's keys begin? A group of query heads shares one KV head.
    first_key = (request * slots * KV_HEADS + head // GROUP) * HEAD_DIM
    maximum, total, result = -float("inf"), 0.0, tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, length, BLOCK_T):
        # 3. Read BLOCK_T keys and values, but none from a slot that holds no token.
        token = start + tl.arange(0, BLOCK_T)
        at = first_key + token[:, None].to(tl.int64) * (KV_HEADS * HEAD_DIM) + column[None, :]
        there = (token < length)[:, None] & in_head[None, :]
        k = tl.load(keys + at, mask=there, other=0.0).to(tl.float32)
        v = tl.load(values + at, mask=there, other=0.0).to(tl.float32)
        # 4. Score them. A masked key is zero, but its weight must be zero, so its score is -inf.
        scores = tl.where(token < length, tl.sum(k * query[None, :], axis=1), -float("inf"))
        # 5. Weigh the values. A larger maximum makes the sums so far smaller: `keep` corrects them.
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=0))
        weights, keep = tl.exp(scores - new_maximum), tl.exp(maximum - new_maximum)
        total = total * keep + tl.sum(weights, axis=0)
        result = result * keep + tl.sum(weights[:, None] * v, axis=0)
        maximum = new_maximum
    # 6. Divide once, at the end. No token, no weight: zero.
    tl.store(out + row, result / tl.maximum(total, 1e-30), mask=in_head)


# endregion


def decode_batch(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
    """Run both kernels, which do `decode_step` for many requests. A full request attends to the slots it has.

    q [requests, heads, head_dim]; k, v [requests, kv_heads, head_dim]; lengths [requests], int32;
    keys, values [requests, slots, kv_heads, head_dim], contiguous, changed in place -> like q.
    """
    (requests, slots, kv_heads, head_dim), heads, width = keys.shape, q.shape[1], k[0].numel()
    append_kernel[(requests,)](keys, values, k, v, lengths, slots, width, triton.next_power_of_2(width))
    out, seen = torch.empty_like(q), (lengths + 1).clamp(max=slots)
    decode_kernel[(requests, heads)](
        out, q, keys, values, seen, slots, 1 / math.sqrt(head_dim), GROUP=heads // kv_heads, KV_HEADS=kv_heads,
        HEAD_DIM=head_dim, BLOCK_D=triton.next_power_of_2(head_dim), BLOCK_T=BLOCK_T,
    )  # fmt: skip
    return out


def verify_kernels(device: torch.device) -> dict:
    """Decode one token in each of five requests, and compare with `decode_step` in float64."""
    errors, lengths = {}, [0, 1, BLOCK_T - 1, BLOCK_T, 2 * BLOCK_T + 3]
    for heads, kv_heads, head_dim in [(4, 4, 64), (6, 2, 80), (8, 1, 128)]:
        q = torch.randn(5, heads, head_dim).half()
        k, v = torch.randn(2, 5, kv_heads, head_dim).half()
        keys, values = torch.randn(2, 5, 3 * BLOCK_T, kv_heads, head_dim).half()
        exact = zip(*(x.double() for x in (q, k, v, keys, values)), lengths, strict=True)
        expected = torch.stack([decode_step(*request) for request in exact])
        arguments = (q, k, v, keys, values, torch.tensor(lengths, dtype=torch.int32))
        out = decode_batch(*(x.to(device) for x in arguments))
        errors[f"{heads} query heads, {kv_heads} KV heads of {head_dim}"] = furthest(out, expected)
    return {"largest_error": show_errors("Both kernels", errors, 2e-3)}


# %% 5. The measurement: decode waits for memory, so more sequences at once are nearly free
def timed_batch(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
    """Attend with our kernels on a GPU; on a CPU, where they are interpreted, with PyTorch over all slots."""
    if q.is_cuda:
        return decode_batch(q, k, v, keys, values, lengths)
    keys[:, -1], values[:, -1] = k, v
    k, v = keys.transpose(1, 2), values.transpose(1, 2)
    return F.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)[:, :, 0]


def measure_intensity(device: torch.device, quick: bool) -> dict:
    """Count the FLOPs of a decode step per byte it reads, and compare its time with this device's rates."""
    roofline = report.Roofline(device, quick)
    fastest = getattr(torch, roofline.rates.fastest)  # many processors have no instructions for bfloat16
    weight = torch.randn(16384, 4096, device=device).to(fastest)  # 134 MB: a processor's cache must not hold it
    for count in track((1, 4, 16, 64), "reading weights"):
        x = torch.randn(count, 4096, device=device).to(fastest)
        bytes_moved = weight.element_size() * (weight.numel() + x.numel() + count * len(weight))
        roofline.measure(f"weights_{count}", partial(F.linear, x, weight), bytes_moved, 2 * count * weight.numel())
    count, slots, dtype = (64, 4096, torch.bfloat16) if device.type == "cuda" else (2, 2048, torch.float32)
    lengths = torch.full((count,), slots - 1, dtype=torch.int32, device=device)
    for group in track((1, 4), "reading caches"):
        cache = torch.randn(2, count, slots, 32 // group, 128, device=device, dtype=dtype)
        q, k = (torch.randn(count, heads, 128, device=device, dtype=dtype) for heads in (32, 32 // group))
        step, flops = partial(timed_batch, q, k, k, *cache, lengths), 4 * count * slots * q[0].numel()
        roofline.measure(f"cache_group_{group}", step, cache.nbytes, flops)
    return roofline.show()


# %% 6. Break it: the card that is full and nearly empty, and the request that does not fit
def break_it(ledger: MemoryLedger, config: ModelConfig, workloads: dict) -> dict:
    """Fill a real card with reservations; then request the maximum length that its model allows."""
    card = report.show_card(ledger, workloads)
    try:
        memory_ledger(config, ledger.device.name)
    except MinivllmError as error:
        console.print(f"at the model's own limit it refuses to start: {error}")
    return card


def main(arguments: Namespace) -> None:
    """Run the lesson from top to bottom."""
    device, served, control = begin("Lesson 01. The KV cache", arguments), known_model(arguments.serve), Control()
    ledger = memory_ledger(served, arguments.gpu, max_model_len=arguments.max_model_len)
    model, tokenizer, prompt, new_tokens = report.load_prompt(arguments, device)
    heading("1 and 2. The same text without a cache and with one")
    with control.watch():
        results = {"generation": compare_generation(model, tokenizer, prompt, new_tokens)}
    heading("3. What it costs: bytes per token")
    results["bytes_per_token"] = report.show_sizes(kv_bytes_per_token)
    heading("4. The kernels, verified")
    results["kernels"] = prove(verify_kernels, device)
    heading("5. What limits decode")
    with control.watch():
        results["intensity"] = measure_intensity(device, arguments.quick)
    heading("6. Break it")
    unused = unused_shares((2048, 4096, 8192, ledger.max_model_len), arguments.seed)
    results["reservation"] = report.show_unused(unused)
    results["card"] = {"model": arguments.serve, **break_it(ledger, served, results["reservation"])}
    report.close(results, control.disturbance())
    keep(__file__, results, arguments, report.draw, disturbance=control.record())


parser = partial(report.parser, __doc__)

if __name__ == "__main__":
    run(main, parser())
