"""Arguments that vLLM has and this engine lacks: accepted if they make no difference here, else rejected by name.

A script written for vLLM should either run, or fail with one line that says why.
"""

import difflib
import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from minivllm.errors import MinivllmError
from minivllm.logger import init_logger

logger = init_logger(__name__)
Settings = TypeVar("Settings", bound=type)
ANY_VALUE = None
"""In `without_effect`, marks an argument that makes no difference whatever its value."""


def takes_vllms_arguments(
    whose: str, without_effect: Mapping[str, Collection[Any] | None], not_served: Collection[str]
) -> Callable[[Settings], Settings]:
    """Decorate a dataclass of settings so that its constructor takes vLLM's additional arguments.

    Args:
        whose: the name of the settings in messages, such as "the engine".
        without_effect: arguments that make no difference here, each with the values for which that is true. Those
            given are logged in one line.
        not_served: arguments that are rejected unless they are None or False, which means off.
    """

    def decorate(settings_class: Settings) -> Settings:
        make = settings_class.__init__
        known = {field.name for field in fields(settings_class)}

        @functools.wraps(make)
        def __init__(self: Any, *args: Any, **settings: Any) -> None:
            further = {name: settings.pop(name) for name in settings.keys() - known}
            for name, value in further.items():
                _refuse_unless_without_effect(name, value)
            if further:
                logger.info("Arguments of %s that change nothing here: %s", whose, ", ".join(sorted(further)))
            make(self, *args, **settings)

        def _refuse_unless_without_effect(name: str, value: Any) -> None:
            if name in without_effect:
                harmless = without_effect[name]
                if harmless is None or value is None or value in harmless:
                    return
                values = " or ".join(map(repr, harmless))
                raise MinivllmError(f"{name} is {value!r}; {whose} takes no value of it but {values}")
            if name in not_served:
                if value is None or value is False:
                    return
                raise MinivllmError(f"{whose} of vLLM has the argument {name!r}; minivllm does not serve it")
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; there are: {', '.join(sorted(known))}"
            raise MinivllmError(f"{whose} has no argument {name!r}{hint}")

        settings_class.__init__ = __init__
        return settings_class

    return decorate
