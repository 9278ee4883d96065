"""Command-line flags from a dataclass of settings; the help texts are taken from its docstring.

In vLLM v0.33.0: `vllm/utils/argparse_utils.py` (`FlexibleArgumentParser`), `get_kwargs` in
`vllm/engine/arg_utils.py`.
"""

import argparse
import difflib
import inspect
import json
import re
import sys
import types
from collections.abc import Collection, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, NoReturn, Union, get_args, get_origin, get_type_hints

from minivllm.config.checks import NEAR

SHORT_FLAGS = {
    "tensor_parallel_size": "-tp", "pipeline_parallel_size": "-pp", "data_parallel_size": "-dp", "quick": "-q",
}  # fmt: skip
DEFINED = re.compile(r"(?:^|(?<=[.)] ))((?:`\w+`(?:, | and )?)+): ")
"""Where a docstring's list begins to speak of fields: "`a`, `b`: words. `c`: words."."""


class HelpFormatter(argparse.HelpFormatter):
    """A help formatter that shows only the defaults that are informative."""

    def _get_help_string(self, action: argparse.Action) -> str:
        words = action.help or ""
        says_nothing = action.default in (None, argparse.SUPPRESS, False, [], {})
        return words if says_nothing or not action.option_strings else f"{words} (default: %(default)s)".strip()


class FlexibleArgumentParser(argparse.ArgumentParser):
    """An argument parser like vLLM's. Flags may have underscores or dashes."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments like argparse, but read the underscores of an unknown flag as dashes."""
        arguments = [self._known_spelling(arg) for arg in (sys.argv[1:] if args is None else args)]
        return super().parse_known_args(arguments, namespace)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments like argparse; the error for an unknown flag names the nearest known one."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.refuse(unknown[0])
        return parsed

    def refuse(self, flag: str) -> NoReturn:
        """Exit with the error that there is no such flag, and a hint: the nearest flag, or where
        all are listed.
        """
        near = difflib.get_close_matches(flag.partition("=")[0], self._option_string_actions, n=1, cutoff=NEAR)
        hint = f"did you mean {near[0]}?" if near else f"{self.prog} --help lists them all"
        self.error(f"unrecognized argument {flag}; {hint}")

    def _known_spelling(self, arg: str) -> str:
        flag, equals, value = arg.partition("=")
        # A value, or a flag that is known as it is written.
        if not flag.startswith("--") or flag in self._option_string_actions:
            return arg
        return flag.replace("_", "-") + equals + value


def words_of(settings: type) -> dict[str, str]:
    """Return the description of each field from the list in a dataclass's docstring, as plain text."""
    descriptions: dict[str, str] = {}
    # Each bullet of the docstring; what stands before the first one is prose.
    for item in re.split(r"^- ", inspect.getdoc(settings) or "", flags=re.MULTILINE)[1:]:
        text = " ".join(item.split("\n\n")[0].split())
        # One bullet may define several fields, one after another.
        starts = list(DEFINED.finditer(text))
        for start, after in zip(starts, [*starts[1:], None], strict=True):
            words = text[start.end() : after.start() if after else None].strip().rstrip(".").replace("`", "")
            descriptions |= dict.fromkeys(re.findall(r"\w+", start.group(1).replace(" and ", " ")), words)
    return descriptions


def add_flags(
    parser: argparse.ArgumentParser,
    settings: type,
    title: str,
    left_out: Collection[str] = (),
    further_words: Mapping[str, str] | None = None,
) -> None:
    """Add a flag for each field of a dataclass, in a group with this title. A required field whose
    flag is not given is not in the namespace.

    Args:
        parser: gets the flags.
        settings: a dataclass; its docstring has the flags' help texts.
        title: the group's title.
        left_out: fields that are not flags.
        further_words: help texts of fields that the docstring does not mention.
    """
    hints = get_type_hints(settings)
    words = {**(further_words or {}), **words_of(settings)}
    group = parser.add_argument_group(title)
    for field in fields(settings):
        if field.name not in left_out:
            _add_flag(group, field, hints[field.name], words.get(field.name, "").replace("%", "%%"))


def json_of(text: str) -> Any:
    """Return the parsed value of a JSON flag; argparse reports an error if it is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON") from None


def _default(field: Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return argparse.SUPPRESS if field.default is MISSING else field.default


def _add_flag(group: Any, field: Field[Any], hint: Any, words: str) -> None:
    name = field.name
    flags = [f"--{name.replace('_', '-')}", *([SHORT_FLAGS[name]] if name in SHORT_FLAGS else [])]
    options = {"dest": name, "default": _default(field), "metavar": name.upper(), "help": words}
    # `int | None` is a flag for an int.
    kinds = set(get_args(hint)) - {type(None)} if get_origin(hint) in (types.UnionType, Union) else {hint}
    if kinds == {bool}:
        del options["metavar"]
        group.add_argument(*flags, action=argparse.BooleanOptionalAction, **options)
    # Lists and dictionaries are JSON on the command line, as in vLLM.
    elif name.startswith("allowed_") or name.endswith("_config"):
        group.add_argument(*flags, type=json_of, **options)
    elif kinds == {list[str]}:
        group.add_argument(*flags, nargs="+", action="extend", **options)  # given twice, both count
    else:
        kind = int if int in kinds else float if float in kinds else str
        group.add_argument(*flags, type=kind, **options)
