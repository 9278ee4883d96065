"""Arguments that vLLM has and this engine lacks: accepted if they make no difference here, else rejected by name.

A script written for vLLM should either run, or fail with one line that says why.
"""

import difflib
import functools
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import fields
from typing import Any, NamedTuple, TypeVar

from minivllm.errors import MinivllmError, NotServedError
from minivllm.logger import init_logger

logger = init_logger(__name__)
Settings = TypeVar("Settings", bound=type)
ANY_VALUE = None
"""In `without_effect`, marks an argument that makes no difference whatever its value."""


class NotServed(NamedTuple):
    """What an argument of vLLM is for, and vLLM's default, which asks for nothing."""

    what: str
    default: Any = None

    def asks(self, value: Any) -> bool:
        """Whether this value asks for anything: None, False, what is empty and the default do not."""
        if value is None or value is False or (isinstance(value, Sequence | Set | Mapping) and not value):
            return False
        return (value == self.default) is not True  # an array compares item by item


def not_served(groups: Mapping[str, Mapping[str, Any]]) -> dict[str, NotServed]:
    """Return `NotServed` by argument, from each argument's default by what it is for."""
    return {name: NotServed(what, default) for what, group in groups.items() for name, default in group.items()}


def refuse_unless_default(method: str, **arguments: Any) -> None:
    """Refuse arguments of a method that ask for something: values other than None, False and what is empty.

    Raises:
        NotServedError: one of them does.
    """
    for name, value in arguments.items():
        if NotServed(name).asks(value):
            raise NotServedError(
                f"{name} is {str(value)[:60]!r}; {method} has it in vLLM, and minivllm does not serve it"
            )


def takes_vllms_arguments(
    whose: str, without_effect: Mapping[str, Collection[Any] | None], not_served: Mapping[str, NotServed]
) -> Callable[[Settings], Settings]:
    """Decorate a dataclass of settings so that its constructor takes vLLM's additional arguments.

    They can also be read, as off, and assigned later, with the same checks.

    Args:
        whose: the name of the settings in messages, such as "the engine".
        without_effect: arguments that make no difference here, each with the values for which that is true. Those
            given are logged in one line.
        not_served: arguments that are rejected if their value asks for something.
    """

    def decorate(settings_class: Settings) -> Settings:
        make, assign = settings_class.__init__, settings_class.__setattr__
        known = {field.name for field in fields(settings_class)}
        refuse = functools.partial(_refuse_unless_without_effect, whose, known, without_effect, not_served)

        @functools.wraps(make)
        def __init__(self: Any, *args: Any, **settings: Any) -> None:
            further = {name: settings.pop(name) for name in settings.keys() - known}
            for name, value in further.items():
                refuse(name, value)
            if further:
                logger.info("Arguments of %s that change nothing here: %s", whose, ", ".join(sorted(further)))
            make(self, *args, **settings)

        def __setattr__(self: Any, name: str, value: Any) -> None:
            if name in known or (name not in without_effect and name not in not_served):
                assign(self, name, value)
            else:
                refuse(name, value)

        def __getattr__(self: Any, name: str) -> Any:
            if name in not_served or name in without_effect:
                return not_served[name].default if name in not_served else None
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

        settings_class.__init__ = __init__
        settings_class.__setattr__ = __setattr__  # type: ignore[method-assign]
        settings_class.__getattr__ = __getattr__
        return settings_class

    return decorate


def _refuse_unless_without_effect(
    whose: str,
    known: Collection[str],
    without_effect: Mapping[str, Collection[Any] | None],
    not_served: Mapping[str, NotServed],
    name: str,
    value: Any,
) -> None:
    """Raises an error for an argument that is none of `known`, unless its value changes nothing here."""
    if name in without_effect:
        harmless = without_effect[name]
        if harmless is None or value is None or value in harmless:
            return
        values = " or ".join(map(repr, harmless))
        raise MinivllmError(f"{name} is {value!r}; {whose} takes no value of it but {values}")
    if name in not_served:
        if not not_served[name].asks(value):
            return
        raise NotServedError(f"{name} is {repr(value)[:60]}; minivllm does not serve {not_served[name].what}")
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else f"; there are: {', '.join(sorted(known))}"
    raise MinivllmError(f"{whose} has no argument {name!r}{hint}")
