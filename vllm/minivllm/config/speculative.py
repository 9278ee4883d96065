"""Settings of speculative decoding. No torch.

In vLLM v0.33.0: `vllm/config/speculative.py` (`SpeculativeConfig`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from minivllm.config.checks import is_count, require

METHODS = ("ngram",)
DEFAULT_LOOKUP = 5


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """How to draft, and how many tokens.

    - `method`: "ngram" finds an earlier occurrence of the last tokens in the same request, and drafts what followed it.
    - `num_speculative_tokens`: the most draft tokens per request and step.
    - `prompt_lookup_max`, `prompt_lookup_min`: longest and shortest n-gram to look up, the longest first. If only one
      is given, the other equals it; if neither is, both are 5.
    """

    num_speculative_tokens: int
    method: str = "ngram"
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None

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
        require("num_speculative_tokens" in settings, "speculative_config lacks num_speculative_tokens, such as 4")
        return cls(**settings)

    def __post_init__(self) -> None:
        require(self.method in METHODS, f"unknown speculative method {self.method!r}; known are {', '.join(METHODS)}")
        for name in ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"):
            value = getattr(self, name)
            if value is None and name != "num_speculative_tokens":
                continue
            require(is_count(value, 1), f"{name} is {value!r}; it must be a whole number from 1 on")
        require(
            self.lookup_min <= self.lookup_max,
            f"prompt_lookup_min ({self.lookup_min}) exceeds prompt_lookup_max ({self.lookup_max})",
        )

    @property
    def num_lookahead_tokens(self) -> int:
        """Slots that the drafter itself writes beyond a request's tokens: 0 for a drafter without a KV cache."""
        return {"ngram": 0}[self.method]

    @property
    def lookup_max(self) -> int:
        """Length of the longest n-gram to look up."""
        return self.prompt_lookup_max or self.prompt_lookup_min or DEFAULT_LOOKUP

    @property
    def lookup_min(self) -> int:
        """Length of the shortest n-gram to look up."""
        return self.prompt_lookup_min or self.prompt_lookup_max or DEFAULT_LOOKUP
