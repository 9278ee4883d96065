"""The flags shared by all lesson scripts, and how a script exits on invalid input."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from minivllm.config import EMBEDDED_MODEL
from minivllm.config.checks import encodable
from minivllm.errors import MinivllmError
from minivllm.logger import LEVEL_VARIABLE, init_logger
from minivllm.platforms.device import DEVICES
from minivllm_lab.results import ensure_writable

FIGURE_KINDS = (".png", ".svg")


def whole_number(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return an argparse type: an integer from `least` to `most` (None: without an upper limit)."""
    limits = f"at least {least}" if most is None else f"from {least} to {most}"

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"must be {limits}, got {value}")
        return value

    return parse


positive_int = whole_number(1)
"""An argparse type: an integer of at least 1."""


seed = whole_number(0, 2**32 - 1)
"""An argparse type: a seed that `random`, NumPy and torch all take."""


def figure_file(text: str) -> str:
    """Return `text` if it is the name of a figure file; an argparse type."""
    if not text.endswith(FIGURE_KINDS):
        raise argparse.ArgumentTypeError(f"a figure's name must end in {' or '.join(FIGURE_KINDS)}, got {text!r}")
    return text


class Parser(argparse.ArgumentParser):
    """An argument parser whose --help keeps the description's line breaks, and that reports errors
    in one line and exits with code 2.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter, **settings})

    def error(self, message: str):
        self.exit(2, f"{self.prog}: error: {message}\n")


def benchmark_parser(doc: str | None) -> Parser:
    """Return a parser with the flag that all benchmarks have; --help shows `doc`, the script's
    docstring.
    """
    flags = Parser(description=doc)
    flags.add_argument("--json", metavar="FILE", help="also write the figures to FILE")
    return flags


def lesson_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the common flags; --help shows `doc`, the script's docstring. Add the
    lesson's own knobs to it.
    """
    parser = Parser(description=doc)
    parser.add_argument("--device", choices=DEVICES, default="auto", help="where to run (default: the GPU, if any)")
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument("--quick", action="store_true", help="the same steps on less work, in seconds")
    amount.add_argument("--full", action="store_true", help="more sizes and repeats, in minutes")
    parser.add_argument(
        "--plot", metavar="FILE", type=figure_file, help="also draw the lesson's figure to FILE (.png or .svg)"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the measured figures to FILE")
    parser.add_argument("--seed", type=seed, default=0, help="seed of everything random (default: 0)")
    parser.add_argument("--model", default=str(EMBEDDED_MODEL), help="a model directory (default: the embedded model)")
    return parser


def run(main: Callable[[argparse.Namespace], None], parser: argparse.ArgumentParser) -> None:
    """Parse the command line and call `main`; a `MinivllmError` becomes one line and exit code 2.

    Output files are checked for writability before the work starts.
    """
    arguments = parser.parse_args()
    try:
        for name, value in vars(arguments).items():
            if isinstance(value, str):
                encodable(value, f"--{name.replace('_', '-')}")
        for path in filter(None, (getattr(arguments, "plot", None), getattr(arguments, "json", None))):
            ensure_writable(path)
        with warnings_only():
            main(arguments)
    except MinivllmError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def log_warnings_only() -> None:
    """Log warnings only, here and in processes started later, unless the environment sets a
    level.
    """
    if LEVEL_VARIABLE not in os.environ:
        os.environ[LEVEL_VARIABLE] = "WARNING"  # for subprocesses
        init_logger("minivllm").setLevel("WARNING")  # for this process: configured when the engine was imported


@contextmanager
def warnings_only() -> Iterator[None]:
    """Log warnings only inside the block: start-up messages would clutter tables and pictures."""
    if LEVEL_VARIABLE in os.environ:
        yield
        return
    logger = init_logger("minivllm")
    level = logger.level
    log_warnings_only()
    try:
        yield
    finally:
        logger.setLevel(level)
        del os.environ[LEVEL_VARIABLE]
