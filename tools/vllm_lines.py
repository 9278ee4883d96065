"""Record what stands at the ends of the line ranges of vLLM that our texts link to, and compare.

A link ends in `#L797-L1036`. In `lessons/reading`, it is followed by the statement that the range
is, or by its first and last statement:

    | [797–1036](…#L797-L1036) `while req_index` | … |
    | [839–857](…#L839-L857) `num_new_tokens` to `num_new_tokens` | … |

A statement is named by its keyword and the first name in it (`def f`, `for x`, `if self.a` without
`self.`), an assignment by its target, a call by its function. The names in the rest of the row must
stand in those lines; and the row must say what each name in the lines is, unless a lesson uses the
name, or our file beside it does.

`vllm_names.py` keeps the record in its list, so that the check needs no source of vLLM's.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

TOUR = "lessons/reading/"
LINK = re.compile(
    r"\[[^\]]*\]\([^)\s]*/vllm-project/vllm/blob/(?P<release>v[\d.]+)/(?P<path>[^)#\s]+)"
    r"#L(?P<first>\d+)(?:-L(?P<last>\d+))?\)(?: `(?P<begins>[^`]+)`(?: to `(?P<ends>[^`]+)`)?)?"
)
CODE = re.compile(r"`([^`]+)`")
NAME = re.compile(r"[A-Za-z_][\w.]*")
WORD = re.compile(r"\w+")
LESSON = re.compile(r"lessons/(?:notes/)?\d\d_\w+\.md|lessons/GLOSSARY\.md")
OUR_FILE = re.compile(r"\]\(\.\./\.\./(vllm/minivllm/[^)#]+\.py)\)")
KEYWORDS = {"await", "not", "and", "or", "None", "True", "False"}
BLOCKS = ("body", "orelse", "handlers", "finalbody")
LIBRARIES = {"asyncio", "itertools", "np", "os", "queue", "safetensors", "time", "tl", "torch", "triton", "zmq"}
COMMON = {*dir(builtins), *dir(list), *dir(dict), *dir(set), *dir(str), *dir(type(iter([])))}
COMMON |= {"appendleft", "popleft", "mutex", "queue", "empty", "put_nowait", "get_nowait", "result", "deque"}
COMMON |= {"cpu", "detach", "dtype", "element_ty", "flatten", "is_fp8", "new_empty", "numpy", "reshape"}
COMMON |= {"shape", "stride", "sum", "to", "view", "any", "all", "error", "info", "debug", "warning", "logger"}

Entry = dict[str, str]
"""The record of one range: `begins` and `ends`; `within`, the function or class that it is in; `text`,
a hash of its lines; `edges`, hashes of the first and the last one; and of the tour's ranges `names` and `held`.
"""

Record = dict[str, dict[str, Entry]]
"""The lines by path, then by range, as in "797-1036"."""


@dataclass(frozen=True)
class LineRange:
    """A link of our texts to lines of one of vLLM's files.

    `begins`, `ends`: the statements that the text says are there, "" if it does not. `row`: the
    rest of the table row, in the reading tour.
    """

    where: str
    path: str
    first: int
    last: int
    begins: str = ""
    ends: str = ""
    row: str = ""

    @property
    def lines(self) -> str:
        """The range as a key of the record."""
        return f"{self.first}-{self.last}"

    @property
    def row_names(self) -> set[str]:
        """The names that the row explains or uses, without those of our own column."""
        cells = self.row.split(" | ")
        said = " ".join([*cells[:1], *cells[3:]])
        return {name for code in CODE.findall(said) for name in re.findall(r"[A-Za-z_]\w*", code)}


def line_ranges(name: str, text: str, version: str) -> Iterator[LineRange]:
    """Yield the ranges that one of our Markdown files links to, at this version of vLLM."""
    if not name.endswith(".md"):
        return
    for number, line in enumerate(text.splitlines(), start=1):
        for match in LINK.finditer(line):
            if match["release"] != f"v{version}":
                continue
            is_row = name.startswith(TOUR) and line.startswith("| ")
            yield LineRange(
                f"{name}:{number}",
                match["path"],
                int(match["first"]),
                int(match["last"] or match["first"]),
                (match["begins"] or "") if is_row else "",
                (match["ends"] or "") if is_row else "",
                line[match.end() :].partition(" | ")[2] if is_row else "",
            )


# vLLM's source


def label(node: ast.AST) -> str:
    """Return the name of a statement."""
    if isinstance(node, ast.ClassDef):
        return f"class {node.name}"
    if isinstance(node, ast.FunctionDef):
        return f"def {node.name}"
    if isinstance(node, ast.AsyncFunctionDef):
        return f"async def {node.name}"
    code = ast.unparse(node).partition("\n")[0]
    keyword = re.match(r"(?:async )?(?:for|while|if|with|try|except|return|raise|assert|break|continue)\b", code)
    names = NAME.findall(code[keyword.end() :] if keyword else code)
    first = next((name for name in names if name not in KEYWORDS), "").removeprefix("self.")
    return f"{keyword[0].split()[-1]} {first}".strip() if keyword else first


def ends_of(tree: ast.AST, first: int, last: int) -> tuple[str, str]:
    """Return the names of the statements at a range's ends; the second is "" if they are one
    statement, both are if no statements of one block fill the range.
    """
    for node in ast.walk(tree):
        for field in BLOCKS:
            block = getattr(node, field, None)
            if not isinstance(block, list):
                continue
            begins = next((each for each in block if getattr(each, "lineno", None) == first), None)
            ends = next((each for each in block if getattr(each, "end_lineno", None) == last), None)
            if begins is not None and ends is not None:
                return label(begins), "" if begins is ends else label(ends)
    return "", ""


def names_in(tree: ast.AST, first: int, last: int) -> set[str]:
    """Return the attributes, functions and constants in these lines that are vLLM's own."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if not first <= getattr(node, "lineno", 0) <= last:
            continue
        if isinstance(node, ast.Attribute) and ast.unparse(node).split(".")[0] not in LIBRARIES:
            names.add(node.attr)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            names.add(node.func.id)
        elif isinstance(node, ast.Name) and node.id.isupper() and len(node.id) > 1:
            names.add(node.id)
    return names - COMMON


