"""Draw the lessons' opening figures, each made by `frames()` in `NAME/opening.py` below
`vllm/minivllm_lab`.

    uv run python tools/openings.py --write        # all of them, or some: --write paged_attention
    uv run python tools/openings.py --check        # fails when a drawing is stale

`NAME/opening.py` belongs to `lessons/NN_NAME.md`, and its drawing goes to
`lessons/figures/NN_opening.svg`; one without a lesson, such as the README's `request`, goes to
`lessons/figures/NAME.svg`.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path
from types import ModuleType

from minivllm.errors import MinivllmError
from minivllm_lab.cli import Parser, run
from minivllm_lab.exercise import load

ROOT = Path(__file__).resolve().parents[1]
LAB = ROOT / "vllm" / "minivllm_lab"
MEND = "uv run python tools/openings.py --write"


def names() -> list[str]:
    """Return the folders of `minivllm_lab` that have an opening."""
    return sorted(path.parent.name for path in LAB.glob("*/opening.py"))


def figure_path(name: str) -> Path:
    """Return the path of one module's drawing."""
    lessons = sorted((ROOT / "lessons").glob(f"[0-9][0-9]_{name}.md"))
    stem = f"{lessons[0].name[:2]}_opening" if lessons else name
    return ROOT / "lessons" / "figures" / f"{stem}.svg"


def drawing(name: str) -> str:
    """Return the animated SVG of one module.

    Raises:
        MinivllmError: there is no such module, or it has no function `frames()`.
    """
    if name not in names():
        raise MinivllmError(f"there is no opening figure {name!r} (available: {', '.join(names()) or 'none'})")
    module: ModuleType = import_module(f"minivllm_lab.{name}.opening")
    if not hasattr(module, "frames"):
        raise MinivllmError(f"minivllm_lab/{name}/opening.py has no function frames()")
    return module.frames().animated()


def stale(name: str) -> list[str]:
    """Return one line for each difference between a module's file and its drawing, compared as
    data, not as bytes.
    """
    path = figure_path(name)
    if not path.is_file():
        return [f"{path.name} is missing"]
    differences = load(ROOT / "tests" / "pictures.py").differences
    return [f"{path.name}: {line}" for line in differences(drawing(name), path.read_text())]


def main(arguments: argparse.Namespace) -> None:
    chosen = arguments.names or names()
    if arguments.check:
        found = [line for name in chosen for line in stale(name)]
        print("\n".join(found) or "the opening figures are up to date")
        if found:
            raise MinivllmError(f"to fix it, run: {MEND}")
        return
    for name in chosen:
        path = figure_path(name)
        path.write_text(drawing(name))
        print(f"wrote {path.relative_to(ROOT)}")


def parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    flags = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = flags.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true", help="draw the figures")
    action.add_argument("--check", action="store_true", help="fail when a figure is stale")
    flags.add_argument("names", nargs="*", metavar="NAME", help="folders of minivllm_lab (default: all)")
    return flags


if __name__ == "__main__":
    run(main, parser())
