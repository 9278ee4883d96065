"""The constraints on a generated text. In vLLM v0.33.0: `vllm/sampling_params.py`
(`StructuredOutputsParams`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from minivllm.config.checks import Rule, check_fields, encodable, require

CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object")
SCHEMA = Rule(lambda value: isinstance(value, str | dict), "a JSON schema, as a dictionary or a string")
TEXT = Rule(lambda value: isinstance(value, str), "a string")
# Clients send these fields with their defaults.
NOT_SERVED = Rule(lambda value: isinstance(value, bool | str) and not value, "left out: it is not served here")


def _are_choices(value: Any) -> bool:
    if isinstance(value, str) or not isinstance(value, Sequence) or not len(value):
        return False
    return all(isinstance(text, str) for text in value)


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

    json: Annotated[str | dict[str, Any], SCHEMA] | None = None
    regex: Annotated[str, TEXT] | None = None
    choice: Annotated[Sequence[str], Rule(_are_choices, "a list of strings, not empty")] | None = None
    grammar: Annotated[str, TEXT] | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: Annotated[bool, NOT_SERVED] | None = False
    whitespace_pattern: Annotated[str, TEXT] | None = None
    structural_tag: Annotated[str, NOT_SERVED] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("regex", "grammar", "whitespace_pattern"):
            encodable(getattr(self, name) or "", name)
        for text in self.choice or ():
            encodable(text, "a choice")
        constraints = [name for name in CONSTRAINTS if getattr(self, name) not in (None, False)]
        require(bool(constraints), f"structured_outputs has no constraint; give one of {', '.join(CONSTRAINTS)}")
        require(len(constraints) == 1, f"structured_outputs has {' and '.join(constraints)}; give only one of them")
