"""Read a PEFT adapter's `adapter_config.json`, and refuse what is not supported. No torch.

In vLLM v0.33.0: `vllm/lora/peft_helper.py` (`PEFTHelper`).
"""

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minivllm.config.checks import is_count, is_number
from minivllm.config.model_files import read_json_object
from minivllm.errors import MinivllmError
from minivllm.memory.adapters import ALL_LINEARS

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PICKLED_FILES = ("adapter_model.bin", "adapter_model.pt")
REQUIRED = ("r", "lora_alpha", "target_modules")
PATTERN = re.compile(r"\^?[\w.-]{1,300}")
# These initializations change the base's weights too, so the adapter alone is not the difference.
OTHER_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")
# Settings of other methods than plain LoRA, each of which is off unless it is true.
UNSERVED = (
    "use_dora", "lora_bias", "modules_to_save", "trainable_token_indices", "layer_replication", "target_parameters",
    "alora_invocation_tokens", "use_qalora", "use_bdlora", "arrow_config", "kasa_config", "monteclora_config",
    "velora_config",
)  # fmt: skip


@dataclass(frozen=True)
class PEFTHelper:
    """The rank and the scale of each module's pair of matrices.

    A pattern is a module's name or the end of it, after a dot; the first one that matches counts.
    PEFT also accepts regular expressions. None is evaluated here, because a hostile one can run
    forever: the tensors reveal the ranks, and an `alpha_pattern` with a regular expression is
    refused.
    """

    r: int
    lora_alpha: float
    target_modules: str | list[str]
    use_rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)

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
        helper = cls(
            **{name: config[name] for name in REQUIRED},
            use_rslora=config.get("use_rslora") or False,
            rank_pattern=config.get("rank_pattern") or {},
            alpha_pattern=config.get("alpha_pattern") or {},
        )
        helper._check(path, max_lora_rank)
        return helper

    def rank_of(self, module: str, stored: int) -> int:
        """Return the rank that a module's pair must have; a module is, for example,
        "model.layers.0.self_attn.q_proj".

        After a regular expression, which may or may not match, that is the `stored` rank if the
        config has it anywhere.
        """
        for pattern, rank in self.rank_pattern.items():
            if not PATTERN.fullmatch(pattern):
                # A regular expression, which is not evaluated: it may or may not match.
                return stored if stored in self.rank_pattern.values() else self.r
            if _matches(pattern, module):
                return rank
        return self.r

    def scale_of(self, module: str, rank: int) -> float:
        """Return the factor of B A: alpha / rank, or alpha / √rank with rank-stabilised LoRA."""
        alphas = (alpha for pattern, alpha in self.alpha_pattern.items() if _matches(pattern, module))
        alpha = next(alphas, self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)  # rsLoRA, arXiv 2312.03732

    def _check(self, path: Path, max_lora_rank: int) -> None:
        where = f"of the adapter in {path}"
        if not isinstance(self.use_rslora, bool):
            raise MinivllmError(f"use_rslora {where} is {self.use_rslora!r}; it must be true or false")
        patterns = (self.rank_pattern, self.alpha_pattern)
        if not all(isinstance(pattern, dict) for pattern in patterns):
            raise MinivllmError(f"rank_pattern and alpha_pattern {where} must map names of modules to numbers")
        for rank in (self.r, *self.rank_pattern.values()):
            if not is_count(rank, 1):
                raise MinivllmError(f"the rank {rank!r} {where} must be a whole number of at least 1")
            if rank > max_lora_rank:
                raise MinivllmError(
                    f"the rank {rank} {where} is greater than max_lora_rank {max_lora_rank}: raise that, or take an "
                    "adapter of lower rank"
                )
        for alpha in (self.lora_alpha, *self.alpha_pattern.values()):
            if not is_number(alpha):
                raise MinivllmError(f"lora_alpha {where} is {alpha!r}; it must be a number")
        for pattern in self.alpha_pattern:
            if not PATTERN.fullmatch(pattern):
                raise MinivllmError(
                    f"the alpha_pattern {pattern[:60]!r} {where} is a regular expression, which is not evaluated, "
                    "since a hostile one can take for ever: write out each module's name, or the end of one, or merge "
                    "the adapter into the model (merge_and_unload of PEFT)"
                )
        self._check_targets(where)

    def _check_targets(self, where: str) -> None:
        targets = self.target_modules
        # "all-linear", or a regular expression: the tensors tell which modules there are.
        if isinstance(targets, str):
            return
        if not isinstance(targets, list) or not all(isinstance(name, str) for name in targets):
            shown = repr(str(targets)[:60])
            raise MinivllmError(f"target_modules {where} is {shown}; it must be a list of names, or a string")
        unknown = sorted(name for name in targets if name.rpartition(".")[2] not in ALL_LINEARS)
        if unknown:
            served = ", ".join(ALL_LINEARS)
            raise MinivllmError(f"target_modules {where} has {unknown[0]!r}; only adapters of {served} are served")


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
