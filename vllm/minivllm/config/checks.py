"""Checks of settings, which raise a `MinivllmError` for an invalid one."""

import difflib
import functools
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields
from types import NoneType
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_type_hints

from minivllm.errors import MinivllmError

Settings = TypeVar("Settings", bound=type)
Kind = TypeVar("Kind")
NEAR = 0.75
"""The least similarity, from 0 to 1 (difflib's ratio), at which an unknown name is taken for a
typing error.
"""


def require(holds: object, message: str, parameter: str | None = None) -> None:
    """Raise a `MinivllmError` with this message, about this parameter, unless `holds` is true."""
    if not holds:
        raise MinivllmError(message, parameter)


def refuse_unknown(what: str, names: Iterable[str], known: Iterable[str], listed: str = "") -> None:
    """Raise for the first name that is not known, with a message that starts with `what`, such as
    "SamplingParams has no argument".

    The message ends with the nearest known name or, if none is near, with `listed`, by default a
    list of the known names.
    """
    known = list(known)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1, cutoff=NEAR)
            hint = f"did you mean {near[0]!r}?" if near else listed or f"known: {', '.join(known)}"
            raise MinivllmError(f"{what} {name!r}; {hint}")


def checked_arguments(settings: Settings) -> Settings:
    """Decorate a dataclass, so that its constructor refuses unknown arguments with a
    `MinivllmError`.
    """
    make = settings.__init__
    known = [field.name for field in fields(settings)]
    listed = f"help(minivllm.{settings.__name__}) lists the arguments"

    @functools.wraps(make)
    def __init__(self: Any, *args: Any, **arguments: Any) -> None:
        refuse_unknown(f"{settings.__name__} has no argument", arguments, known, listed)
        make(self, *args, **arguments)

    settings.__init__ = __init__
    return settings


def settings_of(kind: type[Kind], name: str, value: Any, example: str) -> Kind | None:
    """Create settings from a dictionary, the form that vLLM takes; settings and None stay what they
    are.

    Raises:
        MinivllmError: no dictionary, an unknown key, an invalid value, or a required key is missing.
    """
    if value is None or isinstance(value, kind):
        return value
    require(isinstance(value, Mapping), f"{name} is {value!r}; it must be a dictionary such as {example}")
    known = fields(kind)  # type: ignore[arg-type]
    refuse_unknown(f"{name} has no key", value, [field.name for field in known])
    for field in known:
        required = field.default is MISSING and field.default_factory is MISSING
        require(not required or field.name in value, f"{name} lacks {field.name}, as in {example}")
    return kind(**value)


class Rule(NamedTuple):
    """A condition on a field's value, which stands in the field's annotation:
    `top_p: Annotated[float, Rule(is_fraction, "from 0 to 1")]`. `meaning` describes valid values.

    `reported`: a server tells its client the parameter's name.
    """

    fits: Callable[[Any], bool]
    meaning: str
    reported: bool = False


def at_least(least: int) -> Rule:
    """Return the rule for an integer of at least `least`."""
    meaning = f"a whole number of at least {least}" if least else "a whole number, and not negative"
    return Rule(lambda value: is_count(value, least), meaning)


def one_of(*choices: str) -> Rule:
    """Return the rule for one of these strings."""
    return Rule(lambda value: isinstance(value, str) and value in choices, f"one of {', '.join(choices)}")


Count = Annotated[int, at_least(1)]
CountOrZero = Annotated[int, at_least(0)]
# A string such as "no" would count as true.
IS_FLAG = Rule(lambda value: isinstance(value, bool), "True or False")


def check_fields(settings: object) -> None:
    """Raise for the first field of a dataclass whose value breaks a rule in its annotation. A
    `bool` must be True or False; None is valid where the annotation says so.
    """
    for name, may_be_none, rule in _rules_of(type(settings)):
        value = getattr(settings, name)
        if not (may_be_none and value is None):
            check(name, value, rule)


def check(name: str, value: object, rule: Rule) -> None:
    """Raise if the value of this name breaks the rule."""
    if not rule.fits(value):
        parameter = name if rule.reported else None
        raise MinivllmError(f"{name} is {value!r}; it must be {rule.meaning}", parameter)


@functools.cache
def _rules_of(settings: type) -> list[tuple[str, bool, Rule]]:
    """Return the rules of a class, each with its field's name and whether that may be None."""
    rules: list[tuple[str, bool, Rule]] = []
    for name, hint in get_type_hints(settings, include_extras=True).items():
        may_be_none = NoneType in get_args(hint)
        for option in get_args(hint) if may_be_none else (hint,):
            own = (IS_FLAG,) if option is bool else getattr(option, "__metadata__", ())
            rules += [(name, may_be_none, rule) for rule in own]
    return rules


def is_number(value: object) -> bool:
    """Return whether `value` is a finite number; True and False are not numbers."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def is_count(value: object, least: int) -> bool:
    """Return whether `value` is an integer of at least `least`; True and False are not integers."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def positive_count(name: str, value: int) -> int:
    """Return the value if it is an integer of at least 1; otherwise raise a `MinivllmError` that
    names it.
    """
    require(is_count(value, 1), f"{name} must be a positive whole number, not {value!r}")
    return value


def positive_seconds(name: str, value: Any) -> float:
    """Return the value if it is a finite number above 0; otherwise raise a `MinivllmError` that
    names it.
    """
    require(is_number(value) and value > 0, f"{name} is {value!r}; it must be a number of seconds above 0")
    return float(value)


def encodable(text: str, name: str) -> str:
    """Return the string if it can be encoded as UTF-8; otherwise raise a `MinivllmError` that
    names it.
    """
    try:
        # A Python string may hold half of a surrogate pair, which no file and no socket can.
        text.encode()
    except UnicodeEncodeError as error:
        broken = f"half a character ({text[error.start]!r} at {error.start})"
        raise MinivllmError(f"{name} is not valid text: it has {broken}, as in a wrongly decoded file") from None
    return text
