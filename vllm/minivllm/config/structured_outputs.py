"""The constraints on a generated text. In vLLM v0.33.0: `vllm/sampling_params.py`
(`StructuredOutputsParams`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minivllm.config.checks import encodable, require, require_flags
from minivllm.errors import MinivllmError

CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(kw_only=True, slots=True)
class StructuredOutputsParams:
    """Exactly one constraint; the generated text conforms to it as a whole, unless `max_tokens`
    cuts it off.

    - `json`: a JSON schema, as a dictionary or as text. `json_object`: any JSON object.
    - `regex`: a regular expression without look-around. `choice`: one of these strings.
    - `grammar`: a grammar in Lark's syntax, or in GBNF with the rule `root`.
    - `whitespace_pattern`: a regular expression for the space between the tokens of JSON; None: at
      most one space. (vLLM allows any amount by default, and a small greedy model may not find an
      end of it.) `disable_any_whitespace`: none at all.

    `disable_additional_properties` and `structural_tag` are not served.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None

    def __post_init__(self) -> None:
        for name in ("structural_tag", "disable_additional_properties"):
            value = getattr(self, name)
            require(
                # Clients send these fields with their defaults.
                value is None or value is False or (isinstance(value, str) and not value),
                f"structured_outputs: {name} is not served here",
            )
        require_flags(self, "disable_any_whitespace")
        self._check_types()
        constraints = [name for name in CONSTRAINTS if getattr(self, name) not in (None, False)]
        require(bool(constraints), f"structured_outputs has no constraint; give one of {', '.join(CONSTRAINTS)}")
        require(len(constraints) == 1, f"structured_outputs has {' and '.join(constraints)}; give only one of them")

    def _check_types(self) -> None:
        require(
            self.json is None or isinstance(self.json, str | dict),
            f"json is {type(self.json).__name__}; it must be a JSON schema, as a dictionary or a string",
        )
        require(
            self.json_object is None or isinstance(self.json_object, bool),
            f"json_object is {self.json_object!r}; it must be True or None",
        )
        for name in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            require(value is None or isinstance(value, str), f"{name} is {type(value).__name__}; it must be a string")
            encodable(value or "", name)
        self._check_choice()

    def _check_choice(self) -> None:
        if self.choice is None:
            return
        if isinstance(self.choice, str) or not isinstance(self.choice, Sequence):
            raise MinivllmError(f"choice is {type(self.choice).__name__}; it must be a list of strings")
        require(len(self.choice) > 0, "choice is an empty list; give at least one string")
        for text in self.choice:
            require(isinstance(text, str), f"choice has {text!r}; it must be a list of strings")
            encodable(text, "a choice")
