"""Check every vLLM name in our texts against a committed list of the names in vLLM's source.

uv run python tools/vllm_names.py                                # check; `--list` prints each name and where it is
uv run python tools/vllm_names.py --make vllm-0.33.0.tar.gz      # write the list again, when a new file is cited

The check covers the paths in Markdown, docstrings and comments (`vllm/v1/request.py`, or a link to
it), and the identifiers in the same sentence or table cell, which one of its files must define or
contain. It also covers vLLM's environment variables, anything called "vLLM's `name`", the ranges of
lines that we link to (`vllm_lines.py`), and flags, metrics, log lines and defaults (`vllm_facts.py`).
The list has the path of every Python file, the names in those that we cite, what stands at the ends of
the ranges, where the flags, metrics and log lines are, the values of the defaults, and the archive's
SHA-256. Its source is the archive on vLLM's page on PyPI, under "Download files". No network is used.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path, PurePosixPath

import vllm_facts
import vllm_lines
from vllm_facts import Passage

VERSION = "0.33.0"
ROOT = Path(__file__).resolve().parents[1]
LIST = Path(__file__).with_suffix(".json")
ENVIRONMENT = "vllm/envs.py"
OTHER_RELEASES = "lessons/reading/drift.md"  # written by drift.py

FENCE = re.compile(r"^ *(```|~~~).*?^ *\1", re.DOTALL | re.MULTILINE)
LINK_TO_VLLM = re.compile(r"\[([^\]]*)\]\([^)\s]*/vllm-project/vllm/(?:blob|tree)/(v[\d.]+)/([^)#\s]+)[^)]*\)")
OTHER_LINK = re.compile(r"\[([^\]]*)\]\(([^)]*)\)")
SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z`*(]|vLLM)")
CODE = re.compile(r"`([^`]+)`")
PATH = re.compile(r"(?:vllm/(?!\d\d_)|csrc/|docs/|examples/|rust/|tests/v1/)[\w./-]*\w/?")  # vllm/NN_… are our lessons
FILE = re.compile(r"[\w/-]+\.(?:py|cu|cpp|h|md|rs)")
DATA = re.compile(r"\S+\.(?:json|safetensors|toml|yaml)")
IDENTIFIER = re.compile(r"(?:self\.)?([A-Za-z_]\w*(?:\.\w+)*)(?:\(.*\)|=.*)?")
RELEASE = re.compile(r"\bv(\d+\.\d+\.\d+)\b")
VARIABLE = re.compile(r"\bVLLM_[A-Z0-9_]*[A-Z0-9]\b")
OF_ANY_VLLM = re.compile(r"(?<!mini)vllm", re.IGNORECASE)
OF_VLLM = re.compile(r"(?:vLLM's|[Ii]n vLLM:?) `([A-Za-z_]\w*)`")

Names = dict[str, set[str]]  # of one file: "" is the module, a class's name its members, "*" other names that it holds


@dataclass(frozen=True)
class Mention:
    """A passage's mention of vLLM: paths, and the identifiers beside them."""

    where: str
    paths: tuple[str, ...]
    identifiers: tuple[str, ...]


# Our texts


def our_texts() -> dict[str, str]:
    """Map each Markdown or Python file that git tracks or would add to its text, except the page on
    other releases.
    """
    command = ["git", "ls-files", "-co", "--exclude-standard", "*.md", "*.py"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    names = (name for name in listed.stdout.splitlines() if name != OTHER_RELEASES and (ROOT / name).exists())
    return {name: (ROOT / name).read_text() for name in names}


def passages(name: str, text: str) -> Iterator[Passage]:
    """Yield a file's sentences and table cells; from Python, only those in docstrings and comments."""
    if not OF_ANY_VLLM.search(text):
        return
    above: list[str] = []
    for line, block in markdown_blocks(text) if name.endswith(".md") else python_blocks(text):
        if block.startswith("|"):
            parts = above = [same_file(cell, above[column:]) for column, cell in enumerate(block.split(" | "))]
        else:
            parts = SENTENCE.split(" ".join(block.split()))
        for part in parts:
            yield Passage(f"{name}:{line}", part)


def same_file(cell: str, above: list[str]) -> str:
    """Return a table's cell with "the same file" replaced by the path from the cell above."""
    path = re.search(f"`{PATH.pattern}`", above[0]) if above else None
    return cell.replace("the same file", path[0]) if path else cell


def markdown_blocks(text: str) -> Iterator[tuple[int, str]]:
    """Yield table rows, list items and paragraphs outside fences, with the line of each."""
    text = FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), text)
    block: list[str] = []
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        if block and (not line.strip() or re.match(r"\s*([-*|#]|\d+\.) ?", line)):
            yield number - len(block), "\n".join(block)
            block = []
        if line.strip():
            block.append(line)


