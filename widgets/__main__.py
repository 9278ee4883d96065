"""A widget's picture as a file, its knobs at the start: `uv run python -P -m widgets serving layouts.svg`."""

import argparse
from importlib import import_module
from pathlib import Path

import widgets


def main(argv: list[str] | None = None) -> None:
    """Draws the picture, as wide as the lessons' texts show it."""
    parser = argparse.ArgumentParser(prog="widgets", description=__doc__)
    parser.add_argument("widget", choices=widgets.names())
    parser.add_argument("file", type=Path)
    arguments = parser.parse_args(argv)
    spec = import_module(f"widgets.{arguments.widget}").SPEC
    arguments.file.write_text(spec.figure(spec.complete(), width=720))


if __name__ == "__main__":
    main()
