"""Read a PEFT adapter's `adapter_config.json`, and refuse what is not supported. No torch.

In vLLM v0.33.0: `vllm/lora/peft_helper.py` (`PEFTHelper`).
"""

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from minivllm.config.model_files import read_json_object
from minivllm.errors import MinivllmError
from minivllm.memory.adapters import ALL_LINEARS

Rank = Annotated[int, msgspec.Meta(ge=1)]
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PICKLED_FILES = ("adapter_model.bin", "adapter_model.pt")
PATTERN = re.compile(r"\^?[\w.-]{1,300}")
# These initializations change the base's weights too, so the adapter alone is not the difference.
OTHER_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga")
# Settings that change what an adapter computes, and are refused if they are set.
REFUSED = (
    "use_dora", "lora_bias", "modules_to_save", "trainable_token_indices", "layer_replication", "target_parameters",
    "alora_invocation_tokens", "use_qalora", "use_bdlora", "arrow_config", "kasa_config", "monteclora_config",
    "velora_config",
)  # fmt: skip


class PEFTHelper(msgspec.Struct, frozen=True):
    """The rank and the scale of each module's pair of matrices.

    A pattern is a module's name or the end of it, after a dot; the first one that matches counts.
    PEFT also accepts regular expressions. None is evaluated here, because a hostile one can run
    forever: the tensors reveal the ranks, and an `alpha_pattern` with a regular expression is
    refused.
    """

    r: Rank
    lora_alpha: float
    target_modules: str | list[str]
    use_rslora: bool = False
    rank_pattern: dict[str, Rank] = {}
    alpha_pattern: dict[str, float] = {}

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
        plain = {"bias": config.get("bias") in (None, "none"), "peft_type": config.get("peft_type") in (None, "LORA")}
        plain |= {name: not config.get(name) for name in REFUSED}
        plain["init_lora_weights"] = not str(config.get("init_lora_weights")).lower().startswith(OTHER_INITS)
        if refused := [name for name, is_plain in plain.items() if not is_plain]:
            raise MinivllmError(
                f"the adapter in {path} sets {refused[0]} to {str(config[refused[0]])[:60]!r}, which is not served: "
                "take plain LoRA, without biases and beside the base's own weights"
            )
        try:
            helper = msgspec.convert({name: value for name, value in config.items() if value is not None}, cls)
        except msgspec.ValidationError as error:
            raise MinivllmError(f"{path / CONFIG_FILE} is not that of an adapter: {error}") from None
        except UnicodeEncodeError:  # JSON can also contain half of a surrogate pair
            raise MinivllmError(f"{path / CONFIG_FILE} is not valid text: it has half a character") from None
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
        if (rank := max((self.r, *self.rank_pattern.values()))) > max_lora_rank:
            raise MinivllmError(
                f"the rank {rank} {where} is greater than max_lora_rank {max_lora_rank}: raise that, or take an "
                "adapter of lower rank"
            )
        if not all(map(math.isfinite, (self.lora_alpha, *self.alpha_pattern.values()))):
            raise MinivllmError(f"lora_alpha {where} must be a finite number")
        for pattern in self.alpha_pattern:
            if not PATTERN.fullmatch(pattern):
                raise MinivllmError(
                    f"the alpha_pattern {pattern[:60]!r} {where} is a regular expression, which is not evaluated, "
                    "since a hostile one can take for ever: write out each module's name, or the end of one, or merge "
                    "the adapter into the model (merge_and_unload of PEFT)"
                )
        # "all-linear", or a regular expression: the tensors tell which modules there are.
        targets = [] if isinstance(self.target_modules, str) else self.target_modules
        unknown = sorted(name for name in targets if name.rpartition(".")[2] not in ALL_LINEARS)
        if unknown:
            served = ", ".join(ALL_LINEARS)
            raise MinivllmError(f"target_modules {where} has {unknown[0]!r}; only adapters of {served} are served")


def _matches(pattern: str, module: str) -> bool:
    whole = pattern.startswith("^")
    # A name is the whole one or an end of it; "^" admits the whole one only.
    return module == pattern.removeprefix("^") or (not whole and module.endswith(f".{pattern}"))