def python_blocks(text: str) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs of docstrings, and comments on adjoining lines, with the line of
    each.
    """
    nodes: list[ast.AST] = [ast.parse(text)]
    for node in nodes:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            nodes += node.body
            line = node.body[0].lineno if node.body else 1
            for paragraph in (ast.get_docstring(node) or "").split("\n\n"):
                yield line, paragraph
                line += paragraph.count("\n") + 2
    comments = [(number, line.strip()) for number, line in enumerate(text.splitlines(), start=1)]
    comments = [(number, line.lstrip("# ")) for number, line in comments if line.startswith("#")]
    for _, lines in groupby(enumerate(comments), key=lambda item: item[1][0] - item[0]):
        adjoining = [comment for _, comment in lines]
        yield adjoining[0][0], "\n".join(words for _, words in adjoining)


def mention(passage: Passage) -> Mention | None:
    """Return what a passage says of this version of vLLM, or None."""
    text = passage.text
    if passage.where.startswith(vllm_lines.TOUR):  # what follows a range there names statements
        text = vllm_lines.LINK.sub(r"\g<release> `\g<path>`", text)
    text = LINK_TO_VLLM.sub(r"\1 \2 `\3`", text)
    text = OTHER_LINK.sub(lambda link: link[1] if link[2].startswith("http") else "", text)
    paths: list[str] = []
    identifiers = [*VARIABLE.findall(text), *OF_VLLM.findall(text)]
    release = VERSION
    for words, code in re.findall(r"([^`]*)`([^`]+)`", text):
        release = [release, *RELEASE.findall(words)][-1]
        if PATH.fullmatch(code) and release == VERSION and not is_ours(code):
            paths.append(code.rstrip("/"))
        elif FILE.fullmatch(code) and not is_ours(code) and paths:
            paths.append(code)  # it lies beside or under one of those before: `located`
    if not (paths or identifiers):
        return None
    if paths:
        codes = [code for code in CODE.findall(text) if not (FILE.fullmatch(code) or DATA.fullmatch(code))]
        identifiers += [match[1] for code in codes if (match := IDENTIFIER.fullmatch(code))]
    return Mention(passage.where, tuple(dict.fromkeys(paths)), tuple(dict.fromkeys(identifiers)))


def is_ours(path: str) -> bool:
    """Return whether a path leads to a file of this repository."""
    return any((place / path).exists() for place in (ROOT, ROOT / "vllm", ROOT / "vllm" / "minivllm"))


def located(each: Mention, known: set[str]) -> Mention:
    """Return a mention in which each file named without its folder is placed in the folder of a
    path beside it.
    """
    folders = [folder for path in each.paths for folder in (path, str(PurePosixPath(path).parent))]

    def place(path: str) -> str:
        return next((full for folder in folders if (full := f"{folder}/{path}") in known), path)

    return replace(each, paths=tuple(path if PATH.fullmatch(path) else place(path) for path in each.paths))


def mentions(texts: dict[str, str]) -> list[Mention]:
    """Return every mention of vLLM in these texts."""
    found = (mention(passage) for name, text in texts.items() for passage in passages(name, text))
    return [each for each in found if each is not None]


def fact_claims(texts: dict[str, str]) -> list[vllm_facts.Claim]:
    """Return what these texts say of vLLM beside paths and lines."""
    return vllm_facts.claims(texts, all_passages(texts), ledger())


def all_passages(texts: dict[str, str]) -> list[Passage]:
    """Return the passages of all texts."""
    return [passage for name, text in texts.items() for passage in passages(name, text)]


def ledger() -> vllm_facts.Ledger:
    """Return the committed ledger of defaults."""
    return vllm_facts.read_ledger(vllm_facts.LEDGER.read_text())


def line_ranges(texts: dict[str, str]) -> list[vllm_lines.LineRange]:
    """Return every range of vLLM's lines that these texts link to."""
    return [each for name, text in texts.items() for each in vllm_lines.line_ranges(name, text, VERSION)]


