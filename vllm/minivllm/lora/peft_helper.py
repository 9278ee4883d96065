"""Read a PEFT adapter's `adapter_config.json`, and refuse what is not supported. No torch.

In vLLM v0.33.0: `vllm/lora/peft_helper.py` (`PEFTHelper`).
"""

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from minivllm.config.checks import Count, Rule, check_fields, is_number
from minivllm.config.model_files import read_json_object
from minivllm.errors import MinivllmError

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PICKLED_FILES = ("adapter_model.bin", "adapter_model.pt")
REQUIRED = ("r", "lora_alpha")
PATTERN = re.compile(r"\^?[\w.-]{1,300}")
# These initializations change the base's weights too, so the adapter alone is not the difference.
OTHER_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")
# Settings of other methods than plain LoRA, each of which is off unless it is true.
UNSERVED = (
    "use_dora", "lora_bias", "modules_to_save", "trainable_token_indices", "layer_replication", "target_parameters",
    "alora_invocation_tokens", "use_qalora", "use_bdlora", "arrow_config", "kasa_config", "monteclora_config",
    "velora_config",
)  # fmt: skip


def _are_alphas(value: Any) -> bool:
    return isinstance(value, Mapping) and all(PATTERN.fullmatch(name) and is_number(value[name]) for name in value)


ALPHAS = Rule(
    _are_alphas,
    "numbers by the name of a module, or the end of one; regular expressions are not evaluated, since a hostile one "
    "can take for ever",
)


@dataclass(frozen=True)
class PEFTHelper:
    """The rank and the scale of each module's pair of matrices. With a `rank_pattern`, which sets
    other ranks for some modules, the tensors tell the ranks.

    A pattern is a module's name or the end of it, after a dot; the first one that matches counts.
    PEFT also accepts regular expressions. None is evaluated here, because a hostile one can run
    forever: an `alpha_pattern` with one is refused.
    """

    r: Count
    lora_alpha: Annotated[float, Rule(is_number, "a number")]
    use_rslora: bool = False
    rank_pattern: Any = None
    alpha_pattern: Annotated[Mapping[str, float], ALPHAS] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    def from_local_dir(cls, folder: str | Path, max_lora_rank: int) -> "PEFTHelper":
        """Read and check the config of an adapter in a local folder.

        Raises:
            MinivllmError: there is none, or it has a feature that is not served; one line says
                what.
        """
        path = Path(folder)
        if not os.path.isfile(path / CONFIG_FILE):  # no, too, where nothing may be looked at
            raise MinivllmError(f"there is no adapter in {path}: it has no {CONFIG_FILE}")
        helper = cls.from_dict(read_json_object(path / CONFIG_FILE), path, max_lora_rank)
        if not os.path.isfile(path / WEIGHTS_FILE):
            pickled = next((name for name in PICKLED_FILES if (path / name).exists()), None)
            instead = f"; {pickled} is a pickle, which can run code: save it as safetensors" if pickled else ""
            raise MinivllmError(f"the adapter in {path} has no {WEIGHTS_FILE}{instead}")
        return helper

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], path: Path, max_lora_rank: int) -> "PEFTHelper":
        """Check what the config of the adapter in `path` says; raise like `from_local_dir`."""
        missing = [name for name in REQUIRED if config.get(name) is None]
        if missing:
            raise MinivllmError(f"{path / CONFIG_FILE} lacks {', '.join(missing)}; an adapter's config has all of them")
        for name in _unserved(config):
            value = str(config[name])[:60]
            raise MinivllmError(f"the adapter in {path} has {name} {value!r}; only plain LoRA without biases is served")
        try:
            helper = cls(
                **{name: config[name] for name in REQUIRED},
                use_rslora=config.get("use_rslora") or False,
                rank_pattern=config.get("rank_pattern"),
                alpha_pattern=config.get("alpha_pattern") or {},
            )
        except MinivllmError as error:
            raise MinivllmError(f"the adapter in {path}: {error}") from None
        check_rank(path, helper.r, max_lora_rank)
        return helper

    def scale_of(self, module: str, rank: int) -> float:
        """Return the factor of B A: alpha / rank, or alpha / √rank with rank-stabilised LoRA; a
        module is, for example, "model.layers.0.self_attn.q_proj".
        """
        alphas = (alpha for pattern, alpha in self.alpha_pattern.items() if _matches(pattern, module))
        alpha = next(alphas, self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)  # rsLoRA, arXiv 2312.03732


def check_rank(folder: str | Path, rank: int, max_lora_rank: int) -> None:
    """Raise a `MinivllmError` if a slot has no room for this rank."""
    if rank > max_lora_rank:
        raise MinivllmError(
            f"the rank {rank} of the adapter in {folder} is greater than max_lora_rank {max_lora_rank}: raise that, or "
            "take an adapter of lower rank"
        )


def _matches(pattern: str, module: str) -> bool:
    whole = pattern.startswith("^")
    # A name is the whole one or an end of it; "^" admits the whole one only.
    return module == pattern.removeprefix("^") or (not whole and module.endswith(f".{pattern}"))


def _unserved(config: Mapping[str, Any]) -> list[str]:
    """Return the settings with which an adapter is more than the two matrices of each module."""
    names = [name for name in UNSERVED if config.get(name)]
    for name, plain in (("bias", "none"), ("peft_type", "LORA")):
        if config.get(name) not in (None, plain):
            names.append(name)
    if str(config.get("init_lora_weights")).lower().startswith(OTHER_INITS):
        names.append("init_lora_weights")
    return names
