"""A model's `generation_config.json`: additional end-of-sequence tokens, and default sampling
parameters.

In vLLM v0.33.0: `ModelConfig.get_diff_sampling_param` in `vllm/config/model.py`,
`SamplingParams.update_from_generation_config` in `vllm/sampling_params.py`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from minivllm.config import ModelConfig
from minivllm.config.checks import is_count
from minivllm.config.model_files import optional_file, read_json_object
from minivllm.engine.arg_utils import EngineArgs
from minivllm.models.tokenizer import load_tokenizer
from minivllm.sampling_params import SamplingParams

FILENAME, TOKENIZER_CONFIG = "generation_config.json", "tokenizer_config.json"
SAMPLING_FIELDS = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")


@dataclass(frozen=True)
class GenerationConfig:
    """End-of-sequence ids from all of a model's configs, and the sampling defaults of its
    generation config.

    If the tokenizer's config names an end-of-sequence token, that one is first.
    """

    eos_token_ids: tuple[int, ...]
    sampling: dict[str, Any]

    @classmethod
    def of(
        cls, path_or_name: str | Path, config: ModelConfig, tokenizer: Tokenizer | None = None
    ) -> "GenerationConfig":
        """Read the generation config in the model's folder; if there is none, use only the configs
        of the model and the tokenizer.

        Ids outside the vocabulary are left out, because they can never be sampled.

        Raises:
            MinivllmError: a file exists but is not valid.
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
        """Return the sampling parameters for a request that sets none itself."""
        return SamplingParams(**self.sampling)


def _eos_of_tokenizer(path_or_name: str | Path, tokenizer: Tokenizer | None) -> int | None:
    """Return the id of the `eos_token` in the tokenizer's config, or None."""
    if tokenizer is None:
        return None
    eos = _read(path_or_name, TOKENIZER_CONFIG).get("eos_token")
    text = eos.get("content") if isinstance(eos, dict) else eos
    return tokenizer.token_to_id(text) if isinstance(text, str) else None


def _read(path_or_name: str | Path, filename: str) -> dict[str, Any]:
    path = optional_file(path_or_name, filename)
    return {} if path is None else read_json_object(path)


def tokenizer_and_ends(args: EngineArgs) -> tuple[str, tuple[int, ...]]:
    """Return the tokenizer as JSON and the model's end-of-sequence tokens, both of which grammars
    need.
    """
    tokenizer = load_tokenizer(args.tokenizer or args.model)
    # Grammars tokenize on their own, and must see tokens as the engine does.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    config = ModelConfig.from_pretrained(args.model)
    return tokenizer.to_str(), GenerationConfig.of(args.model, config, tokenizer).eos_token_ids