# vLLM's names


def definitions(source: str) -> Names:
    """Return the names that a module defines: its own under "", and each class's members, fields
    and attributes.
    """
    names: Names = {"": set()}

    def visit(node: ast.AST, owner: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                names[owner].add(child.name)
                names.setdefault(child.name, set())
                visit(child, child.name)
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                names[owner].add(child.name)
                names[owner] |= {each.attr for each in ast.walk(child) if owner and sets_attribute(each)}
            elif isinstance(child, ast.Assign | ast.AnnAssign):
                targets = child.targets if isinstance(child, ast.Assign) else [child.target]
                names[owner] |= {
                    each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)
                }
            elif isinstance(child, ast.If | ast.Try | ast.With):
                visit(child, owner)

    visit(ast.parse(source), "")
    return names


def sets_attribute(node: ast.AST) -> bool:
    """Return whether a node assigns to `self.name`."""
    target = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.value
    return isinstance(target, ast.Name) and target.id == "self"


class Source:
    """The names of vLLM: every path, and what the files that we cite define."""

    def __init__(
        self,
        paths: set[str],
        names: dict[str, Names],
        ranges: vllm_lines.Record | None = None,
        facts: vllm_facts.Facts | None = None,
    ) -> None:
        self.paths = paths
        self.ranges = ranges or {}
        self.facts = facts or {}
        self.folders = {str(folder) for path in paths for folder in PurePosixPath(path).parents}
        self.names = names

    def has_path(self, path: str) -> bool:
        """Return whether a file or folder exists."""
        return path in self.paths or path in self.folders

    def has_identifier(self, identifier: str, paths: tuple[str, ...]) -> bool:
        """Return whether one of these files and folders contains a name: `function`, `Class`,
        `member` or `Class.member`.
        """
        owner, _, member = identifier.rpartition(".")
        for path, names in self.names.items():
            if not paths or path == ENVIRONMENT or any(is_in(path, place) for place in paths):
                if identifier in names.get("*", ()) or member in names.get(owner, ()):
                    return True
                if not owner and any(member in members for members in names.values()):
                    return True
        return False

    def problems(self, mentioned: list[Mention]) -> list[str]:
        """Return one line for each path or name that vLLM does not have."""
        wrong = []
        for each in (located(one, self.paths) for one in mentioned):
            gone = [path for path in each.paths if not self.has_path(path)]
            wrong += [f"{each.where}: vLLM {VERSION} has no {path}" for path in gone]
            wrong += [
                f"{each.where}: {name} is not in {', '.join(each.paths) or 'any file that we cite'} of vLLM {VERSION}"
                for name in each.identifiers
                if not gone and not self.has_identifier(name, each.paths)
            ]
        return wrong


def is_in(path: str, place: str) -> bool:
    """Return whether a path is this file, or lies in this folder."""
    return path == place or path.startswith(place + "/")


def read_list(text: str) -> Source:
    """Read the committed list."""
    written = json.loads(text)
    paths = {f"{folder}/{name}" for folder, names in written["paths"].items() for name in names.split()}
    names = {
        path: {owner: set(members.split()) for owner, members in owners.items()}
        for path, owners in written["names"].items()
    }
    return Source(paths, names, written.get("ranges"), vllm_facts.read_facts(written.get("facts", {})))


