"""Checks of settings, which raise a `MinivllmError` for an invalid one."""

import difflib
import functools
import sys
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from minivllm.errors import MinivllmError

Settings = TypeVar("Settings", bound=type)
Kind = TypeVar("Kind")
NEAR = 0.75
"""The least similarity, from 0 to 1 (difflib's ratio), at which an unknown name is taken for a
typing error.
"""


def require(holds: bool, message: str, parameter: str | None = None) -> None:
    """Raise a `MinivllmError` with this message, about this parameter, unless `holds` is true."""
    if not holds:
        raise MinivllmError(message, parameter)


def refuse_unknown(what: str, given: Iterable[str], known: Iterable[str], listed: str = "") -> None:
    """Raise for the first name that is not known, with a message that starts with `what`, such as
    "SamplingParams has no argument".

    The message ends with the nearest known name or, if none is near, with `listed`, by default a
    list of the known names.
    """
    names = list(known)
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(str(name), names, n=1, cutoff=NEAR)
            hint = f"did you mean {near[0]!r}?" if near else listed or f"known: {', '.join(names)}"
            raise MinivllmError(f"{what} {name!r}; {hint}")


def checked_arguments(settings: Settings) -> Settings:
    """Decorate a dataclass, so that its constructor refuses unknown arguments with a
    `MinivllmError`.
    """
    make = settings.__init__
    known = [field.name for field in fields(settings)]
    listed = f"help(minivllm.{settings.__name__}) lists the arguments"

    @functools.wraps(make)
    def __init__(self: Any, *args: Any, **given: Any) -> None:
        refuse_unknown(f"{settings.__name__} has no argument", given, known, listed)
        make(self, *args, **given)

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


def require_flags(settings: object, *names: str) -> None:
    """Raise unless each of these attributes is True or False: a string such as "no" would count
    as true.
    """
    for name in names:
        value = getattr(settings, name)
        require(isinstance(value, bool), f"{name} is {value!r}; it must be True or False")


def require_choice(name: str, value: object, choices: Iterable[str | None]) -> None:
    """Raise unless the value is one of these choices, where None stands for the default."""
    choices = tuple(choices)  # a dictionary would fail for a value that has no hash
    require(value in choices, f"unknown {name} {value!r}; use one of {', '.join(filter(None, choices))}")


def require_counts(settings: object, least: int, *names: str, may_be_none: bool = False) -> None:
    """Raise unless each of these attributes is an integer of at least `least`, or None where
    that is allowed.
    """
    wanted = f"a whole number of at least {least}" if least else "a whole number, and not negative"
    for name in names:
        value = getattr(settings, name)
        require((may_be_none and value is None) or is_count(value, least), f"{name} is {value!r}; it must be {wanted}")


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
