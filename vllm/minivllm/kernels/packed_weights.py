"""Weights as small integers with scales: quantizing, packing and dequantizing.

A row of a weight `[out, in]` is cut into groups of equal size, or is one group. A number is an
integer times the scale of its group. Rounding is to the nearest and symmetric: there is no zero
point, and zero stays zero.

    int8    int8  [out, in], from −127 to 127; scales fp32 [out, 1], a row being one group
    int4    uint8 [out, in / 2], two numbers in a byte, the lower half first, each stored plus 8;
            scales bf16 [out, in / group size]

Read as int32, eight numbers at a time, the bytes of int4 are, transposed, those of a GPTQ
checkpoint: such a checkpoint loads without requantizing.

The scale of int8 is the largest magnitude / 127. In int4 every integer counts: the number of the
largest magnitude becomes −8, and the scale takes the sign which that needs, so that all sixteen
integers are used. The error is at most half a scale, but in int4 up to a whole one for numbers of
the opposite sign, beyond 7. bf16 has the range of fp32, and its rounding of a scale does little
harm: the integers are chosen for the rounded scale. An int4 number costs 4 + 16 / group size bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minivllm.config.quantization import QUANTIZATIONS
from minivllm.errors import MinivllmError

SMALLEST_GROUP = 16
WIDE = 1024  # rows at least this long get large groups


def quantize_weight(weight: Tensor, quantization: str, group_size: int | None = None) -> tuple[Tensor, Tensor]:
    """Return the packed integers and the scales of a weight `[out, in]`.

    `group_size` None means the whole row in int8, and `default_group_size` in int4.

    Raises:
        MinivllmError: the quantization is unknown, or the group size does not fit the rows.
    """
    width = weight.shape[1]
    if quantization == "int8":
        groups = _groups(weight, group_size or width)
        scales = groups.abs().amax(-1) / 127
        return _nearest(groups, scales, 127).view(weight.shape), scales
    if quantization != "int4":
        raise MinivllmError(f"unknown quantization {quantization!r}; use one of {', '.join(QUANTIZATIONS)}")
    groups = _groups(weight, group_size or default_group_size(width))
    # The number furthest from 0 becomes −8, whatever its sign.
    furthest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)).squeeze(-1)
    scales = (furthest / -8).to(torch.bfloat16)
    return pack_int4(_nearest(groups, scales, 7).view(weight.shape)), scales


def default_group_size(width: int) -> int:
    """Return the default group size of int4 for rows of `width`: 128, or 32 if `width` is below
    1,024, halved until it divides the row.

    Raises:
        MinivllmError: the row is not even divisible by 16.
    """
    group_size = 128 if width >= WIDE else 32
    while width % group_size and group_size > SMALLEST_GROUP:
        group_size //= 2
    check_group_size(group_size, width)
    return group_size


def check_group_size(group_size: int, width: int) -> None:
    """Reject a group size that is neither the whole row nor a power of two of at least 16.

    Raises:
        MinivllmError: the size is neither, or does not divide `width`; the message says what would
            work.
    """
    power_of_two = group_size >= SMALLEST_GROUP and group_size & (group_size - 1) == 0
    if group_size == width or (power_of_two and width % group_size == 0):
        return
    fitting = [size for size in (16, 32, 64, 128, 256) if width % size == 0] + [width]
    raise MinivllmError(
        f"rows of {width} weights cannot have groups of {group_size}; possible sizes: {', '.join(map(str, fitting))}"
    )


def pack_int4(integers: Tensor) -> Tensor:
    """Pack integers `[out, in]` from −8 to 7 into uint8 `[out, in / 2]`, or raise `MinivllmError`
    if `in` is odd.
    """
    if integers.shape[1] % 2:
        raise MinivllmError(f"rows of {integers.shape[1]} weights, an odd number, cannot be packed two to a byte")
    stored = (integers + 8).to(torch.uint8)  # 0 to 15
    return stored[:, ::2] | (stored[:, 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """Unpack an int8 or int4 weight to its integers, int8 `[out, in]`."""
    if packed.dtype == torch.int8:
        return packed
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1).to(torch.int8) - 8


def dequantize_weight(packed: Tensor, scales: Tensor) -> Tensor:
    """Return the dequantized weight, fp32 `[out, in]`."""
    integers = unpack(packed)
    groups = integers.view(*scales.shape, -1)
    return (groups * scales.float().unsqueeze(-1)).view(integers.shape)


def row_width(packed: Tensor) -> int:
    """Return the number of weights in a row of a packed weight."""
    return packed.shape[1] * (2 if packed.dtype == torch.uint8 else 1)


def _groups(weight: Tensor, group_size: int) -> Tensor:
    check_group_size(group_size, weight.shape[1])
    return weight.detach().float().view(len(weight), -1, group_size)


def _nearest(groups: Tensor, scales: Tensor, highest: int) -> Tensor:
    scale = scales.float().unsqueeze(-1)  # 0 where all of a group's numbers are
    integers = torch.where(scale != 0, groups / scale, 0.0).round()
    return integers.clamp(-127 if highest == 127 else -8, highest).to(torch.int8)
