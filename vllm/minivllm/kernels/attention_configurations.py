"""Launch configurations of `unified_attention.py`'s kernel: tile sizes by GPU and kind of step, and
KV splits.

The tables hold a short list for each, best guess first; `tuning.fastest` measures which is best on
the actual GPU.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from minivllm.platforms.triton_utils import triton


@dataclass(frozen=True)
class Configuration:
    """Launch configuration of the kernel: rows and keys per tile, warps per program, pipeline
    stages.
    """

    block_m: int
    tile: int
    num_warps: int
    num_stages: int


_DECODE = {  # up to 32 rows: keep many bytes in flight. Best guess first.
    "sm_80": ((32, 4, 3), (64, 4, 2), (64, 8, 3)),
    "sm_90": ((64, 4, 2), (128, 4, 3), (32, 1, 3)),
    "sm_100": ((32, 4, 4), (64, 4, 2), (64, 4, 3), (128, 8, 2)),
    "gfx942": ((64, 4, 1), (32, 4, 1), (32, 4, 2)),
}
_PREFILL = {  # more rows: keep the matrix units busy, spill no register
    "sm_80": ((128, 32, 8, 2), (128, 64, 8, 2), (64, 64, 8, 2)),
    "sm_90": ((64, 64, 4, 3), (128, 64, 8, 3), (128, 128, 8, 3)),
    "sm_100": ((128, 64, 8, 2), (128, 128, 8, 2), (64, 64, 4, 2)),
    "gfx942": ((128, 64, 4, 1), (64, 64, 4, 1), (64, 32, 4, 1)),
}
# For caches of one byte a number.
_DECODE_OF_BYTES = _DECODE | {"sm_90": ((128, 4, 3), (128, 4, 2), (32, 1, 4))}
_PREFILL_OF_BYTES = _PREFILL | {"sm_90": ((64, 128, 4, 2),)}


def configurations(
    gpu: str, rows: int, group: int, padded_dim: int, element_bytes: int, cache_bytes: int = 2
) -> list[Configuration]:
    """Return candidates for a batch of `rows` query rows (positions × group) per sequence, best
    guess first.

    `gpu` is a key of the tables above; `element_bytes` and `cache_bytes` are the sizes of a query's
    and a key's numbers. Matrix products of fp32 run outside the matrix units, with few registers to
    spare, so fp32 has one small configuration, as do prefills with heads wider than 128.
    """
    smallest = max(16, triton.next_power_of_2(group))
    of_bytes = cache_bytes == 1 and padded_dim <= 128
    if element_bytes > 2:
        return [Configuration(smallest, 32 if padded_dim <= 128 else 16, 4, 1)]
    if is_decode(rows, group):
        block_m = max(smallest, 16 if rows <= 16 else 32)
        return [
            Configuration(block_m, tile, warps, stages)
            for tile, warps, stages in (_DECODE_OF_BYTES if of_bytes else _DECODE)[gpu]
            # A lone warp has registers for small tiles only.
            if tile * padded_dim <= 16384 and (warps > 1 or block_m * padded_dim <= 2048)
        ]
    if padded_dim > 128:
        return [Configuration(64, 32, 4, 1 if gpu == "gfx942" else 2)]
    return [Configuration(*choice) for choice in (_PREFILL_OF_BYTES if of_bytes else _PREFILL)[gpu]]


def is_decode(rows: int, group: int) -> bool:
    """Return whether a batch with this many query rows per sequence is memory-bound, as decodes and
    verifications are.
    """
    return rows <= 32 or group > 64


def automatic_splits(programs: int, keys: int, wanted: int) -> int:
    """Return the number of splits of each sequence's keys that gives about `wanted` programs.

    A split of fewer than 256 keys is not worth its share of the combine step.
    """
    return max(1, min(wanted // max(programs, 1), keys // 256, 128))


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def architecture(device: torch.device) -> str:
    """Return the key of the tables above that is closest to a GPU."""
    if torch.version.hip:
        return "gfx942"
    major, _ = torch.cuda.get_device_capability(device)
    return {9: "sm_90", 10: "sm_100"}.get(major, "sm_80")