def within(tree: ast.AST, first: int, last: int) -> str:
    """Return the innermost function or class around these lines, as `Class.method`; "" is the module."""
    for child in ast.iter_child_nodes(tree):
        if getattr(child, "lineno", last) < first and last <= getattr(child, "end_lineno", 0):
            deeper = within(child, first, last)
            named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            return ".".join(filter(None, (child.name, deeper))) if named else deeper
    return ""


def stripped(source: str) -> list[str]:
    """Return lines without what an indentation or a formatter changes."""
    return [line.strip() for line in source.splitlines()]


def hash_of(lines: list[str]) -> str:
    """Return a short hash of lines."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def record_of(ranges: Iterable[LineRange], sources: Mapping[str, str]) -> Record:
    """Return the record of these ranges; what vLLM does not have is left out."""
    record: Record = {}
    trees: dict[str, ast.Module] = {}
    for each in sorted(ranges, key=lambda one: (one.path, one.first, one.last, one.where)):
        source = sources.get(each.path, "")
        if not each.first <= each.last <= source.count("\n"):
            continue
        if each.path not in trees:
            trees[each.path] = ast.parse(source if each.path.endswith(".py") else "")
        tree = trees[each.path]
        begins, ends = ends_of(tree, each.first, each.last)
        entry = record.setdefault(each.path, {}).setdefault(each.lines, {"begins": begins, "ends": ends})
        entry["within"] = within(tree, each.first, each.last)
        lines = stripped(source)[each.first - 1 : each.last]
        entry["text"] = hash_of(lines)
        entry["edges"] = f"{hash_of(lines[:1])} {hash_of(lines[-1:])}"
        if each.row:
            words = set(re.findall(r"\w+", "\n".join(source.splitlines()[each.first - 1 : each.last])))
            entry["names"] = " ".join(sorted(names_in(tree, each.first, each.last)))
            entry["held"] = " ".join(sorted(each.row_names & words | set(entry.get("held", "").split())))
    return record


# The check


def problems(ranges: Iterable[LineRange], record: Record, version: str) -> list[str]:
    """Return one line for each range that is not what the text says."""
    return [f"{each.where}: {words}" for each in ranges if (words := _problem(each, record, version))]


def _problem(each: LineRange, record: Record, version: str) -> str:
    place = f"lines {each.lines} of {each.path} in vLLM {version}"
    entry = record.get(each.path, {}).get(each.lines)
    if entry is None:
        return f"{place} are not in the list"
    if each.begins and (each.begins, each.ends) != (entry["begins"], entry["ends"]):
        there = " to ".join(f"`{name}`" for name in (entry["begins"], entry["ends"]) if name)
        said = " to ".join(f"`{name}`" for name in (each.begins, each.ends) if name)
        return f"{place} are {there or 'not whole statements'}, the text says {said}"
    strangers = sorted(each.row_names - set(entry.get("held", "").split())) if each.row else []
    return f"{', '.join(strangers)} not in {place}" if strangers else ""


def unexplained(each: LineRange, record: Record, explained: set[str]) -> list[str]:
    """Return the names in a row's lines that neither the row nor `explained` has."""
    entry = record.get(each.path, {}).get(each.lines, {})
    return sorted(set(entry.get("names", "").split()) - each.row_names - explained)


