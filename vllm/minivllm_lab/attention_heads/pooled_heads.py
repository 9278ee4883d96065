"""Make a checkpoint with fewer KV heads from another one, without training."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from minivllm.config import ModelConfig
from minivllm.config.model_files import local_path
from minivllm.errors import MinivllmError

Pool = Callable[[Tensor, int, int], Tensor]
"""`pool(weight, kv_heads, into)`: [kv_heads * head_dim, hidden] -> [into * head_dim, hidden]"""


def pooled_checkpoint(source: str | Path, folder: Path, into: int, pool: Pool) -> Path:
    """Write the model of `source`, with K and V projections pooled into `into` heads, to `folder`;
    return `folder`.

    Raises:
        MinivllmError: `source` is not a folder with one safetensors file.
    """
    path, config = local_path(source), ModelConfig.from_pretrained(source)
    kv_heads = config.num_key_value_heads
    if not (path / "model.safetensors").exists():
        raise MinivllmError(f"{source} must be a folder with one model.safetensors, to pool its KV heads")
    weights = load_file(path / "model.safetensors")
    for name, weight in weights.items():
        if name.split(".")[-2:-1] in (["k_proj"], ["v_proj"]):
            pooled = pool(weight.view(len(weight), -1), kv_heads, into)  # a bias is a column
            weights[name] = pooled.reshape(-1, *weight.shape[1:]).contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    settings = {**json.loads((path / "config.json").read_text()), "num_key_value_heads": into}
    (folder / "config.json").write_text(json.dumps(settings, indent=2))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if (path / name).exists():
            shutil.copy(path / name, folder / name)
    return folder
