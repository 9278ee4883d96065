"""Checks of settings, which raise a `MinivllmError` for an invalid one."""

import sys
from typing import Any

from minivllm.errors import MinivllmError


def require(holds: bool, message: str, parameter: str | None = None) -> None:
    """Raise a `MinivllmError` with this message, about this parameter, unless `holds`."""
    if not holds:
        raise MinivllmError(message, parameter)


def require_flags(settings: object, *names: str) -> None:
    """Raise unless each of these attributes is True or False: a string such as "no" would count as true."""
    for name in names:
        value = getattr(settings, name)
        require(isinstance(value, bool), f"{name} is {value!r}; it must be True or False")


def is_number(value: object) -> bool:
    """Whether `value` is a finite number; True and False are not numbers."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def is_count(value: object, least: int) -> bool:
    """Whether `value` is an integer of at least `least`; True and False are not integers."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def positive_count(name: str, value: int) -> int:
    """Return the value if it is an integer of at least 1; otherwise raise a `MinivllmError` that names it."""
    require(is_count(value, 1), f"{name} must be a positive whole number, not {value!r}")
    return value


def positive_seconds(name: str, value: Any) -> float:
    """Return the value if it is a finite number above 0; otherwise raise a `MinivllmError` that names it."""
    require(is_number(value) and value > 0, f"{name} is {value!r}; it must be a number of seconds above 0")
    return float(value)


def encodable(text: str, name: str) -> str:
    """Return the string if it can be encoded as UTF-8; otherwise raise a `MinivllmError` that names it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        broken = f"half a character ({text[error.start]!r} at {error.start})"
        raise MinivllmError(f"{name} is not a text: it has {broken}, as a wrongly decoded file has") from None
    return text
