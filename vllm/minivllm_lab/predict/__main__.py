"""Play in a browser: `uv run python -m minivllm_lab.predict` writes the game as one page and opens it."""

from __future__ import annotations

import argparse
import webbrowser
from pathlib import Path

from minivllm_lab.cli import Parser, run
from minivllm_lab.lesson import wrote
from minivllm_lab.predict.page import html
from minivllm_lab.results import ensure_writable

PAGE = Path(__file__).resolve().parents[3] / "out" / "predict.html"


def main(arguments: argparse.Namespace) -> None:
    """Write the page, and open it where there is a browser."""
    ensure_writable(arguments.page)
    arguments.page.write_text(html(), encoding="utf-8")
    wrote(str(arguments.page))
    webbrowser.open(arguments.page.resolve().as_uri())


def parser() -> argparse.ArgumentParser:
    """Return the command line of `python -m minivllm_lab.predict`."""
    flags = Parser(prog="predict", description=__doc__)
    flags.add_argument("--page", metavar="FILE", type=Path, default=PAGE, help="where (default: out/predict.html)")
    return flags


if __name__ == "__main__":
    run(main, parser())
