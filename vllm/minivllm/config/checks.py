"""What settings are checked for, and how a wrong one is refused."""

import sys

from minivllm.errors import MinivllmError


def require(holds: bool, message: str) -> None:
    """Raises a `MinivllmError` with this message unless it holds."""
    if not holds:
        raise MinivllmError(message)


def require_flags(settings: object, *names: str) -> None:
    """Raises unless each of these attributes is True or False: a text such as "no" would count as yes."""
    for name in names:
        value = getattr(settings, name)
        require(isinstance(value, bool), f"{name} is {value!r}; it must be True or False")


def is_number(value: object) -> bool:
    """Whether it is a finite number; True and False are not numbers."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def is_count(value: object, least: int) -> bool:
    """Whether it is a whole number of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def positive_count(name: str, value: int) -> int:
    """The value, if it is a whole number of at least 1; raises a `MinivllmError` that names it otherwise."""
    require(is_count(value, 1), f"{name} must be a positive whole number, not {value!r}")
    return value


def encodable(text: str, name: str) -> str:
    """The text, if it can be encoded in UTF-8; raises a `MinivllmError` that names it otherwise."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        broken = f"half a character ({text[error.start]!r} at {error.start})"
        raise MinivllmError(f"{name} is not a text: it has {broken}, as a wrongly decoded file has") from None
    return text
