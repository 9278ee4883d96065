"""Command-line flags from a dataclass of settings.

In vLLM v0.33.0: `vllm/utils/argparse_utils.py` (`FlexibleArgumentParser`), `get_kwargs` in
`vllm/engine/arg_utils.py`.
"""

import argparse
import json
import sys
import types
from collections.abc import Collection
from dataclasses import MISSING, Field, fields
from typing import Any, Union, get_args, get_origin, get_type_hints

SHORT_FLAGS = {"tensor_parallel_size": "-tp", "pipeline_parallel_size": "-pp", "data_parallel_size": "-dp"}


class FlexibleArgumentParser(argparse.ArgumentParser):
    """The parser of vLLM's examples. Flags may have underscores or dashes, which `add_flags` sees to for its own."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """See `argparse.ArgumentParser`; the underscores of a flag are taken as dashes where it is not known."""
        given = [self._known_spelling(arg) for arg in (sys.argv[1:] if args is None else args)]
        return super().parse_known_args(given, namespace)

    def _known_spelling(self, arg: str) -> str:
        flag, equals, value = arg.partition("=")
        if not flag.startswith("--") or flag in self._option_string_actions:
            return arg
        return flag.replace("_", "-") + equals + value


def add_flags(group: Any, settings: type, left_out: Collection[str] = (), with_defaults: bool = False) -> None:
    """Add a flag for each field of a dataclass to an argparse group.

    `with_defaults`: one that is not given has the field's default in the namespace; otherwise it is not there.
    """
    hints = get_type_hints(settings)
    for field in fields(settings):
        if field.name not in left_out:
            default = _default(field) if with_defaults else argparse.SUPPRESS
            _add_flag(group, field.name, hints[field.name], default)


def add_unlisted_flags(parser: argparse.ArgumentParser, names: Collection[str]) -> None:
    """Add flags that the help does not show; their values are JSON or text, and True if there is none."""
    for name in names:
        flag = f"--{name.replace('_', '-')}"
        if flag not in parser._option_string_actions:
            hidden = parser.add_argument(flag, nargs="?", const=True, type=value_of, help=argparse.SUPPRESS)
            hidden.dest, hidden.default = name, argparse.SUPPRESS


def value_of(text: str) -> Any:
    """Return the value of a flag whose type is not known: JSON, or else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _default(field: Field[Any]) -> Any:
    return None if field.default is MISSING else field.default


def _add_flag(group: Any, name: str, hint: Any, default: Any) -> None:
    flag = f"--{name.replace('_', '-')}"
    aliases = [flag, f"--{name}"] if "_" in name else [flag]
    aliases += [SHORT_FLAGS[name]] if name in SHORT_FLAGS else []
    options = {"dest": name, "default": default, "metavar": name.upper()}
    kinds = set(get_args(hint)) - {type(None)} if get_origin(hint) in (types.UnionType, Union) else {hint}
    if kinds == {bool}:
        del options["metavar"]
        group.add_argument(*aliases, action=argparse.BooleanOptionalAction, **options)
    elif name.startswith("allowed_"):
        group.add_argument(*aliases, type=_json, **options)
    elif kinds == {list[str]}:
        group.add_argument(*aliases, nargs="+", **options)
    elif name.endswith("_config"):
        group.add_argument(*aliases, type=_json, **options)
    else:
        kind = int if int in kinds else float if float in kinds else str
        group.add_argument(*aliases, type=kind, **options)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON") from None
