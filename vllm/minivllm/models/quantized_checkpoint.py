"""Checkpoints with already packed integer weights: GPTQ, and the "pack-quantized" format of
compressed-tensors.

Both pack integers of 4 or 8 bits into int32, the first in the lowest bits, each offset by half its
range, with one scale for each group of a row. Tensors stored for a linear [out, in]:

    GPTQ                  qweight [in × bits / 32, out], scales [groups, out], qzeros [groups, out × bits / 32],
                          g_idx [in]
    compressed-tensors    weight_packed [out, in × bits / 32], weight_scale [out, groups], weight_shape [2]

The bytes of a row match `minivllm.kernels.packed_weights`, so loading only transposes GPTQ's
tensors and rounds nothing. GPTQ's first format stores the zero point minus one, its second the zero
point itself. Checkpoints mix up the two names; but if all zero points are 2^(bits − 1), or all one
less, the weights are symmetric.

These are not supported: other zero points, groups that are not in row order (`desc_act`,
`actorder`), methods that quantize activations too, and layers that are left unquantized or
quantized differently.

Frantar et al. 2022, "GPTQ", arXiv:2210.17323. In vLLM v0.33.0:
`vllm/model_executor/layers/quantization/auto_gptq.py`, `compressed_tensors/compressed_tensors.py`.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minivllm.config import ModelConfig
from minivllm.errors import MinivllmError, UnsupportedModelError
from minivllm.models.quantized import QuantizedLinearMethod

GPTQ, COMPRESSED_TENSORS = "gptq", "compressed-tensors"
WHAT_WORKS = (
    "use GPTQ without desc_act, or pack-quantized compressed-tensors, either symmetric, in 4 or 8 bits, and with "
    'all linears quantized in the same way; or use the unquantized checkpoint with quantization="int8" or "int4"'
)


@dataclass(frozen=True)
class PackedFormat:
    """The format in which a checkpoint stores its linears; `group_size` None means one scale per
    row.
    """

    stored_by: str
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
        # Each turns one stored tensor into one of ours, or into nothing.
        read = self._from_gptq if self.stored_by == GPTQ else self._from_compressed_tensors
        for name, tensor in tensors:
            linear, _, what = name.rpartition(".")
            converted = read(what, tensor, linear)
            if converted is not None:
                if converted[0] == "packed" and linear.endswith("lm_head"):
                    raise UnsupportedModelError(f"the head, {linear}, is quantized too; {WHAT_WORKS}")
                yield f"{linear}.{converted[0]}", converted[1]

    def _from_gptq(self, what: str, tensor: Tensor, linear: str) -> tuple[str, Tensor] | None:
        if what == "qweight":
            return "packed", self._integers(tensor.T)  # GPTQ stores [in, out]
        if what == "scales":
            return "scales", tensor.T
        if what == "qzeros":
            middle = 2 ** (self.bits - 1)
            pair = 17 if self.bits == 4 else 1  # a byte holds the same four bits twice
            zeros = tensor.view(torch.uint8)
            if not any((zeros == zero * pair).all() for zero in (middle, middle - 1)):
                raise UnsupportedModelError(f"{linear} has off-center zero points (asymmetric); {WHAT_WORKS}")
            return None
        if what == "g_idx":
            # The group of each input.
            in_order = torch.arange(len(tensor)) // (self.group_size or len(tensor))
            if not torch.equal(tensor.long(), in_order):
                raise UnsupportedModelError(f"the groups of {linear} are not in order (desc_act); {WHAT_WORKS}")
            return None
        return what, tensor

    def _from_compressed_tensors(self, what: str, tensor: Tensor, linear: str) -> tuple[str, Tensor] | None:
        if what == "weight_packed":
            return "packed", self._integers(tensor)
        if what == "weight_scale":
            return "scales", tensor
        if what == "weight_shape":
            return None
        if what in ("weight_zero_point", "weight_g_idx"):
            raise UnsupportedModelError(f"{linear} is asymmetric, or its groups are not in order; {WHAT_WORKS}")
        return what, tensor

    def _integers(self, words: Tensor) -> Tensor:
        """Convert int32 [out, words per row] to the packed weight."""
        stored = words.contiguous().view(torch.uint8)
        # Stored integers are offset by half their range. Ours of 4 bits are, too, and ours of 8
        # bits are signed.
        return stored if self.bits == 4 else (stored ^ 128).view(torch.int8)


def packed_format(config: ModelConfig) -> PackedFormat | None:
    """Return the packed format that a checkpoint's config describes, or None for an ordinary
    checkpoint.

    Raises:
        UnsupportedModelError: an unsupported method or variant; the message says what would work.
    """
    if not config.quantization:
        return None
    said = config.quantization_config or {}
    try:
        if config.quantization == GPTQ:
            return _gptq(said)
        if config.quantization == COMPRESSED_TENSORS:
            return _compressed_tensors(said)
        raise _Unsupported(f"the method {config.quantization!r}")
    except _Unsupported as error:
        name = config.architecture or config.model_type or "this model"
        raise UnsupportedModelError(f"{name} is quantized with {error}; {WHAT_WORKS}") from error


class _Unsupported(Exception):
    """An unsupported feature of a quantization; the message names it."""


def _gptq(said: Mapping[str, Any]) -> PackedFormat:
    for name in ("desc_act", "lm_head", "dynamic", "modules_in_block_to_quantize"):
        if said.get(name):
            raise _Unsupported(f"GPTQ and {name}={said[name]!r}")
    if not said.get("sym", True):
        raise _Unsupported("GPTQ and sym=False (asymmetric)")
    return _format(GPTQ, said.get("bits"), said.get("group_size", -1))


def _compressed_tensors(said: Mapping[str, Any]) -> PackedFormat:
    groups = _part("config_groups", said, dict)
    if len(groups) != 1:
        raise _Unsupported(f"compressed-tensors and {len(groups)} kinds of linears")
    group = _part(next(iter(groups)), groups, dict)
    weights = _part("weights", group, dict)
    stored = group.get("format") or said.get("format")
    if stored != "pack-quantized":
        raise _Unsupported(f"compressed-tensors and the format {stored!r}")
    if weights.get("type", "int") != "int" or not weights.get("symmetric", True):
        raise _Unsupported("compressed-tensors and weights that are not symmetric integers")
    for name, value in (*group.items(), ("kv_cache_scheme", said.get("kv_cache_scheme"))):
        if value and name in ("input_activations", "output_activations", "kv_cache_scheme"):
            raise _Unsupported(f"compressed-tensors and {name}")
    if weights.get("actorder") not in (None, False, "weight", "static"):
        raise _Unsupported(f"compressed-tensors and actorder={weights['actorder']!r}")
    others = [name for name in _part("ignore", said, list) if not str(name).rstrip("$").endswith("lm_head")]
    if others:
        raise _Unsupported(f"compressed-tensors except for {others[0]!r}")
    strategy = weights.get("strategy")
    if strategy not in ("group", "channel"):
        raise _Unsupported(f"compressed-tensors and the strategy {strategy!r}")
    group_size = weights.get("group_size") if strategy == "group" else -1
    return _format(COMPRESSED_TENSORS, weights.get("num_bits"), group_size)


def _part(name: str, said: Mapping[str, Any], kind: type) -> Any:
    """Return the value stored under a name, or an empty `kind` if it is missing."""
    value = said.get(name) or kind()
    if not isinstance(value, kind):
        raise _Unsupported(f"{COMPRESSED_TENSORS} and {name}={value!r}")
    return value


def _format(method: str, bits: Any, group_size: Any) -> PackedFormat:
    if bits not in (4, 8):
        raise _Unsupported(f"{method} in {bits!r} bits")
    if not isinstance(group_size, int) or not (group_size == -1 or group_size > 0):
        raise MinivllmError(f"the {method} group size must be a weight count, or -1 for whole rows, not {group_size!r}")
    return PackedFormat(method, bits, None if group_size == -1 else group_size)
