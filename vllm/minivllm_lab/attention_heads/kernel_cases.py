"""Lesson 09's proof of its two kernels against float64, on awkward shapes, and their cases."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from minivllm_lab.lesson import LessonCode
from minivllm_lab.progress import track
from minivllm_lab.proof import furthest, show_errors


def latent_case(
    shape: Mapping[str, int], context: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> list[Tensor]:
    """Return a query over `context` cached tokens: q_nope, q_rope, latents, k_rope, and
    unit-gain w_uk, w_uv.
    """
    heads, rank = shape["heads"], shape["rank"]
    sizes = (
        (heads, shape["nope"]), (heads, shape["rope"]), (context, rank), (context, shape["rope"]),
        (heads, shape["nope"], rank), (heads, shape["v"], rank),
    )  # fmt: skip
    drawn = [torch.randn(size, dtype=torch.float64) for size in sizes]
    drawn[4:] = [weight / math.sqrt(rank) for weight in drawn[4:]]
    return [tensor.to(dtype).to(device) for tensor in drawn]


HEAD_CASES = ((4, 4, 64), (6, 2, 80), (8, 1, 128), (14, 2, 64), (20, 1, 16))
"""Query heads, KV heads, head dim."""
LENGTHS = (0, 1, 31, 32, 67)
LATENT_CASES = (
    {"heads": 3, "rank": 16, "rope": 16, "nope": 12, "v": 10},
    {"heads": 16, "rank": 64, "rope": 16, "nope": 32, "v": 32},
    {"heads": 20, "rank": 32, "rope": 32, "nope": 24, "v": 24},
)


def head_case(heads: int, kv_heads: int, head_dim: int, lengths: Sequence[int] = LENGTHS) -> tuple[Tensor, ...]:
    """Return random float16 arguments for `decode`; the slots beyond each length are filled, too."""
    slots = max(lengths) + 5
    q = torch.randn(len(lengths), heads, head_dim).half()
    keys, values = torch.randn(2, len(lengths), slots, kv_heads, head_dim).half()
    return q, keys, values, torch.tensor(lengths, dtype=torch.int32)


def one_by_one(grouped_attention: LessonCode, case: Sequence[Tensor]) -> Tensor:
    """Run the lesson's attention on each request of a `head_case` in float64; return zeros for
    an empty request.
    """
    q, keys, values, lengths = case
    rows = []
    for query, k, v, length in zip(q.double(), keys.double(), values.double(), lengths.tolist(), strict=True):
        rows.append(grouped_attention(query[None], k[:length], v[:length])[0] if length else torch.zeros_like(query))
    return torch.stack(rows)


def latent_batch(shape: Mapping[str, int], lengths: Sequence[int] = LENGTHS) -> tuple[Tensor, ...]:
    """Return random float32 arguments for `latent_decode`: q_nope, q_rope, cache, lengths, w_uk,
    w_uv.
    """
    cases = [latent_case(shape, max(lengths) + 5, torch.float32) for _ in lengths]
    q_nope, q_rope, latents, k_rope = (torch.stack([case[place] for case in cases]) for place in range(4))
    cache = torch.cat([latents, k_rope], dim=-1).contiguous()
    return q_nope, q_rope, cache, torch.tensor(lengths, dtype=torch.int32), *cases[0][4:]


def latents_one_by_one(absorbed_attention: LessonCode, batch: Sequence[Tensor]) -> Tensor:
    """Run the lesson's attention on each request of a `latent_batch` in float64; return zeros
    for an empty request.
    """
    q_nope, q_rope, cache, lengths, w_uk, w_uv = (tensor.double() for tensor in batch)
    rows, rank = [], w_uk.shape[2]
    for index, length in enumerate(lengths.int().tolist()):
        cached = cache[index, :length].split([rank, cache.shape[2] - rank], dim=1)
        empty = q_nope.new_zeros(len(w_uv), w_uv.shape[1])
        rows.append(absorbed_attention(q_nope[index], q_rope[index], *cached, w_uk, w_uv) if length else empty)
    return torch.stack(rows)


def verify_kernels(
    grouped_attention: LessonCode, absorbed_attention: LessonCode, decode: LessonCode, latent_decode: LessonCode,
    device: torch.device, quick: bool,
) -> dict:  # fmt: skip
    """Compare both kernels with float64 on awkward shapes; `quick` limits this to one shape per
    kernel.

    Raises:
        AssertionError: a result is wrong.
    """
    errors = {}
    for heads, kv_heads, head_dim in track(HEAD_CASES[1:2] if quick else HEAD_CASES, "verifying the grouped kernel"):
        case = head_case(heads, kv_heads, head_dim)
        name = f"{heads} query heads, {kv_heads} KV head{'s' * (kv_heads > 1)} of {head_dim}"
        errors[name] = furthest(decode(*(each.to(device) for each in case)), one_by_one(grouped_attention, case))
    largest = show_errors("The grouped kernel", errors, 2e-3)
    errors = {}
    for shape in track(LATENT_CASES[:1] if quick else LATENT_CASES, "verifying the latent kernel"):
        batch = latent_batch(shape)
        result = latent_decode(*(each.to(device) for each in batch))
        name = f"{shape['heads']} heads, latents of {shape['rank']} + {shape['rope']}"
        errors[name] = furthest(result, latents_one_by_one(absorbed_attention, batch))
    latent = show_errors("The latent kernel", errors, 2e-5, "float32")
    return {"largest_error": largest, "largest_latent_error": latent}
