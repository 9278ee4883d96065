"""Draw the figures that `NAME/opening.py` below `vllm/minivllm_lab` makes.

    uv run python tools/openings.py --write        # all of them, or some: --write paged_attention
    uv run python tools/openings.py --check        # fails when a drawing is stale

`NAME/opening.py` belongs to `lessons/NN_NAME.md`. Its `frames()` become the moving picture
`lessons/figures/NN_opening.svg`. If it has a function `stills()`, each picture that this returns goes
to `lessons/figures/NN_KEY.svg`.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path
from types import ModuleType

from pictures import differences

from minivllm.errors import MinivllmError
from minivllm_lab.cli import Parser, run

ROOT = Path(__file__).resolve().parents[1]
LAB = ROOT / "vllm" / "minivllm_lab"
MEND = "uv run python tools/openings.py --write"


def names() -> list[str]:
    """Return the folders of `minivllm_lab` that have an opening."""
    return sorted(path.parent.name for path in LAB.glob("*/opening.py"))


def figure_path(name: str, picture: str = "opening") -> Path:
    """Return the path of one module's drawing: the moving picture, or the still `picture`."""
    [lesson] = (ROOT / "lessons").glob(f"[0-9][0-9]_{name}.md")
    return ROOT / "lessons" / "figures" / f"{lesson.name[:2]}_{picture}.svg"


def drawings(name: str) -> dict[Path, str]:
    """Return the SVGs of one module by the paths that they belong to.

    Raises:
        MinivllmError: there is no such module, or it has no function `frames()`.
    """
    if name not in names():
        raise MinivllmError(f"there is no opening figure {name!r} (available: {', '.join(names()) or 'none'})")
    module: ModuleType = import_module(f"minivllm_lab.{name}.opening")
    if not hasattr(module, "frames"):
        raise MinivllmError(f"minivllm_lab/{name}/opening.py has no function frames()")
    stills = module.stills() if hasattr(module, "stills") else {}
    drawn = {figure_path(name, picture): f"{svg}\n" for picture, svg in stills.items()}
    return {figure_path(name): module.frames().animated(), **drawn}


def stale(name: str) -> list[str]:
    """Return one line for each difference between a module's drawings and their files, compared as
    data, not as bytes.
    """
    lines = []
    for path, drawn in drawings(name).items():
        if not path.is_file():
            lines.append(f"{path.name} is missing")
            continue
        lines += [f"{path.name}: {line}" for line in differences(drawn, path.read_text())]
    return lines


def main(arguments: argparse.Namespace) -> None:
    chosen = arguments.names or names()
    if arguments.check:
        found = [line for name in chosen for line in stale(name)]
        print("\n".join(found) or "the opening figures are up to date")
        if found:
            raise MinivllmError(f"to fix it, run: {MEND}")
        return
    for name in chosen:
        for path, drawn in drawings(name).items():
            path.write_text(drawn)
            print(f"wrote {path.relative_to(ROOT)}")


def parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    flags = Parser(description=__doc__)
    action = flags.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true", help="draw the figures")
    action.add_argument("--check", action="store_true", help="fail when a figure is stale")
    flags.add_argument("names", nargs="*", metavar="NAME", help="folders of minivllm_lab (default: all)")
    return flags


if __name__ == "__main__":
    run(main, parser())
