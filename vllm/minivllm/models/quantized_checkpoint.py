"""Checkpoints of GPTQ, whose weights are already packed integers.

GPTQ packs integers of 4 or 8 bits into int32, the first in the lowest bits, each offset by half its
range, with one scale for each group of a row. Tensors stored for a linear [out, in]:

    qweight [in × bits / 32, out], scales [groups, out], qzeros [groups, out × bits / 32], g_idx [in]

The bytes of a row match `minivllm.kernels.packed_weights`, so loading only transposes the tensors
and rounds nothing. GPTQ's first format stores the zero point minus one, its second the zero point
itself. Checkpoints mix up the two names; but if all zero points are 2^(bits − 1), or all one less,
the weights are symmetric.

These are not supported: other zero points, groups that are not in row order (`desc_act`), layers
that are left unquantized or quantized differently, and other methods.

Frantar et al. 2022, "GPTQ", arXiv:2210.17323. In vLLM v0.33.0:
`vllm/model_executor/layers/quantization/auto_gptq.py`.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minivllm.config import ModelConfig
from minivllm.errors import MinivllmError, UnsupportedModelError
from minivllm.models.quantized import QuantizedLinearMethod

WHAT_WORKS = (
    "use GPTQ without desc_act, symmetric, in 4 or 8 bits, and with all linears quantized in the same way; or use the "
    'unquantized checkpoint with quantization="int8" or "int4"'
)


@dataclass(frozen=True)
class GPTQFormat:
    """Describe how a GPTQ checkpoint stores its linears; `group_size` None means one scale per row."""

    bits: int
    group_size: int | None

    @property
    def method(self) -> QuantizedLinearMethod:
        """Return the method of the linears; their scales are kept in the model's dtype."""
        return QuantizedLinearMethod(self.bits, self.group_size)

    def convert(self, tensors: Iterable[tuple[str, Tensor]], like: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors under the method's names, with the checkpoint's integers unchanged.

        Raises:
            UnsupportedModelError: the weights are asymmetric, or their groups out of order.
        """
        for name, tensor in tensors:
            linear, _, what = name.rpartition(".")
            if what == "qweight":
                yield f"{linear}.packed", self._integers(tensor.T)  # GPTQ stores [in, out]
            elif what == "scales":
                yield f"{linear}.scales", tensor.T
            elif what == "qzeros":
                self._check_zero_points(linear, tensor)
            elif what == "g_idx":
                self._check_groups(linear, tensor)
            else:
                yield name, tensor

    def _integers(self, words: Tensor) -> Tensor:
        """Convert int32 [out, words per row] to the packed weight."""
        stored = words.contiguous().view(torch.uint8)
        # Stored integers are offset by half their range. Ours of 4 bits are, too, and ours of 8
        # bits are signed.
        return stored if self.bits == 4 else (stored ^ 128).view(torch.int8)

    def _check_zero_points(self, linear: str, zero_points: Tensor) -> None:
        middle = 2 ** (self.bits - 1)
        pair = 17 if self.bits == 4 else 1  # a byte holds the same four bits twice
        stored = zero_points.view(torch.uint8)
        if not any((stored == zero * pair).all() for zero in (middle, middle - 1)):
            raise UnsupportedModelError(f"{linear} has off-center zero points (asymmetric); {WHAT_WORKS}")

    def _check_groups(self, linear: str, groups: Tensor) -> None:
        """Check the group of each input."""
        in_order = torch.arange(len(groups)) // (self.group_size or len(groups))
        if not torch.equal(groups.long(), in_order):
            raise UnsupportedModelError(f"the groups of {linear} are not in order (desc_act); {WHAT_WORKS}")


def packed_format(config: ModelConfig) -> GPTQFormat | None:
    """Return the packed format that a checkpoint's config describes, or None for an ordinary
    checkpoint.

    Raises:
        UnsupportedModelError: an unsupported method or variant; the message says what would work.
        MinivllmError: the group size is not a number of weights.
    """
    if not config.quantization:
        return None
    settings = config.quantization_config or {}
    reason = _unsupported(config.quantization, settings)
    if reason:
        name = config.architecture or config.model_type or "this model"
        raise UnsupportedModelError(f"{name} is quantized with {reason}; {WHAT_WORKS}")
    group_size = settings.get("group_size", -1)
    if not isinstance(group_size, int) or not (group_size == -1 or group_size > 0):
        raise MinivllmError(f"the gptq group size must be a weight count, or -1 for whole rows, not {group_size!r}")
    return GPTQFormat(settings["bits"], None if group_size == -1 else group_size)


def _unsupported(method: str, settings: Mapping[str, Any]) -> str | None:
    """Name the setting that is not supported, if there is one."""
    if method != "gptq":
        return f"the method {method!r}"
    for name in ("desc_act", "lm_head", "dynamic", "modules_in_block_to_quantize"):
        if settings.get(name):
            return f"GPTQ and {name}={settings[name]!r}"
    if not settings.get("sym", True):
        return "GPTQ and sym=False (asymmetric)"
    if settings.get("bits") not in (4, 8):
        return f"GPTQ in {settings.get('bits')!r} bits"
    return None