def make_list(
    sources: dict[str, str],
    mentioned: list[Mention],
    ranges: Iterable[vllm_lines.LineRange] = (),
    facts: vllm_facts.Facts | None = None,
    sha256: str = "",
) -> str:
    """Return the list as JSON: the paths of Python files and of what we cite, the names in the files
    that we cite, what stands at the ends of the line ranges, and the facts.
    """
    mentioned = [located(each, set(sources)) for each in mentioned]
    cited = {path for each in mentioned for path in each.paths}
    named = {place for each in mentioned if each.identifiers for place in each.paths}
    paths = sorted(path for path in sources if path in cited or (is_in(path, "vllm") and path.endswith(".py")))
    folders = {
        folder: " ".join(PurePosixPath(path).name for path in group)
        for folder, group in groupby(
            sorted(paths, key=lambda path: (str(PurePosixPath(path).parent), path)),
            key=lambda path: str(PurePosixPath(path).parent),
        )
    }
    names = {}
    for path in paths:
        beside = {
            name for each in mentioned if any(is_in(path, place) for place in each.paths) for name in each.identifiers
        }
        if path in named or path == ENVIRONMENT:
            names[path] = definitions(sources[path]) if path.endswith(".py") else {}
            held = beside & set(re.findall(r"\w+", sources[path]))
            if path == ENVIRONMENT:  # which declares some variables as keys of a dictionary only
                held |= set(VARIABLE.findall(sources[path]))
            names[path]["*"] = held.difference(*names[path].values())
        elif beside:  # a folder is cited
            defined = definitions(sources[path]) if path.endswith(".py") else {}
            names[path] = {"*": beside.intersection(set().union(*defined.values()))}
    written = {
        path: {owner: " ".join(sorted(members)) for owner, members in sorted(owners.items()) if members}
        for path, owners in names.items()
    }
    sections = {"paths": folders, "names": written, "ranges": vllm_lines.record_of(ranges, sources)}
    lines = [f"{json.dumps(name)}: {{\n{entries(section)}\n}}" for name, section in sections.items()]
    if facts is not None:
        kinds = vllm_facts.written(facts)
        lines.append(
            '"facts": {' + ",".join(f"\n{json.dumps(kind)}: {{\n{entries(kinds[kind])}\n}}" for kind in kinds) + "}"
        )
    return f'{{\n"version": "{VERSION}",\n"sha256": "{sha256}",\n' + ",\n".join(lines) + "\n}\n"


def entries(section: dict) -> str:
    """Return a mapping's entries as JSON, one per line."""
    return ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in section.items())


def read_archive(path: Path) -> dict[str, str]:
    """Return the text of the archive's files by their paths in vLLM's repository."""
    with tarfile.open(path) as archive:
        files = {member.name.partition("/")[2]: member for member in archive if member.isfile()}
        wanted = {
            name: member
            for name, member in files.items()
            if name.startswith(("vllm/", "csrc/", "docs/", "examples/", "rust/", "tests/"))
        }
        return {name: archive.extractfile(member).read().decode(errors="replace") for name, member in wanted.items()}


def all_problems(texts: dict[str, str], source: Source) -> list[str]:
    """Return one line for each thing that our texts say of vLLM and this source does not have."""
    ranges, known = line_ranges(texts), ledger()
    wrong = source.problems(mentions(texts)) + vllm_lines.problems(ranges, source.ranges, VERSION)
    wrong += vllm_lines.unexplained_names(ranges, source.ranges, texts)
    wrong += vllm_facts.problems(fact_claims(texts), source.facts, known, texts, VERSION)
    return wrong + vllm_facts.unstated(texts, all_passages(texts), known)


def main() -> int:
    """Check the texts, or write the list; return 1 if a name is not vLLM's."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--make", type=Path, metavar="ARCHIVE", help=f"write the list from vllm-{VERSION}.tar.gz")
    parser.add_argument("--list", action="store_true", help="print each name and where it is")
    options = parser.parse_args()
    texts = our_texts()
    mentioned = mentions(texts)
    ranges = line_ranges(texts)
    facts = fact_claims(texts)
    if options.make:
        sources = read_archive(options.make)
        sha256 = hashlib.sha256(options.make.read_bytes()).hexdigest()
        known = vllm_facts.facts_of(facts, sources, ledger())
        LIST.write_text(make_list(sources, mentioned, ranges, known, sha256))
    if options.list:
        for each in mentioned:
            print(each.where, *each.paths, *each.identifiers)
    source = read_list(LIST.read_text())
    wrong = all_problems(texts, source)
    paths = sum(len(each.paths) for each in mentioned)
    identifiers = sum(len(each.identifiers) for each in mentioned)
    print("\n".join(wrong), end="\n" if wrong else "")
    counted = f"{paths} paths, {identifiers} identifiers, {len(ranges)} ranges of lines"
    counted += "".join(f", {len(known)} {kind}" for kind, known in source.facts.items())
    print(f"vLLM {VERSION}: {counted}, {len(wrong)} of them wrong")
    if wrong:
        print("Is a file cited for the first time? Then write the list again: tools/vllm_names.py says how.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
