"""What a model's `generation_config.json` adds: further end-of-sequence tokens, and its makers' sampling defaults.

In vLLM v0.33.0: `ModelConfig.get_diff_sampling_param` in `vllm/config/model.py`,
`SamplingParams.update_from_generation_config`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from minivllm.config import ModelConfig
from minivllm.config.checks import is_count
from minivllm.config.model import hub_file, local_path, read_json_object
from minivllm.errors import MinivllmError
from minivllm.sampling_params import SamplingParams

FILENAME, TOKENIZER_CONFIG = "generation_config.json", "tokenizer_config.json"
SAMPLING_FIELDS = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")


@dataclass(frozen=True)
class GenerationConfig:
    """End-of-sequence ids of config and generation config together, and the sampling defaults that the latter names.

    First stands the tokenizer's own end-of-sequence token, where it names one.
    """

    eos_token_ids: tuple[int, ...]
    sampling: dict[str, Any]

    @classmethod
    def of(
        cls, path_or_name: str | Path, config: ModelConfig, tokenizer: Tokenizer | None = None
    ) -> "GenerationConfig":
        """Read the file beside the model; without one, there is only what the model config and the tokenizer say.

        Ids outside the vocabulary are left out: no such token can come.

        Raises:
            MinivllmError: a file is there, and broken.
        """
        contents = _read(path_or_name, FILENAME)
        eos = contents.get("eos_token_id")
        ids: list[Any] = [_eos_of_tokenizer(path_or_name, tokenizer), *config.eos_token_ids]
        ids += eos if isinstance(eos, list) else [eos]
        sampling = {name: contents[name] for name in SAMPLING_FIELDS if contents.get(name) is not None}
        if contents.get("max_new_tokens") is not None:
            sampling["max_tokens"] = contents["max_new_tokens"]
        in_vocabulary = (token for token in ids if is_count(token, 0) and token < config.vocab_size)
        return cls(tuple(dict.fromkeys(in_vocabulary)), sampling)

    def default_sampling_params(self) -> SamplingParams:
        """The parameters of a request that brings none."""
        return SamplingParams(**self.sampling)


def _eos_of_tokenizer(path_or_name: str | Path, tokenizer: Tokenizer | None) -> int | None:
    """The id of the `eos_token` that the tokenizer's config names; None where it names none."""
    if tokenizer is None:
        return None
    eos = _read(path_or_name, TOKENIZER_CONFIG).get("eos_token")
    text = eos.get("content") if isinstance(eos, dict) else eos
    return tokenizer.token_to_id(text) if isinstance(text, str) else None


def _read(path_or_name: str | Path, filename: str) -> dict[str, Any]:
    directory = local_path(path_or_name)
    try:
        path = directory / filename if directory.is_dir() else hub_file(str(path_or_name), filename)
    except MinivllmError:
        return {}
    return read_json_object(path) if path.is_file() else {}
