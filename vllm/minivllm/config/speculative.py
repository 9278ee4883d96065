"""What a person sets for speculative decoding. No torch.

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
    """Who drafts, and how much.

    - `method`: "ngram" looks the last tokens up in the request's own text, and drafts what followed them there.
    - `num_speculative_tokens`: at most so many drafts a request and step.
    - `prompt_lookup_max`, `prompt_lookup_min`: how many of the last tokens must be found again; the most first.
      One that is not given is the other; neither: 5.
    """

    num_speculative_tokens: int
    method: str = "ngram"
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None

    @classmethod
    def of(cls, settings: "Mapping[str, Any] | SpeculativeConfig | None") -> "SpeculativeConfig | None":
        """From the dictionary of a call, as vLLM takes it; None stays None.

        Raises:
            MinivllmError: a key that there is not, a number that cannot be, or no `num_speculative_tokens`.
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
        """Slots that the drafter itself writes beyond a request's tokens: none where it has no cache of its own."""
        return {"ngram": 0}[self.method]

    @property
    def lookup_max(self) -> int:
        """The most tokens that are looked up."""
        return self.prompt_lookup_max or self.prompt_lookup_min or DEFAULT_LOOKUP

    @property
    def lookup_min(self) -> int:
        """The fewest."""
        return self.prompt_lookup_min or self.prompt_lookup_max or DEFAULT_LOOKUP
