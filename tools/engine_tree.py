"""Write vllm/minivllm/README.md: the engine as one tree, with a gloss for each file.

    uv run python tools/engine_tree.py --write
    uv run python tools/engine_tree.py --check     # fails when the page is stale

A gloss is the first paragraph of the file's own docstring, so it is written once, next to the code.
Packages appear in the order in which a request meets them; files of the spine, which
ARCHITECTURE.md lists, are in bold.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from pathlib import Path

from minivllm.errors import MinivllmError
from minivllm_lab.cli import Parser

ROOT = Path(__file__).resolve().parents[1]
ENGINE = ROOT / "vllm" / "minivllm"
PAGE = ENGINE / "README.md"
PACKAGES = (
    "entrypoints", "engine", "core", "executor", "worker", "models", "kernels", "kv_connector", "lora",
    "structured_output", "memory", "config", "platforms",
)  # fmt: skip
HEAD = """# minivllm

The twelve mechanisms of the lessons in one small engine, with vLLM's names.
[ARCHITECTURE.md](../../ARCHITECTURE.md) shows
how a request goes through it and what to read first: the files in **bold**, a weekend's reading.
[FROM_VLLM.md](FROM_VLLM.md) is for readers with vLLM scripts. Each gloss is the first paragraph of the file's docstring
(`tools/engine_tree.py`).
"""


def gloss(path: Path) -> str:
    """Return the first paragraph of a module's docstring as one line.

    Raises:
        MinivllmError: the module has no docstring.
    """
    text = ast.get_docstring(ast.parse(path.read_text()))
    if not text:
        raise MinivllmError(f"{path.relative_to(ROOT)} has no docstring: say in its first line what the file is")
    return re.sub(r" In vLLM( v0\.33\.0)?: .*", "", " ".join(text.split("\n\n")[0].split()))


def spine() -> set[str]:
    """Return the files that ARCHITECTURE.md lists as the spine, relative to the engine."""
    listed = (ROOT / "ARCHITECTURE.md").read_text().split("<!-- spine -->")[1].split("<!-- /spine -->")[0]
    return set(re.findall(r"`([\w/]+\.py)`", listed))


def rows(folder: Path, bold: set[str], depth: int) -> list[str]:
    """Return one bullet for each of a folder's files, then for each of its subfolders."""
    lines = []
    for path in sorted(folder.iterdir(), key=lambda path: (path.is_dir(), path.name)):
        name, indent = path.relative_to(ENGINE).as_posix(), "  " * depth
        if path.suffix == ".py" and path.name != "__init__.py":
            shown = f"**[{path.name}]({name})**" if name in bold else f"[{path.name}]({name})"
            lines.append(f"{indent}- {shown}: {gloss(path)}")
        elif (path / "__init__.py").exists():
            lines += [f"{indent}- **{path.name}/**: {gloss(path / '__init__.py')}", *rows(path, bold, depth + 1)]
    return lines


def page() -> str:
    """Return the whole page."""
    found = {path.parent.name for path in ENGINE.glob("*/__init__.py")}
    if found != set(PACKAGES):
        raise MinivllmError(f"tools/engine_tree.py and the engine disagree on {', '.join(found ^ set(PACKAGES))}")
    parts, bold = [HEAD], spine()
    for name in PACKAGES:
        parts.append(f"## {name}\n\n{gloss(ENGINE / name / '__init__.py')}\n")
        parts.append("\n".join(rows(ENGINE / name, bold, 0)) + "\n")
    alone = [path for path in sorted(ENGINE.glob("*.py")) if path.name != "__init__.py"]
    parts.append("## Beside the packages\n")
    parts.append("\n".join(f"- [{path.name}]({path.name}): {gloss(path)}" for path in alone) + "\n")
    return "\n".join(parts)


def main(arguments: argparse.Namespace) -> int:
    """Write the page, or report that it is stale."""
    if arguments.write:
        PAGE.write_text(page())
    elif not PAGE.exists() or PAGE.read_text() != page():
        print("vllm/minivllm/README.md is stale: run uv run python tools/engine_tree.py --write", file=sys.stderr)
        return 1
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    flags = Parser(description=__doc__)
    which = flags.add_mutually_exclusive_group(required=True)
    which.add_argument("--write", action="store_true", help="write the page")
    which.add_argument("--check", action="store_true", help="fail if it is stale")
    return flags


if __name__ == "__main__":
    try:
        sys.exit(main(parser().parse_args()))
    except MinivllmError as error:
        sys.exit(f"engine_tree.py: error: {error}")
