"""Settings of speculative decoding. No torch.

In vLLM v0.33.0: `vllm/config/speculative.py` (`SpeculativeConfig`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from minivllm.config.checks import is_count, is_number, require, require_flags

METHODS = ("ngram", "suffix", "draft_model", "eagle3")
MODEL_METHODS = ("draft_model", "eagle3")
"""Methods that draft by running a model of their own, with a KV cache."""
DRAFT_SAMPLE_METHODS = ("greedy", "probabilistic")
REJECTION_SAMPLE_METHODS = ("standard", "synthetic")
DEFAULT_LOOKUP = 5


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """How to draft, and how many tokens.

    - `method`: "ngram" finds an earlier occurrence of the last tokens in the same request, and drafts what followed it.
      "suffix" follows the most frequent continuation in the request and in earlier responses. "draft_model" runs a
      smaller model with the same vocabulary; in a dictionary with a `model` it is the default. "eagle3" runs a head
      that was trained for this model, and reads its hidden states.
    - `model`: the drafting model, a directory or a name on the Hugging Face hub.
    - `draft_sample_method`: how a drafting model chooses. "greedy" takes the most likely token; "probabilistic" draws
      from the model's distribution q for requests with a temperature, and a draft x is then accepted with probability
      min(1, p(x) / q(x)).
    - `num_speculative_tokens`: the most draft tokens per request and step. "suffix" alone can do without: then
      `suffix_decoding_max_tree_depth`.
    - `prompt_lookup_max`, `prompt_lookup_min`: longest and shortest n-gram to look up, the longest first. If only one
      is given, the other equals it; if neither is, both are 5.
    - `suffix_decoding_max_tree_depth`: the most tokens of a match and its draft together.
      `suffix_decoding_max_cached_requests`: how many responses are remembered, the latest ones; 0 = none.
      `suffix_decoding_max_spec_factor`: the most draft tokens per token of the match.
      `suffix_decoding_min_token_prob`: how probable a draft token must be, by the counts so far, with all before it.
    - `rejection_sample_method`: "standard" keeps the model's distribution. "synthetic" accepts drafts at given rates
      whatever the model says, so its text is not the model's: for experiments on speed.
      `synthetic_acceptance_rates`: for each position the probability that all drafts up to it are accepted; or
      `synthetic_acceptance_length`: how many tokens a step with drafts shall bring in the mean.
    - `num_speculative_tokens_per_batch_size`: (first, last, drafts) for ranges of batch sizes, such as
      [(1, 8, 4), (9, 64, 2)]; a size beyond a range counts as its last one.
    - `draft_only_if_faster`: measures steps with and without drafts, and makes none while they lose. Not in vLLM. Off
      by default: with it, how many drafts there are depends on the clock, so no two runs count the same.
    """

    num_speculative_tokens: int
    method: str = "ngram"
    model: str | Path | None = None
    draft_sample_method: str = "greedy"
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    rejection_sample_method: str = "standard"
    synthetic_acceptance_rates: Sequence[float] | None = None
    synthetic_acceptance_length: float | None = None
    num_speculative_tokens_per_batch_size: Sequence[tuple[int, int, int]] | None = None
    draft_only_if_faster: bool = False

    @classmethod
    def of(cls, settings: "Mapping[str, Any] | SpeculativeConfig | None") -> "SpeculativeConfig | None":
        """Create one from a dictionary, the form vLLM takes; None stays None.

        Raises:
            MinivllmError: an unknown key, an invalid value, or `num_speculative_tokens` is missing.
        """
        if settings is None or isinstance(settings, SpeculativeConfig):
            return settings
        known = [field.name for field in fields(cls)]
        require(
            isinstance(settings, Mapping),
            f'speculative_config is {settings!r}; it must be a dictionary such as {{"method": "ngram", '
            '"num_speculative_tokens": 4}',
        )
        for name in settings:
            require(name in known, f"speculative_config has no key {name!r}; there are: {', '.join(known)}")
        if settings.get("method") == "suffix" and "num_speculative_tokens" not in settings:
            depth = settings.get("suffix_decoding_max_tree_depth", cls.suffix_decoding_max_tree_depth)
            settings = {**settings, "num_speculative_tokens": depth}
        method = settings.get("method")
        if method is not None:
            _check_method(method)
        require("num_speculative_tokens" in settings, "speculative_config lacks num_speculative_tokens, such as 4")
        by_default = "ngram" if settings.get("model") is None else "draft_model"
        return cls(**{**settings, "method": by_default if method is None else method})

    def __post_init__(self) -> None:
        _check_method(self.method)
        for name in ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"):
            value = getattr(self, name)
            if value is None and name != "num_speculative_tokens":
                continue
            require(is_count(value, 1), f"{name} is {value!r}; it must be a whole number from 1 on")
        self._check_model()
        require(
            self.lookup_min <= self.lookup_max,
            f"prompt_lookup_min ({self.lookup_min}) exceeds prompt_lookup_max ({self.lookup_max})",
        )
        self._check_suffix_decoding()
        self._check_rejection_sample_method()
        require_flags(self, "draft_only_if_faster")
        check_schedule(self.num_speculative_tokens_per_batch_size)

    def _check_suffix_decoding(self) -> None:
        for name, least in (("suffix_decoding_max_tree_depth", 1), ("suffix_decoding_max_cached_requests", 0)):
            value = getattr(self, name)
            require(is_count(value, least), f"{name} is {value!r}; it must be a whole number from {least} on")
        factor, prob = self.suffix_decoding_max_spec_factor, self.suffix_decoding_min_token_prob
        require(
            is_number(factor) and factor >= 0,
            f"suffix_decoding_max_spec_factor is {factor!r}; it must be a number from 0 on",
        )
        require(
            is_number(prob) and 0 <= prob <= 1,
            f"suffix_decoding_min_token_prob is {prob!r}; it must be a number from 0 to 1",
        )

    def _check_rejection_sample_method(self) -> None:
        method, most = self.rejection_sample_method, self.num_speculative_tokens
        rates, length = self.synthetic_acceptance_rates, self.synthetic_acceptance_length
        require(
            method in REJECTION_SAMPLE_METHODS,
            f"unknown rejection_sample_method {method!r}; known are {', '.join(REJECTION_SAMPLE_METHODS)}",
        )
        given = (rates is not None) + (length is not None)
        require(
            given == (method == "synthetic"),
            'rejection_sample_method "synthetic" takes either synthetic_acceptance_rates or '
            'synthetic_acceptance_length; "standard" takes neither',
        )
        require(
            length is None or (is_number(length) and 1 <= length <= most + 1),
            f"synthetic_acceptance_length is {length!r}; it must be a number from 1 to {most + 1}",
        )
        if rates is None:
            return
        some = ", ".join(f"{0.7**place:.2g}" for place in range(1, min(most, 3) + 1))
        right = f"it must be {most} numbers from 1 down to 0, such as [{some}{', ...' * (most > 3)}]"
        require(
            isinstance(rates, list | tuple) and len(rates) == most and all(map(is_number, rates)),
            f"synthetic_acceptance_rates is {rates!r}; {right}",
        )
        falls = all(0 <= after <= before for before, after in zip((1.0, *rates), rates, strict=False))
        require(falls, f"synthetic_acceptance_rates is {rates!r}; {right}")

    @property
    def conditional_acceptance_rates(self) -> tuple[float, ...] | None:
        """For each position, how often a draft is accepted if all before it were; None if the model decides.

        A mean length L makes the first L - 1 drafts certain, and the one behind them accepted as often as is left.
        """
        rates, length = self.synthetic_acceptance_rates, self.synthetic_acceptance_length
        if length is not None:
            rates = [min(max(length - 1 - place, 0.0), 1.0) for place in range(self.num_speculative_tokens)]
        if rates is None:
            return None
        return tuple(after / before if before else 0.0 for before, after in zip((1.0, *rates), rates, strict=False))

    def _check_model(self) -> None:
        if not self.runs_model:
            require(self.model is None, f"speculative method {self.method!r} runs no model: leave model out")
        else:
            require(
                isinstance(self.model, str | Path) and bool(str(self.model)),
                f"speculative method {self.method!r} needs a model: a directory, or a name on the Hugging Face hub",
            )
        require(
            self.draft_sample_method in DRAFT_SAMPLE_METHODS,
            f"unknown draft_sample_method {self.draft_sample_method!r}; known are {', '.join(DRAFT_SAMPLE_METHODS)}",
        )
        require(
            self.draft_sample_method == "greedy" or self.runs_model,
            f"draft_sample_method {self.draft_sample_method!r} needs a method with a model; {self.method!r} has none",
        )

    @property
    def runs_model(self) -> bool:
        """Whether drafts come from a model, which has weights and a KV cache."""
        return self.method in MODEL_METHODS

    @property
    def use_eagle(self) -> bool:
        """Whether the drafter reads the target's hidden states."""
        return self.method == "eagle3"

    @property
    def num_lookahead_tokens(self) -> int:
        """Slots that the drafter needs beyond those of a step's tokens: 0 for a drafter without a KV cache.

        After a step whose drafts were all accepted, the drafter reads the sampled token and all of its drafts but the
        last one: one slot for each.
        """
        return self.num_speculative_tokens if self.runs_model else 0

    @property
    def drafting(self) -> "DraftingConfig":
        """What the scheduler has to know of it."""
        return DraftingConfig(**{field.name: getattr(self, field.name) for field in fields(DraftingConfig)})

    @property
    def lookup_max(self) -> int:
        """Length of the longest n-gram to look up."""
        return self.prompt_lookup_max or self.prompt_lookup_min or DEFAULT_LOOKUP

    @property
    def lookup_min(self) -> int:
        """Length of the shortest n-gram to look up."""
        return self.prompt_lookup_min or self.prompt_lookup_max or DEFAULT_LOOKUP


