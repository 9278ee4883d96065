"""Write a model folder as a GGUF file, which llama.cpp and OpenVINO GenAI read.

    python gguf_file.py MODEL_FOLDER FILE float32|bfloat16|float16

It runs in llama.cpp's environment. The tokenizer in the file is a stand-in, a name for each id, since
the benchmarks hand over token ids; id 0 is a special token because OpenVINO needs one.
"""

import json
import sys
from pathlib import Path

import gguf
import numpy as np
from gguf.utility import LocalTensor, SafetensorsLocal

ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen3": gguf.MODEL_ARCH.QWEN3}
KINDS = {
    "float32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "bfloat16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "float16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
}


def values(tensor: LocalTensor) -> np.ndarray:
    """Return a bf16 or fp32 tensor of a checkpoint as fp32."""
    raw = tensor.mmap_bytes()
    if tensor.dtype == "BF16":
        raw = raw.view(np.uint16).astype(np.uint32) << 16
    return raw.view(np.float32).reshape(tensor.shape)


def pairs_side_by_side(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder the rows of a query or key projection: llama.cpp rotates neighbouring elements where
    the checkpoint rotates element i and i + head_size / 2.
    """
    halves = weight.reshape(num_heads, 2, -1, weight.shape[-1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write(folder: Path, path: Path, dtype: str) -> None:
    """Write the folder's configuration and weights to `path`; norms stay fp32."""
    config = json.loads((folder / "config.json").read_text())
    kind, layers = config["model_type"], config["num_hidden_layers"]
    architecture, (stored_as, file_type) = ARCHITECTURES[kind], KINDS[dtype]
    out = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    out.add_block_count(layers)
    out.add_context_length(config["max_position_embeddings"])
    out.add_embedding_length(config["hidden_size"])
    out.add_feed_forward_length(config["intermediate_size"])
    out.add_head_count(config["num_attention_heads"])
    out.add_head_count_kv(config["num_key_value_heads"])
    out.add_key_length(config["head_dim"])
    out.add_value_length(config["head_dim"])
    out.add_rope_dimension_count(config["head_dim"])
    out.add_rope_freq_base(config["rope_theta"])
    out.add_layer_norm_rms_eps(config["rms_norm_eps"])
    out.add_vocab_size(config["vocab_size"])
    out.add_file_type(file_type)
    tokens = [f"<{i}>" for i in range(config["vocab_size"])]
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("gpt-2")
    out.add_token_list(tokens)
    out.add_token_types([gguf.TokenType.CONTROL] + [gguf.TokenType.NORMAL] * (len(tokens) - 1))
    out.add_token_merges([f"{tokens[0]} {tokens[1]}"])
    out.add_bos_token_id(0)
    out.add_eos_token_id(0)
    names = gguf.get_tensor_name_map(architecture, layers)
    for name, tensor in sorted(SafetensorsLocal(folder / "model.safetensors").tensors.items()):
        weight = values(tensor)
        if kind == "llama" and name.endswith("q_proj.weight"):
            weight = pairs_side_by_side(weight, config["num_attention_heads"])
        if kind == "llama" and name.endswith("k_proj.weight"):
            weight = pairs_side_by_side(weight, config["num_key_value_heads"])
        stored = stored_as if weight.ndim > 1 else gguf.GGMLQuantizationType.F32
        out.add_tensor(names.get_name(name, (".weight",)), gguf.quantize(weight, stored), raw_dtype=stored)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
