"""The models and requests of `peers.py`: the embedded model, and two larger shapes with random weights."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_engine import QWEN3_06B
from transformers import AutoConfig, AutoModelForCausalLM

from minivllm.config import EMBEDDED_MODEL
from minivllm.errors import MinivllmError

GGUF_WRITER = Path(__file__).resolve().parent / "peer_engines" / "gguf_file.py"
LLAMA_30M = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 4096, "hidden_size": 512,
    "intermediate_size": 1376, "num_hidden_layers": 10, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 64, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False, "hidden_act": "silu",
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """A model, or None for the embedded one; the numbers of requests that are served at once; and the
    least and most tokens of a prompt and of an output.
    """

    config: dict[str, Any] | None
    counts: tuple[int, ...]
    lengths: tuple[int, int]


SHAPES = {
    "embedded": Shape(None, (1, 8, 32, 128), (16, 256)),
    "30m": Shape(LLAMA_30M, (1, 8, 32), (16, 128)),
    "0.6b": Shape(QWEN3_06B, (1, 8), (16, 64)),
}


def write_model(shape: Shape, folder: Path) -> None:
    """Write the shape's model in bf16, with a config that old and new readers understand."""
    if shape.config is None:
        for name in ("config.json", "model.safetensors"):
            shutil.copy(EMBEDDED_MODEL / name, folder)
    else:
        torch.manual_seed(0)
        (folder / "config.json").write_text(json.dumps(shape.config))
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
        model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    (folder / "config.json").write_text(json.dumps(config))


def write_gguf(model: Path, folder: Path, python: Path) -> None:
    """Write the model as GGUF files, one for each dtype, with the Python that has `gguf`."""
    for dtype in ("float32", "bfloat16", "float16"):
        command = [str(python), str(GGUF_WRITER), str(model), str(folder / f"{dtype}.gguf"), dtype]
        finished = subprocess.run(command, capture_output=True, text=True)
        if finished.returncode:
            raise MinivllmError(f"cannot write {dtype}.gguf: {finished.stderr.strip().splitlines()[-1:]}")


def requests_of(count: int, least: int, most: int, vocab_size: int, seed: int) -> list[dict]:
    """Return random requests; prompt and output lengths are uniform from `least` to `most`."""
    rng = random.Random(seed)
    lengths = [(rng.randint(least, most), rng.randint(least, most)) for _ in range(count)]
    return [{"prompt": [rng.randrange(1, vocab_size) for _ in range(p)], "output": o} for p, o in lengths]


def work_of(shape: Shape, seed: int, folder: Path, gguf_python: Path) -> dict[str, Any]:
    """Write the model into `folder`, and return the work in the form that every engine's process
    reads. The first request, which is also served alone, has the most tokens.
    """
    model, gguf = folder / "model", folder / "gguf"
    model.mkdir()
    gguf.mkdir()
    write_model(shape, model)
    if gguf_python.exists():
        write_gguf(model, gguf, gguf_python)
    least, most = shape.lengths
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    longest = requests_of(1, most, most, vocab_size, seed)
    requests = longest + requests_of(max(shape.counts) - 1, least, most, vocab_size, seed)
    limits = {"load_format": "auto", "max_model_len": 1024, "max_num_batched_tokens": 2048}
    return {**limits, "model": str(model), "gguf": str(gguf), "device": "cpu", "requests": requests}
