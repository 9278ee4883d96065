"""Print, change or check the repository's public address. It is set in pyproject.toml, and every
other copy must equal it.

uv run python tools/address.py                          # print it
uv run python tools/address.py --set https://github.com/someone/a-name
uv run python tools/address.py --check                  # fail if a file has another address
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tomllib
from pathlib import Path

from minivllm.errors import MinivllmError
from minivllm_lab.cli import Parser, run

ROOT = Path(__file__).resolve().parents[1]
GITHUB = "https://github.com/"
OPENERS = ("colab.research.google.com/github/", "mybinder.org/v2/gh/", "codespaces.new/", "nbviewer.org/github/")
"""Services that open a notebook of a repository: after these words, only this repository can
stand.
"""
NO_NAMES = re.compile(r"ADDRESS-OF-THE|YOUR-(?:NAME|FORK)|<(?:owner|repo|user)>", re.IGNORECASE)
UNPUBLISHED = "OWNER"
"""The owner in the address until there is one: what would open the repository there is left out."""
SLUG = r"([\w.-]+/[\w.-]*\w)"


def address(root: Path = ROOT) -> str:
    """Return the address, as pyproject.toml has it: `https://github.com/OWNER/NAME`.

    Raises:
        MinivllmError: pyproject.toml has no address, or one that is not on GitHub.
    """
    urls = tomllib.loads((root / "pyproject.toml").read_text())["project"].get("urls", {})
    found = urls.get("Repository", "")
    _slug(found)
    return found


def colab(stem: str, root: Path = ROOT) -> str:
    """Return the address that opens a notebook in Colab, or "" before the repository is published."""
    if _slug(address(root)).startswith(f"{UNPUBLISHED}/"):
        return ""
    return f"https://{OPENERS[0]}{_slug(address(root))}/blob/main/notebooks/{stem}.ipynb"


def _slug(url: str) -> str:
    match = re.fullmatch(rf"{GITHUB}{SLUG}", url)
    if match is None:
        raise MinivllmError(f"[project.urls] Repository in pyproject.toml must be {GITHUB}OWNER/NAME, got {url!r}")
    return match[1]


def tracked_text(root: Path) -> dict[str, str]:
    """Map each file that git tracks or would add to its text; tests and binary files are left out."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=root, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    found = {}
    for name in listed:
        if not name.startswith("tests/") and (root / name).is_file():
            try:
                found[name] = (root / name).read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
    return found


def strangers(root: Path = ROOT) -> list[str]:
    """List every other address of this repository, and every placeholder for one, one line each."""
    slug, found = _slug(address(root)), []
    ours = re.compile(rf"github\.com/([\w.-]+/{re.escape(slug.split('/')[1])})(?![\w-])")
    opened = re.compile(f"(?:{'|'.join(map(re.escape, OPENERS))}){SLUG}")
    for name, text in tracked_text(root).items():
        if name == "tools/address.py":
            continue
        others = {other for pattern in (ours, opened) for other in pattern.findall(text)} - {slug}
        found += [f"{name}: {other}, not {slug}" for other in sorted(others)]
        found += [f"{name}: {word!r} is a placeholder for an address" for word in sorted(set(NO_NAMES.findall(text)))]
    if f"repository-code: {address(root)}\n" not in (root / "CITATION.cff").read_text():
        found.append(f"CITATION.cff: `repository-code: {address(root)}` is missing")
    return found


def change(root: Path, new: str) -> list[str]:
    """Write `new` into every file that contains the present address; return the files' names."""
    old, slug = _slug(address(root)), _slug(new)
    changed = [name for name, text in tracked_text(root).items() if old in text]
    for name in changed:
        path = root / name
        path.write_text(path.read_text(encoding="utf-8").replace(old, slug), encoding="utf-8")
    return changed


def main(arguments: argparse.Namespace) -> None:
    if arguments.set:
        print("\n".join(change(ROOT, arguments.set)))
        print("next, run: uv run python tools/notebooks.py --write")
        return
    found = strangers() if arguments.check else []
    if found:
        print("\n".join(found))
        raise MinivllmError("the address in pyproject.toml counts: tools/address.py --set changes it everywhere")
    print(address())


def parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    flags = Parser(description=__doc__)
    action = flags.add_mutually_exclusive_group()
    action.add_argument("--set", metavar="ADDRESS", help="replace the present address everywhere with this one")
    action.add_argument("--check", action="store_true", help="fail if a file has another address of this repository")
    return flags


if __name__ == "__main__":
    run(main, parser())
