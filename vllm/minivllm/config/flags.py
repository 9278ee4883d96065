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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any, NoReturn, Union, get_args, get_origin, get_type_hints

from minivllm.config.checks import NEAR

SHORT_FLAGS = {"tensor_parallel_size": "-tp", "pipeline_parallel_size": "-pp", "data_parallel_size": "-dp"}
DEFINED = re.compile(r"(?:^|(?<=[.)] ))((?:`\w+`(?:, | and )?)+): ")
"""Where a docstring's list begins to speak of fields: "`a`, `b`: words. `c`: words."."""


class HelpFormatter(argparse.HelpFormatter):
    """A help formatter that shows only the defaults that are informative."""

    def _get_help_string(self, action: argparse.Action) -> str:
        words = action.help or ""
        says_nothing = action.default in (None, argparse.SUPPRESS, False, [], {})
        return words if says_nothing or not action.option_strings else f"{words} (default: %(default)s)".strip()


class FlexibleArgumentParser(argparse.ArgumentParser):
    """An argument parser like vLLM's. Flags may have underscores or dashes.

    The value of a JSON flag may be given in parts: `--speculative-config.method ngram`.
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments like argparse, but read the underscores of an unknown flag as dashes."""
        arguments = [self._known_spelling(arg) for arg in (sys.argv[1:] if args is None else args)]
        return super().parse_known_args(self._joined(arguments), namespace)

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

    def _joined(self, args: Sequence[str]) -> list[str]:
        """Return the arguments with all `--flag.part` of a flag merged into one JSON value, on top
        of the flag's own.
        """
        kept: list[str] = []
        parts: dict[str, dict[str, Any]] = {}
        pending = list(args)
        while pending:
            arg = pending.pop(0)
            name, equals, value = arg.partition("=")
            flag, dot, path = name.partition(".")
            if not dot or flag not in self._option_string_actions:
                kept.append(arg)
                continue
            # The value may follow as the next argument; a part without one is a switch.
            if not equals and pending and not pending[0].startswith("--"):
                equals, value = "=", pending.pop(0)
            _set(parts.setdefault(flag, {}), path.replace("-", "_").split("."), value_of(value) if equals else True)
        for flag, values in parts.items():
            # Parts go before the entries of the flag's own JSON.
            kept += [f"{flag}={json.dumps(self._taken_out(kept, flag) | values)}"]
        return kept

    def _taken_out(self, args: list[str], flag: str) -> dict[str, Any]:
        """Remove the flag and its JSON value from the arguments, and return the value; {} if the
        flag is absent.
        """
        for index, arg in enumerate(args):
            name, equals, value = arg.partition("=")
            if name == flag and (equals or index + 1 < len(args)):
                value = value if equals else args[index + 1]
                del args[index : index + (1 if equals else 2)]
                found = value_of(value)
                return found if isinstance(found, dict) else self.error(f"{flag} is {value!r}; it must be JSON")
        return {}


def words_of(settings: type) -> dict[str, str]:
    """Return the description of each field from the list in a dataclass's docstring, as plain text."""
    found: dict[str, str] = {}
    # Each bullet of the docstring; what stands before the first one is prose.
    for item in re.split(r"^- ", inspect.getdoc(settings) or "", flags=re.MULTILINE)[1:]:
        text = " ".join(item.split("\n\n")[0].split())
        # One bullet may define several fields, one after another.
        starts = list(DEFINED.finditer(text))
        for start, after in zip(starts, [*starts[1:], None], strict=True):
            words = text[start.end() : after.start() if after else None].strip().rstrip(".").replace("`", "")
            found |= dict.fromkeys(re.findall(r"\w+", start.group(1).replace(" and ", " ")), words)
    return found


def add_flags(
    parser: argparse.ArgumentParser,
    settings: type,
    groups: Mapping[str, Collection[str]],
    left_out: Collection[str] = (),
    with_defaults: bool = False,
    further_words: Mapping[str, str] | None = None,
) -> None:
    """Add a flag for each field of a dataclass, in groups with these titles.

    Args:
        parser: gets the flags.
        settings: a dataclass; its docstring has the flags' help texts.
        groups: titles, and the fields under each.
        left_out: fields that are not flags.
        with_defaults: a flag that is not given has the field's default in the namespace; otherwise
            it is not there.
        further_words: help texts of fields that the docstring does not mention.
    """
    hints, by_name = get_type_hints(settings), {field.name: field for field in fields(settings)}
    words = {**(further_words or {}), **words_of(settings)}
    for title, names in groups.items():
        group = parser.add_argument_group(title)
        for name in names:
            if name not in left_out:
                field = by_name[name]
                # Without a default, a flag that is not given is not in the namespace, and the
                # dataclass decides.
                default = _default(field) if with_defaults else argparse.SUPPRESS
                shown = "" if with_defaults else _shown_default(field)
                _add_flag(group, name, hints[name], default, words.get(name, "").replace("%", "%%") + shown)


def value_of(text: str) -> Any:
    """Return the value of a flag of unknown type: parsed as JSON, or else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def json_of(text: str) -> Any:
    """Return the parsed value of a JSON flag; argparse reports an error if it is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON") from None


def _set(parts: dict[str, Any], path: Sequence[str], value: Any) -> None:
    *above, last = path
    for name in above:
        below = parts.setdefault(name, {})
        parts = below if isinstance(below, dict) else parts
    parts[last] = value


def _default(field: Field[Any]) -> Any:
    return None if field.default is MISSING else field.default


def _shown_default(field: Field[Any]) -> str:
    value = field.default_factory() if field.default_factory is not MISSING else field.default
    return "" if value is None or value is MISSING or value is False or value == [] else f" (default: {value})"


def _add_flag(group: Any, name: str, hint: Any, default: Any, words: str) -> None:
    flags = [f"--{name.replace('_', '-')}", *([SHORT_FLAGS[name]] if name in SHORT_FLAGS else [])]
    options = {"dest": name, "default": default, "metavar": name.upper(), "help": words}
    # `int | None` is a flag for an int.
    kinds = set(get_args(hint)) - {type(None)} if get_origin(hint) in (types.UnionType, Union) else {hint}
    if kinds == {bool}:
        del options["metavar"]
        group.add_argument(*flags, action=argparse.BooleanOptionalAction, **options)
    elif kinds == {bool, str}:
        group.add_argument(*flags, nargs="?", const=True, **options)
    # Lists and dictionaries are JSON on the command line, as in vLLM.
    elif name.startswith("allowed_") or name.endswith("_config"):
        group.add_argument(*flags, type=json_of, **options)
    elif kinds == {list[str]}:
        group.add_argument(*flags, nargs="+", action="extend", **options)  # given twice, both count
    else:
        kind = int if int in kinds else float if float in kinds else str
        group.add_argument(*flags, type=kind, **options)
