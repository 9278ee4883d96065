"""Read an adapter's matrices from its safetensors file: A `[rank, in]` and B `[out, rank]` of each
adapted module.

In vLLM v0.33.0: `vllm/lora/lora_model.py` (`LoRAModel.from_local_checkpoint`), `vllm/lora/utils.py`
(`parse_fine_tuned_lora_name`).
"""

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from minivllm.errors import MinivllmError
from minivllm.lora.peft_helper import WEIGHTS_FILE, PEFTHelper, check_rank
from minivllm.memory.adapters import ALL_LINEARS
from minivllm.models.loader import stored_tensors

NAME = re.compile(
    r"(?:base_model\.model\.)?(?P<module>(?:model\.)?layers\.(?P<layer>\d{1,6})\.(?:self_attn|mlp)\.(?P<projection>\w+))"
    r"\.lora_(?P<matrix>[AB])(?:\.default)?\.weight"
)
# A layer's number and the name of a projection in it: (0, "q_proj").
ModuleName = tuple[int, str]
# Returns (in, out) of a module of the whole model, or None if it has no such module.
ShapeOf = Callable[[ModuleName], tuple[int, int] | None]


class LoRAPair(NamedTuple):
    """A and B of one module; B is already multiplied by the adapter's scale."""

    lora_a: Tensor
    lora_b: Tensor


def read_adapter(folder: str | Path, max_lora_rank: int, shape_of: ShapeOf) -> dict[ModuleName, LoRAPair]:
    """Return all pairs of an adapter in a local PEFT folder, in fp32, in newly allocated memory.

    Raises:
        MinivllmError: there is no adapter, it does not fit the model, or it has a feature that is
            not served.
    """
    helper = PEFTHelper.from_local_dir(folder, max_lora_rank)
    stored: dict[ModuleName, dict[str, Tensor]] = {}
    scales: dict[ModuleName, float] = {}
    ranks: dict[ModuleName, int] = {}
    for name, tensor in stored_tensors([Path(folder) / WEIGHTS_FILE]):
        match = NAME.fullmatch(name)
        if match is None or match["projection"] not in ALL_LINEARS:
            raise MinivllmError(
                f"the adapter in {folder} has the tensor {name[:200]!r}; it may have only lora_A and lora_B of "
                f"{', '.join(ALL_LINEARS)}"
            )
        module = int(match["layer"]), match["projection"]
        # Where the tensors tell the rank, it is that of the first of two matrices.
        is_told = tensor.dim() == 2 and helper.rank_pattern
        rank = ranks.setdefault(module, tensor.shape["AB".index(match["matrix"])] if is_told else helper.r)
        check_rank(folder, rank, max_lora_rank)
        _check_tensor(folder, name, tensor, match["matrix"], rank, shape_of(module))
        # The file is only mapped, and may change.
        stored.setdefault(module, {})[match["matrix"]] = tensor.to(torch.float32, copy=True)
        scales[module] = helper.scale_of(match["module"], rank)
    if not stored:
        raise MinivllmError(f"the adapter in {folder} has no tensors")
    for (layer, projection), pair in stored.items():
        if len(pair) < 2:
            raise MinivllmError(
                f"the adapter in {folder} has only lora_{next(iter(pair))} of {projection} in layer {layer}; the other "
                "matrix is missing"
            )
    return {module: _scaled(folder, pair, scales[module]) for module, pair in stored.items()}


def _scaled(folder: str | Path, pair: dict[str, Tensor], scale: float) -> LoRAPair:
    lora_b = pair["B"] * scale  # so that no kernel needs the scale
    if not all(torch.isfinite(matrix).all() for matrix in (pair["A"], lora_b)):
        raise MinivllmError(
            f"the adapter in {folder} holds NaN or infinity, or gets it from lora_alpha (scale {scale:g})"
        )
    return LoRAPair(pair["A"], lora_b)


def fingerprint_of(pairs: dict[ModuleName, LoRAPair], dtype: torch.dtype) -> str:
    """Return a hash of an adapter's modules and numbers, and of the dtype they are computed in."""
    seen = hashlib.sha256(str(dtype).encode())
    for module in sorted(pairs):  # whatever the order in the file
        for matrix in pairs[module]:
            seen.update(repr((module, tuple(matrix.shape))).encode())
            seen.update(matrix.contiguous().numpy().data)
    return seen.hexdigest()[:32]


def _check_tensor(
    folder: str | Path, name: str, tensor: Tensor, matrix: str, rank: int, shape: tuple[int, int] | None
) -> None:
    if shape is None:
        raise MinivllmError(f"the adapter in {folder} has the tensor {name!r}, of a layer that the model does not have")
    expected = (rank, shape[0]) if matrix == "A" else (shape[1], rank)
    if tuple(tensor.shape) != expected or not rank or not tensor.is_floating_point():
        raise MinivllmError(
            f"the tensor {name!r} of the adapter in {folder} is {str(tensor.dtype).removeprefix('torch.')} "
            f"{list(tensor.shape)}; with this model and rank it is floating point {list(expected)}"
        )