@dataclass(frozen=True, kw_only=True)
class DraftingConfig:
    """What the scheduler has to know of speculation; by default there is none.

    - `num_speculative_tokens`: the most draft tokens per request and step.
    - `num_lookahead_tokens`: extra slots to allocate, for a drafter that writes into the same blocks.
    - `use_eagle`: the drafter's cache depends on the token after each place too, so a prefix hit leaves out its last
      block.
    - `num_speculative_tokens_per_batch_size`, `draft_only_if_faster`: when to make fewer drafts, as in
      `SpeculativeConfig`.
    """

    num_speculative_tokens: int = 0
    num_lookahead_tokens: int = 0
    use_eagle: bool = False
    num_speculative_tokens_per_batch_size: Sequence[tuple[int, int, int]] | None = None
    draft_only_if_faster: bool = False

    def __post_init__(self) -> None:
        for name in ("num_speculative_tokens", "num_lookahead_tokens"):
            value = getattr(self, name)
            require(is_count(value, 0), f"{name} is {value!r}; it must be a whole number, and not negative")


NO_DRAFTS = DraftingConfig()


def _check_method(method: object) -> None:
    require(method in METHODS, f"unknown speculative method {method!r}; known are {', '.join(METHODS)}")


def check_schedule(schedule: object) -> None:
    """Rejects what is no `num_speculative_tokens_per_batch_size`: ranges must begin with 1, rise, and not overlap."""
    if schedule is None:
        return
    name = "num_speculative_tokens_per_batch_size"
    right = "it must be a list of (first, last, drafts) such as [(1, 8, 4), (9, 64, 2)]"
    require(isinstance(schedule, list | tuple) and bool(schedule), f"{name} is {schedule!r}; {right}")
    assert isinstance(schedule, list | tuple)
    before = 0
    for entry in schedule:
        require(isinstance(entry, list | tuple) and len(entry) == 3, f"{name} has an entry {entry!r}; {right}")
        first, last, drafts = entry
        require(is_count(first, 1) and is_count(last, 1) and is_count(drafts, 0), f"{name} has {entry!r}; {right}")
        require(first <= last, f"{name}: the range from {first} to {last} is empty; give the smaller size first")
        require(before > 0 or first == 1, f"{name} begins with batch size {first}; it must begin with 1")
        require(first > before, f"{name}: batch size {first} comes after {before}; ranges must rise and not overlap")
        before = last
