"""The shape of a model, as the decoder and the memory arithmetic need it.

`hf_config.py` reads it from the `config.json` of a Hugging Face model, which `model_files.py`
finds.

In vLLM: `vllm/config/model.py`, `ModelConfig`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from minivllm.config.cache_kinds import FULL
from minivllm.config.hf_config import model_fields, text_config
from minivllm.config.model_files import checkpoint_bytes, config_path, read_json_object
from minivllm.errors import MinivllmError

MODELS = Path(__file__).resolve().parents[2] / "models"
EMBEDDED_MODEL, EMBEDDED_DRAFT, EMBEDDED_EAGLE3 = (
    MODELS / name for name in ("tiny-python", "tiny-python-draft", "tiny-python-eagle3")
)

EMBEDDED_SIBLINGS = {kind: MODELS / f"tiny-python-{kind}" for kind in ("mha", "gqa", "mqa", "mla")}
"""Four small models that were trained alike, and differ in what their attention shares."""


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a model, for the decoder and the memory arithmetic. Zero means that the config
    does not state the value.
    """

    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_size: int = 0
    intermediate_size: int = 0
    vocab_size: int = 0
    max_position_embeddings: int = 0
    architecture: str = ""
    model_type: str = ""
    dtype: str = "bfloat16"
    """The dtype of the stored weights: float32, float16, bfloat16, ..."""
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = field(default=None, hash=False)
    """None for unscaled RoPE, else a dict with the key `rope_type`: linear, dynamic, llama3,
    yarn, ...
    """
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    """Whether the q, k and v projections have a bias."""
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Whether each head of q and k is normalized before RoPE (Qwen3)."""
    sliding_window: int | None = None
    """The window of *every* layer, in tokens; None if there is no window or if layers differ."""
    layer_types: tuple[str, ...] | None = None
    kv_lora_rank: int | None = None
    """Width of the latent vector of multi-head latent attention (DeepSeek); None for ordinary
    attention.
    """
    qk_rope_head_dim: int | None = None
    qk_nope_head_dim: int = 0
    v_head_dim: int = 0
    q_lora_rank: int = 0
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    num_shared_experts: int = 0
    num_dense_layers: int = 0
    """Number of leading layers with a dense MLP in a mixture-of-experts model."""
    eos_token_ids: tuple[int, ...] = ()
    quantization: str | None = None
    """Quantization method of the checkpoint (fp8, awq, gptq, ...); None if it is not quantized."""
    quantization_config: dict[str, Any] | None = field(default=None, hash=False)
    """The checkpoint's own description of its quantization: bits, groups, layers, ..., as its
    method spells them.
    """
    checkpoint_kv_dtype: str | None = None
    """The KV-cache dtype that a quantized checkpoint asks for; None if it does not ask for one."""
    cache_exception: str | None = None
    """Why one formula cannot give the bytes per token; None for models that cache every token in
    every layer.
    """
    hf_config: dict[str, Any] = field(default_factory=dict, hash=False, compare=False, repr=False)
    """The contents of the whole `config.json`: of a multimodal model, also the parts beside the
    language model.
    """
    checkpoint_bytes: int | None = field(default=None, compare=False)
    """The bytes of the checkpoint's tensors, if it is a local directory that holds them."""

    @property
    def hf_text_config(self) -> dict[str, Any]:
        """Return the language model's part of `hf_config`."""
        return text_config(self.hf_config)

    @property
    def keeps_every_token(self) -> bool:
        """Return whether every layer caches the key and value of every token."""
        # A window forgets tokens, in every layer or in some.
        windows = self.sliding_window is not None or set(self.layer_types or (FULL,)) != {FULL}
        return self.cache_exception is None and not windows

    @property
    def rotary_dim(self) -> int:
        """How many elements of a head are rotated: all of them, or with a latent cache only the
        part kept beside it.
        """
        return self.head_dim if self.kv_lora_rank is None else self.qk_rope_head_dim or 0

    @property
    def latent_width(self) -> int:
        """How many elements a token adds to one layer's latent cache; 0 for ordinary attention."""
        return 0 if self.kv_lora_rank is None else self.kv_lora_rank + self.rotary_dim

    @classmethod
    def from_dict(cls, hf_config: Mapping[str, Any]) -> "ModelConfig":
        """Read the contents of a `config.json`, in the old style or that of transformers 5,
        including nested text configs.

        Raises:
            MinivllmError: a required field is missing or invalid; the message names it.
        """
        if not isinstance(hf_config, Mapping):
            raise MinivllmError(f"a model config must be a mapping of names to values, not {type(hf_config).__name__}")
        return cls(**model_fields(hf_config))

    @classmethod
    def from_pretrained(cls, path_or_name: str | Path) -> "ModelConfig":
        """Read the config of a local model directory, of a `config.json`, or of a model on the
        Hugging Face Hub.

        Raises:
            MinivllmError: there is no such model, the Hub cannot be reached, or the file is not a
                model config.
        """
        path = config_path(path_or_name)
        contents = read_json_object(path)
        try:
            return replace(cls.from_dict(contents), checkpoint_bytes=checkpoint_bytes(path.parent))
        except MinivllmError as error:
            # The same type, so that "unsupported model" stays that.
            raise type(error)(f"{path_or_name}: {error}") from error

    def require(self, *names: str) -> None:
        """Raise a `MinivllmError` that names the first of these fields missing from the config."""
        for name in names:
            if not getattr(self, name):
                raise MinivllmError(f"the model config lacks {name!r}, which is needed here")