def unexplained_names(ranges: Iterable[LineRange], record: Record, texts: Mapping[str, str]) -> list[str]:
    """Return one line for each row of the tour whose lines have names that it does not explain, no
    lesson uses, and our file beside it does not have.
    """
    lessons = (text for name, text in texts.items() if LESSON.fullmatch(name))
    taught = {word for text in lessons for word in WORD.findall(text)}
    wrong = []
    for each in ranges:
        page = each.where.rpartition(":")[0]
        files = [texts.get(path, "") for path in OUR_FILE.findall(each.row)]
        beside = {word for text in (texts[page], *files) for word in WORD.findall(text)}
        names = unexplained(each, record, taught | beside) if each.row else []
        if names:
            wrong.append(f"{each.where}: lines {each.lines} also have {', '.join(names)}: say what each is")
    return wrong


# Another release


@dataclass(frozen=True)
class Fate:
    """Say what became of a range in another release: it is the same, has moved, was changed, or is
    gone.

    `path`, `lines`: where it is now, as far as that can be told.
    """

    what: str
    path: str = ""
    lines: str = ""


def fate(path: str, lines: str, entry: Entry, sources: Mapping[str, str]) -> Fate:
    """Return what became of one range of the record in this source."""
    first, last = map(int, lines.split("-"))
    if path in sources and hash_of(stripped(sources[path])[first - 1 : last]) == entry["text"]:
        return Fate("same", path, lines)
    name = path.rpartition("/")[2]
    places = [path] if path in sources else [other for other in sources if other.rpartition("/")[2] == name]
    for place in places:
        text = stripped(sources[place])
        for start in range(len(text) - last + first):
            if hash_of(text[start : start + last - first + 1]) == entry["text"]:
                return Fate("moved", place, f"{start + 1}-{start + last - first + 1}")
    return _changed(entry, last - first, places, sources)


def _changed(entry: Entry, length: int, places: list[str], sources: Mapping[str, str]) -> Fate:
    """Find the first and the last line of a range in the function that it was in, or else the
    statements; of several, the ones whose distance is most like the old one.
    """
    for place in places:
        scope = _scope(ast.parse(sources[place] if place.endswith(".py") else ""), entry["within"])
        if scope is None:
            continue
        ranges = [*_by_edges(scope, stripped(sources[place]), entry["edges"])]
        ranges = ranges or [*_by_labels(scope, entry["begins"], entry["ends"])]
        if ranges:
            first, last = min(ranges, key=lambda each: abs(each[1] - each[0] - length))
            return Fate("changed", place, f"{first}-{last}")
        if not entry["begins"]:
            return Fate("changed", place)
    return Fate("gone")


def _scope(tree: ast.AST, name: str) -> ast.AST | None:
    for part in filter(None, name.split(".")):
        named = [each for each in ast.walk(tree) if getattr(each, "name", "") == part and hasattr(each, "body")]
        if not named:
            return None
        tree = named[0]
    return tree


def _by_edges(scope: ast.AST, text: list[str], edges: str) -> Iterator[tuple[int, int]]:
    """Yield the lines from each one like the first to each one like the last."""
    hashes = [hash_of([line]) for line in text]
    first, last = edges.split()
    begin, end = getattr(scope, "lineno", 1), getattr(scope, "end_lineno", len(text))
    for start in range(begin, end + 1):
        if hashes[start - 1] == first:
            yield from ((start, stop) for stop in range(start, end + 1) if hashes[stop - 1] == last)


def _by_labels(scope: ast.AST, begins: str, ends: str) -> Iterator[tuple[int, int]]:
    """Yield the lines of the runs of statements from one label to the other."""
    for node in ast.walk(scope):
        for field in BLOCKS:
            block = getattr(node, field, None)
            for index, statement in enumerate(block if isinstance(block, list) else ()):
                if label(statement) == begins:
                    last = next((each for each in block[index:] if label(each) == (ends or begins)), None)
                    if last is not None:
                        yield statement.lineno, last.end_lineno or last.lineno
