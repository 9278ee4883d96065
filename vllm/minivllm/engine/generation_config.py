"""What a model's `generation_config.json` adds: further end-of-sequence tokens, and its makers' sampling defaults.

In vLLM v0.33.0: `ModelConfig.get_diff_sampling_param` in `vllm/config/model.py`,
`SamplingParams.update_from_generation_config`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minivllm.config import ModelConfig
from minivllm.config.checks import is_count
from minivllm.config.model import hub_file, read_json_object
from minivllm.errors import MinivllmError
from minivllm.sampling_params import SamplingParams

FILENAME = "generation_config.json"
SAMPLING_FIELDS = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")


@dataclass(frozen=True)
class GenerationConfig:
    """End-of-sequence ids of config and generation config together, and the sampling defaults that the latter names."""

    eos_token_ids: tuple[int, ...]
    sampling: dict[str, Any]

    @classmethod
    def of(cls, path_or_name: str | Path, config: ModelConfig) -> "GenerationConfig":
        """Read the file beside the model; without one, only what the model config says.

        Ids outside the vocabulary are left out: no such token can come.

        Raises:
            MinivllmError: the file is there, and broken.
        """
        contents = _read(path_or_name)
        eos = contents.get("eos_token_id")
        ids: list[Any] = [*config.eos_token_ids, *(eos if isinstance(eos, list) else [eos])]
        sampling = {name: contents[name] for name in SAMPLING_FIELDS if contents.get(name) is not None}
        if contents.get("max_new_tokens") is not None:
            sampling["max_tokens"] = contents["max_new_tokens"]
        in_vocabulary = (token for token in ids if is_count(token, 0) and token < config.vocab_size)
        return cls(tuple(dict.fromkeys(in_vocabulary)), sampling)

    def default_sampling_params(self) -> SamplingParams:
        """The parameters of a request that brings none."""
        return SamplingParams(**self.sampling)


def _read(path_or_name: str | Path) -> dict[str, Any]:
    directory = Path(path_or_name).expanduser()
    try:
        path = directory / FILENAME if directory.is_dir() else hub_file(str(path_or_name), FILENAME)
    except MinivllmError:
        return {}
    return read_json_object(path) if path.is_file() else {}
