"""Write and read LoRA adapters in PEFT's format, and make any number of random ones.

A folder holds `adapter_config.json` and `adapter_model.safetensors`, whose keys are
`base_model.model.model.layers.N.self_attn.q_proj.lora_A.weight` [rank, in] and `…lora_B.weight`
[out, rank], as `peft` writes and reads them. vLLM v0.33.0 reads them in `vllm/lora/peft_helper.py`
and `vllm/lora/lora_model.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.config import EMBEDDED_MODEL, ModelConfig
from minivllm.lora.peft_helper import CONFIG_FILE, WEIGHTS_FILE
from minivllm.memory.adapters import ALL_LINEARS, MLP_LINEARS, linear_shapes
from minivllm_simulate.memory.adapters import adapter_parameters

if TYPE_CHECKING:
    import torch

Tensors = dict[str, "torch.Tensor"]
STRENGTH = 0.5


def peft_key(layer: int, linear: str, matrix: str) -> str:
    """Return the key under which PEFT's file stores matrix "A" or "B" of a linear."""
    part = "mlp" if linear in MLP_LINEARS else "self_attn"
    return f"base_model.model.model.layers.{layer}.{part}.{linear}.lora_{matrix}.weight"


def random_adapter(
    config: ModelConfig, rank: int = 8, seed: int = 0, targets: Sequence[str] = ALL_LINEARS, dtype: str = "bfloat16",
    strength: float = STRENGTH,
) -> Tensors:  # fmt: skip
    """Return a random adapter's tensors under PEFT's keys, made for scale 1 (`lora_alpha` =
    `rank`).

    The same arguments give the same tensors. `strength` is the root mean square of B A x relative
    to that of x: at 0.5 the embedded model's text changes within a few tokens, but it is still
    text.

    Raises:
        MinivllmError: an unknown target, a rank below 1, or a model whose linears are not known
            here.
    """
    import torch

    adapter_parameters(config, rank, targets)
    generator = torch.Generator().manual_seed(seed)
    shapes, tensors = linear_shapes(config), {}
    for layer in range(config.num_hidden_layers):
        for name in targets:
            out, into = shapes[name]
            for matrix, shape, deviation in (
                ("A", (rank, into), into**-0.5),
                ("B", (out, rank), strength * rank**-0.5),
            ):
                numbers = torch.randn(shape, generator=generator) * deviation
                tensors[peft_key(layer, name, matrix)] = numbers.to(getattr(torch, dtype))
    return tensors


def write_adapter(
    directory: str | Path, tensors: Tensors, rank: int, alpha: float, targets: Sequence[str], base: str,
    **fields: object,
) -> Path:  # fmt: skip
    """Write an adapter as PEFT does and return its folder; `fields`, such as `use_rslora`, go into
    its config.
    """
    from safetensors.torch import save_file

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "base_model_name_or_path": base, "bias": "none", "fan_in_fan_out": False, "inference_mode": True,
        "lora_alpha": alpha, "lora_dropout": 0.0, "peft_type": "LORA", "r": rank, "target_modules": list(targets),
        "task_type": "CAUSAL_LM", "use_dora": False, "use_rslora": False, **fields,
    }  # fmt: skip
    (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, directory / WEIGHTS_FILE, metadata={"format": "pt"})
    return directory


def read_adapter(directory: str | Path) -> tuple[dict[str, Any], Tensors]:
    """Return the config and the tensors in an adapter's folder."""
    from safetensors.torch import load_file

    config = json.loads((Path(directory) / CONFIG_FILE).read_text())
    return config, load_file(Path(directory) / WEIGHTS_FILE)


def merge_adapter(model: torch.nn.Module, directory: str | Path) -> None:
    """Merge an adapter into a model of `transformers`: add scale * B A to its weights.

    The scale is `lora_alpha` / r, or `lora_alpha` / sqrt(r) with rsLoRA; A and B are multiplied in
    the weights' dtype. PEFT's rank and alpha patterns are ignored.
    """
    config, tensors = read_adapter(directory)
    scale = config["lora_alpha"] / (math.sqrt(config["r"]) if config.get("use_rslora") else config["r"])
    for key in tensors:
        if not key.endswith("lora_A.weight"):
            continue
        weight = model.get_parameter(key.removeprefix("base_model.model.").replace("lora_A.", ""))
        a, b = (tensors[key.replace("lora_A", name)].to(weight) for name in ("lora_A", "lora_B"))
        weight.data += scale * (b @ a)


def write_random_adapters(
    directory: str | Path, count: int, rank: int = 8, seed: int = 0, targets: Sequence[str] = ALL_LINEARS,
    model: str | Path = EMBEDDED_MODEL,
) -> list[Path]:  # fmt: skip
    """Write random adapters `adapter-0000`, `adapter-0001`, … for a model.

    Adapter i depends only on `seed` + i, so the first adapters are the same for any `count`.
    """
    config, folders = ModelConfig.from_pretrained(model), []
    for index in range(count):
        tensors = random_adapter(config, rank, seed + index, targets)
        folder = Path(directory) / f"adapter-{index:04d}"
        folders.append(write_adapter(folder, tensors, rank, rank, targets, Path(model).name))
    return folders
