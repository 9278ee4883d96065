"""Settings of speculative decoding. No torch.

In vLLM v0.33.0: `vllm/config/speculative.py` (`SpeculativeConfig`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from minivllm.config.checks import (
    Count,
    CountOrZero,
    Rule,
    check_fields,
    is_count,
    one_of,
    require,
    settings_of,
)

MODEL_METHODS = ("draft_model", "eagle3")
"""Methods that draft by running a model of their own, with a KV cache."""
DEFAULT_LOOKUP = 5


def _are_ranges(value: Any) -> bool:
    """Return whether these are ranges of batch sizes that ascend from 1, each with its drafts."""
    before = 0
    for entry in value if isinstance(value, list | tuple) else ():
        if not isinstance(entry, list | tuple) or len(entry) != 3 or not all(is_count(number, 0) for number in entry):
            return False
        if not before < entry[0] <= entry[1] or (before == 0 and entry[0] != 1):
            return False
        before = entry[1]
    return before > 0


BY_BATCH_SIZE = Rule(
    _are_ranges,
    "a list of (first, last, drafts) for ranges of batch sizes that ascend from 1, such as [(1, 8, 4), (9, 64, 2)]",
)


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Settings of speculative decoding: the method of drafting, and the number of tokens.

    - `method`: "ngram" finds an earlier occurrence of the last tokens in the same request, and
      drafts what followed it. "draft_model" runs a smaller model with the same vocabulary; in a
      dictionary with a `model` it is the default. "eagle3" runs a head that was trained for this
      model, and reads its hidden states.
    - `model`: the drafting model, a directory or a name on the Hugging Face hub.
    - `draft_sample_method`: how a drafting model chooses. "greedy" takes the most likely token;
      "probabilistic" draws from the model's distribution q for requests with a temperature, and a
      draft x is then accepted with probability min(1, p(x) / q(x)).
    - `num_speculative_tokens`: the most draft tokens per request and step.
    - `prompt_lookup_max`, `prompt_lookup_min`: longest and shortest n-gram to look up, the longest
      first. If only one is given, the other equals it; if neither is, both are 5.
    - `num_speculative_tokens_per_batch_size`: (first, last, drafts) for ranges of batch sizes, such
      as [(1, 8, 4), (9, 64, 2)]; a size beyond a range counts as its last one.
    """

    num_speculative_tokens: Count
    method: Annotated[str, one_of("ngram", *MODEL_METHODS)] = "ngram"
    model: str | Path | None = None
    draft_sample_method: Annotated[str, one_of("greedy", "probabilistic")] = "greedy"
    prompt_lookup_max: Count | None = None
    prompt_lookup_min: Count | None = None
    num_speculative_tokens_per_batch_size: Annotated[Sequence[tuple[int, int, int]], BY_BATCH_SIZE] | None = None

    @classmethod
    def of(cls, settings: "Mapping[str, Any] | SpeculativeConfig | None") -> "SpeculativeConfig | None":
        """Create one from a dictionary, the form vLLM takes; None stays None.

        Raises:
            MinivllmError: an unknown key, an invalid value, or `num_speculative_tokens` is missing.
        """
        if isinstance(settings, Mapping) and settings.get("method") is None:
            # As in vLLM: a config with a model drafts with it.
            settings = {**settings, "method": "ngram" if settings.get("model") is None else "draft_model"}
        example = '{"method": "ngram", "num_speculative_tokens": 4}'
        return settings_of(cls, "speculative_config", settings, example)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.runs_model:
            require(
                isinstance(self.model, str | Path) and bool(str(self.model)),
                f"speculative method {self.method!r} needs a model: a directory, or a name on the Hugging Face hub",
            )
        else:
            require(self.model is None, f"speculative method {self.method!r} runs no model: leave model out")
            require(
                self.draft_sample_method == "greedy",
                f"draft_sample_method {self.draft_sample_method!r} needs a method with a model; {self.method!r} has "
                "none",
            )
        require(
            self.lookup_min <= self.lookup_max,
            f"prompt_lookup_min ({self.lookup_min}) exceeds prompt_lookup_max ({self.lookup_max})",
        )

    @property
    def runs_model(self) -> bool:
        """Return whether drafts come from a model, which has weights and a KV cache."""
        return self.method in MODEL_METHODS

    @property
    def use_eagle(self) -> bool:
        """Return whether the drafter reads the target's hidden states."""
        return self.method == "eagle3"

    @property
    def num_lookahead_tokens(self) -> int:
        """The number of slots that the drafter needs beyond those of a step's tokens; 0 if it has
        no KV cache.

        After a step whose drafts were all accepted, the drafter reads the sampled token and all of
        its drafts but the last one: one slot for each.
        """
        return self.num_speculative_tokens if self.runs_model else 0

    @property
    def drafting(self) -> "DraftingConfig":
        """The scheduler's part of the speculation settings."""
        return DraftingConfig(**{field.name: getattr(self, field.name) for field in fields(DraftingConfig)})

    @property
    def lookup_max(self) -> int:
        """Return the length of the longest n-gram to look up."""
        return self.prompt_lookup_max or self.prompt_lookup_min or DEFAULT_LOOKUP

    @property
    def lookup_min(self) -> int:
        """Return the length of the shortest n-gram to look up."""
        return self.prompt_lookup_min or self.prompt_lookup_max or DEFAULT_LOOKUP


@dataclass(frozen=True, kw_only=True)
class DraftingConfig:
    """The scheduler's part of the speculation settings; by default there is no speculation.

    - `num_speculative_tokens`: the most draft tokens per request and step.
    - `num_lookahead_tokens`: extra slots to allocate, for a drafter that writes into the same
      blocks.
    - `use_eagle`: the drafter's cache depends on the token after each place too, so a prefix hit
      leaves out its last block.
    - `num_speculative_tokens_per_batch_size`: when to make fewer drafts, as in `SpeculativeConfig`.
    """

    num_speculative_tokens: CountOrZero = 0
    num_lookahead_tokens: CountOrZero = 0
    use_eagle: bool = False
    num_speculative_tokens_per_batch_size: Sequence[tuple[int, int, int]] | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    def num_drafts_after(self, num_requests: int) -> int | None:
        """Return the maximum number of drafts per request after a step of `num_requests`; None
        stands for `num_speculative_tokens`.

        A batch size past the end of a range of `num_speculative_tokens_per_batch_size` uses that
        range's last entry.
        """
        schedule = self.num_speculative_tokens_per_batch_size
        if not schedule or not num_requests:
            return None
        # The ranges rise, so the last one that has begun is the right one.
        scheduled = [drafts for first, _, drafts in schedule if first <= num_requests][-1]
        return min(self.num_speculative_tokens, scheduled)


NO_DRAFTS = DraftingConfig()
