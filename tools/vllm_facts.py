"""Collect what our texts say of vLLM beside paths and lines: flags, metrics, log lines, defaults, and
names without a path; and look each of them up in vLLM's source.

Each kind has a rule for our texts and a rule for the source:

- flags: `--max-num-seqs` in backticks, or in a `vllm serve` command; a field of vLLM's argument
  classes, or a string in its code.
- metrics: `vllm:num_requests_running`, and the names that our engine exposes.
- logs: the lines and quotations under "On call"; the strings of vLLM's code, in which any value may
  stand for a placeholder.
- names: identifiers in backticks that our code does not have, in a sentence without a path.
- defaults: the sentences in `vllm_facts.toml`, and the arguments of our engine and server.
- parameters: `tests/offline/vllm_signatures.json`, the signatures that offline scripts use.

`vllm_names.py` keeps what it found in its list; `drift.py` looks it up in another release.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LEDGER = Path(__file__).with_suffix(".toml")
SIGNATURES = ROOT / "tests" / "offline" / "vllm_signatures.json"
KINDS = ("flags", "metrics", "logs", "names", "defaults", "parameters")
PAGES = re.compile(r"lessons/(?!exercises|bugs)[\w/]*\w\.md|README\.md|ARCHITECTURE\.md|vllm/minivllm/\w+\.md")
ARGUMENTS = re.compile(r"vllm/engine/arg_utils\.py|vllm/entrypoints/(?:\w+/)*cli_args\.py")
CONFIGS = re.compile(r"vllm/config/\w+\.py")
THEIR_ARGUMENTS = (
    "vllm/engine/arg_utils.py EngineArgs",
    "vllm/entrypoints/common/cli_args.py FrontendArgs",
    "vllm/entrypoints/common/cli_args.py BaseFrontendArgs",
)
OUR_ARGUMENTS = (
    ("vllm/minivllm/engine/arg_utils.py", "EngineArgs"),
    ("vllm/minivllm/entrypoints/openai/settings.py", "HttpArgs"),
    ("vllm/minivllm/entrypoints/openai/settings.py", "FrontendArgs"),
)

CODE = re.compile(r"`([^`\n]+)`")
FENCE = re.compile(r"^```(\w*).*?\n(.*?)^```", re.DOTALL | re.MULTILINE)
FLAG = re.compile(r"(?<![\w-])(--[a-z][\w-]*|-(?:[dpt]p|O(?=\d)))")
FLAG_STRING = re.compile(r"""["'](--?[a-zA-Z][\w-]*)["']""")
FIELD = re.compile(r"^    (\w+): ", re.MULTILINE)
METRIC = re.compile(r"(?<!mini)vllm:[a-z]\w*[a-z]")
SUFFIX = re.compile(r"_(?:total|count|sum|bucket|created)$")
NAME = re.compile(r"(?:self\.)?([A-Za-z_]\w*(?:\.\w+)*)(?:\(.*\)|=.*)?")
JSON_WORD = re.compile(r'"([A-Za-z_]\w*)"')
ON_CALL = re.compile(r"^## On call\n(.*?)(?=^## |\Z)", re.DOTALL | re.MULTILINE)
QUOTED = re.compile(r'"([^"\n]{8,})"')
LABEL = re.compile(r"[A-Z][a-z]+[A-Z \w].*|[A-Z][a-z]{3,}s?")
PLACEHOLDER = re.compile(
    r"%(?:\(\w+\))?[-+ #0]*[\d.]*[a-zA-Z]|\[[^\]]*\]|\{[^{}]*\}|\b[A-Z]{2,}[A-Z0-9_]*\b|\d+(?:,\d{3})*(?:\.\d+)?"
)
WORDS = re.compile(r"[A-Za-z_]{3,}")
DEFAULT = re.compile(r"\b[Dd]efaults?\b")
THEIR_DEFAULT = re.compile(r"vLLM's default\b")

Facts = dict[str, dict[str, str]]
"""Facts of vLLM's source by kind: the value of a default, and the file of any other fact."""


@dataclass(frozen=True)
class Passage:
    """A sentence or table cell of our texts, and its location."""

    where: str
    text: str


@dataclass(frozen=True)
class Claim:
    """Something that our texts say of vLLM, or that may be our own: `kind` and `text` are keys of Facts."""

    kind: str
    text: str
    where: str


@dataclass(frozen=True)
class Default:
    """An entry of the ledger: a value in vLLM's source, and the words by which our texts state it."""

    path: str
    name: str
    value: str
    said: tuple[str, ...]

    @property
    def key(self) -> str:
        return f"{self.path} {self.name}"


@dataclass(frozen=True)
class Ledger:
    """Hold what `vllm_facts.toml` says: `defaults`; `apart`, sentences with "default" that state none
    of vLLM's values; `gone`, what our texts say vLLM no longer has; `foreign`, flags and names of
    others.
    """

    defaults: tuple[Default, ...] = ()
    apart: tuple[str, ...] = ()
    gone: frozenset[str] = frozenset()
    foreign: frozenset[str] = frozenset()


def read_ledger(text: str) -> Ledger:
    """Read the ledger."""
    data = tomllib.loads(text)
    defaults = (Default(each["path"], each["name"], each["value"], tuple(each["said"])) for each in data["default"])
    return Ledger(tuple(defaults), tuple(data["apart"]), frozenset(data["gone"]), frozenset(data["foreign"]))


# Our texts


def claims(texts: Mapping[str, str], passages: Iterable[Passage], ledger: Ledger) -> list[Claim]:
    """Return every claim of our texts; `passages` are their sentences and table cells."""
    ours = our_words(texts)
    collected = [Claim("defaults", each.key, LEDGER.name) for each in ledger.defaults]
    for each in passages:
        if PAGES.fullmatch(each.where.rpartition(":")[0]):
            collected += spans(each, ours)
    for name, text in texts.items():
        if PAGES.fullmatch(name):
            collected += commands(name, text)
            collected += log_lines(name, text)
        if not name.startswith(("tools/", "tests/test_vllm")):
            collected += (
                Claim("metrics", SUFFIX.sub("", match[0]), _where(name, text, match)) for match in METRIC.finditer(text)
            )
    return list(dict.fromkeys(collected))


def _where(name: str, text: str, match: re.Match) -> str:
    return f"{name}:{text.count(chr(10), 0, match.start()) + 1}"


def our_words(texts: Mapping[str, str]) -> set[str]:
    """Return the words of our Python files."""
    return {word for name, text in texts.items() if name.endswith(".py") for word in re.findall(r"\w+", text)}


def spans(passage: Passage, ours: set[str]) -> Iterator[Claim]:
    """Yield the flags in backticks of a passage, names that are not ours, and of metrics those that it
    shortens, as in "`vllm:spec_decode_num_drafts`, `_num_draft_tokens`".
    """
    metric = METRIC.search(passage.text)
    for code in CODE.findall(passage.text):
        if code.startswith("-"):
            yield from (Claim("flags", flag, passage.where) for flag in FLAG.findall(code))
        elif metric and code.startswith("_"):
            start = metric[0].find(code[: code.find("_", 1)])
            yield Claim("metrics", SUFFIX.sub("", metric[0][:start] + code), passage.where)
        elif name := NAME.fullmatch(code):
            leaf = name[1].rpartition(".")[2]
            if re.search(r"[_A-Z]", leaf) and leaf not in ours:
                yield Claim("names", leaf, passage.where)


def commands(name: str, text: str) -> Iterator[Claim]:
    """Yield the flags of `vllm` commands in a page's fences, and the keys and values of their JSON."""
    for fence in FENCE.finditer(text):
        for line in fence[2].splitlines():
            if line.startswith("vllm "):
                where = _where(name, text, fence)
                yield from (Claim("flags", flag, where) for flag in FLAG.findall(line))
                yield from (Claim("names", word, where) for word in JSON_WORD.findall(line))


def log_lines(name: str, text: str) -> Iterator[Claim]:
    """Yield the pieces of log lines and messages that a page's section "On call" quotes."""
    for section in ON_CALL.finditer(text):
        lines = [line for kind, body in FENCE.findall(section[1]) if kind == "text" for line in unwrapped(body)]
        prose = FENCE.sub("", section[1])
        lines += [quoted for quoted in QUOTED.findall(prose) if " " in quoted]
        lines += [code for code in CODE.findall(prose) if LABEL.fullmatch(code)]
        for line in lines:
            if not line.startswith("vllm "):
                yield from (Claim("logs", piece, _where(name, text, section)) for piece in pieces(line))


def unwrapped(text: str) -> list[str]:
    """Return lines in which one that ends in a comma is joined with the next."""
    return re.sub(r",\n", ", ", text).splitlines()


def pieces(line: str) -> Iterator[str]:
    """Yield the parts of a log line that say something, with # for each value and … where we left
    words out.
    """
    for part in re.split(r", |(?<=#): ", form(line)):
        words = WORDS.findall(part)
        if len(words) > 1 or any(len(word) > 9 for word in words):
            yield part.strip(" .:…")


def form(text: str) -> str:
    """Return a message with # for each number, list, placeholder and word in capitals."""
    return PLACEHOLDER.sub("#", text.replace("%%", "\0")).replace("\0", "%")


def unstated(texts: Mapping[str, str], passages: Iterable[Passage], ledger: Ledger) -> list[str]:
    """Return one line for each passage that states a default of which the ledger knows nothing, and for
    each entry that no text states.
    """
    phrases = [phrase for each in ledger.defaults for phrase in each.said] + list(ledger.apart)
    wrong = [
        f"{each.where}: {LEDGER.name} does not have this default: {each.text[:80]}"
        for each in passages
        if states_default(each) and not any(phrase in each.text for phrase in phrases)
    ]
    everything = "\n".join(" ".join(text.split()) for name, text in texts.items() if not name.startswith("tools/"))
    return wrong + [f"{LEDGER.name}: no text says {phrase!r}" for phrase in phrases if phrase not in everything]


def states_default(passage: Passage) -> bool:
    """Return whether a passage of a lesson speaks of a default, or one elsewhere of vLLM's default."""
    name = passage.where.rpartition(":")[0]
    if name.endswith(".py"):
        return THEIR_DEFAULT.search(passage.text) is not None and not name.startswith(("tests/", "tools/"))
    return (
        name.startswith("lessons/") and PAGES.fullmatch(name) is not None and DEFAULT.search(passage.text) is not None
    )


# vLLM's source


def facts_of(claimed: Iterable[Claim], sources: Mapping[str, str], ledger: Ledger) -> Facts:
    """Return those of these claims that a release's source has."""
    texts: dict[str, set[str]] = {kind: set() for kind in KINDS}
    for each in claimed:
        texts[each.kind].add(each.text)
    code = {path: text for path, text in sorted(sources.items()) if path.startswith("vllm/") and path.endswith(".py")}
    flags = _places(code, flags_of)
    metrics = _places(code, lambda _, text: {SUFFIX.sub("", name) for name in METRIC.findall(text)})
    names = _places(code, lambda _, text: texts["names"].intersection(re.findall(r"\w+", text)))
    return {
        "flags": {flag: flags[known] for flag in texts["flags"] | ledger.gone if (known := _known(flag, flags))},
        "metrics": {name: metrics[name] for name in texts["metrics"] if name in metrics},
        "logs": {piece: path for piece in texts["logs"] if (path := _log_place(piece, code))},
        "names": {name: names[name] for name in texts["names"] if name in names},
        "defaults": defaults_of(ledger, sources),
        "parameters": flat(signatures(committed_signatures(), sources)),
    }


def _places(code: Mapping[str, str], held: Any) -> dict[str, str]:
    """Map each thing that files hold to the first file that does."""
    places: dict[str, str] = {}
    for path, text in code.items():
        for each in held(path, text):
            places.setdefault(each, path)
    return places


def flags_of(path: str, text: str) -> set[str]:
    """Return the flags that a file of vLLM's defines."""
    flags = set(FLAG_STRING.findall(text))
    if ARGUMENTS.fullmatch(path):
        flags |= {"--" + field.replace("_", "-") for field in FIELD.findall(text)}
    return flags


def _known(flag: str, flags: Mapping[str, str]) -> str:
    return next((name for name in (flag, flag.replace("--no-", "--", 1)) if name in flags), "")


def _log_place(piece: str, code: Mapping[str, str]) -> str:
    words = WORDS.findall(piece)
    for path, text in code.items():
        if all(word in text for word in words) and any(_says(message, piece) for message in _messages(text)):
            return path
    return ""


def _says(message: str, piece: str) -> bool:
    return all(part.strip() in message for part in piece.split("…"))


@functools.lru_cache(maxsize=512)
def _messages(text: str) -> list[str]:
    """Return the forms of all strings of a module."""
    messages = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "#" for part in node.values)
            messages.append(form("".join(map(str, parts))))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            messages.append(form(node.value))
    return messages


# Defaults


def defaults_of(ledger: Ledger, sources: Mapping[str, str]) -> dict[str, str]:
    """Return the value of each entry of the ledger, and of our engine's and server's arguments."""
    values = {each.key: value_of(sources, each.path, each.name) for each in ledger.defaults}
    for name in our_arguments():
        for owner in THEIR_ARGUMENTS:
            path, _, theirs = owner.partition(" ")
            value = value_of(sources, path, f"{theirs}.{name}")
            if value is not None:
                values.setdefault(f"argument {name}", value)
    return {key: value for key, value in values.items() if value is not None}


@functools.cache
def our_arguments() -> dict[str, str]:
    """Map the arguments of our engine and server to their defaults, as text."""
    arguments: dict[str, str] = {}
    for path, owner in OUR_ARGUMENTS:
        for name, value in _fields((ROOT / path).read_text(), owner).items():
            arguments[name] = "" if value is None else _resolved(value, {})
    return arguments


def value_of(sources: Mapping[str, str], path: str, name: str) -> str | None:
    """Return the default of a field (`Class.field`), constant or parameter (`function.parameter`), an
    item of a constant dictionary (`CONSTANT.key`), or the values that a function assigns to a name,
    in order (`function.name`); of a whole function, its numbers. None: the file has no such name, nor
    has one of this name elsewhere if it is not there.
    """
    places = [path] if path in sources else sorted(each for each in sources if Path(each).name == Path(path).name)
    for place in places:
        nodes = _find([_tree(sources[place])], name.split("."))
        if nodes:
            return _value(nodes, sources)
    return None


def _value(nodes: Sequence[ast.AST], sources: Mapping[str, str]) -> str:
    if nodes and isinstance(nodes[-1], ast.FunctionDef | ast.AsyncFunctionDef):
        constants = [each for each in ast.walk(nodes[-1]) if isinstance(each, ast.Constant)]
        constants.sort(key=lambda each: (each.lineno, each.col_offset))
        return " ".join(str(each.value) for each in constants if type(each.value) in (int, float))
    values = [node.value if isinstance(node, ast.Assign | ast.AnnAssign) else node for node in nodes]
    return ", then ".join(_resolved(value, sources) if value else "" for value in values)


def _resolved(value: ast.AST, sources: Mapping[str, str]) -> str:
    """Return a default as text: a field's own for `Field(default=x)`, another class's for `Class.field`."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        if value.func.id == "get_field" and len(value.args) == 2:
            value = ast.Attribute(value.args[0], ast.literal_eval(value.args[1]))
        else:
            value = next((each.value for each in value.keywords if each.arg in ("default", "default_factory")), value)
    if isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name):
        owner = value.value.id
        for path, text in sources.items():
            if CONFIGS.fullmatch(path) and re.search(rf"^class {owner}\b", text, re.MULTILINE):
                return value_of(sources, path, f"{owner}.{value.attr}") or ast.unparse(value)
    return ast.unparse(value)


@functools.lru_cache(maxsize=64)
def _tree(text: str) -> ast.Module:
    return ast.parse(text)


def _find(nodes: Sequence[ast.AST], names: Sequence[str]) -> Sequence[ast.AST]:
    """Return what has this name, below the last of these nodes: a definition, or assignments."""
    if not names or not nodes:
        return nodes
    node, name = nodes[-1], names[0]
    if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
        node = node.value
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return _find([value for key, value in pairs if isinstance(key, ast.Constant) and key.value == name], names[1:])
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        if name in (default := _defaults(node)):
            return [value for value in [default[name]] if value is not None]
        below = sorted(_assignments(node), key=lambda each: each.lineno)
    else:
        below = list(_statements(node))
    return _find([child for child in below if name in _names(child)], names[1:])


def _assignments(node: ast.AST) -> list[ast.Assign | ast.AnnAssign]:
    return [each for each in ast.walk(node) if isinstance(each, ast.Assign | ast.AnnAssign)]


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements of a module or class, and those in its conditions."""
    for child in getattr(node, "body", ()):
        yield child
        if isinstance(child, ast.If | ast.Try):
            yield from _statements(child)


def _names(node: ast.AST) -> set[str]:
    """Return the names that a statement defines or assigns to."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {each.attr if isinstance(each, ast.Attribute) else getattr(each, "id", "") for each in targets}


def _fields(text: str, owner: str) -> dict[str, ast.expr | None]:
    """Return the fields of a class and their defaults."""
    nodes = _find([_tree(text)], [owner])
    fields = (each for each in getattr(nodes[-1], "body", ()) if isinstance(each, ast.AnnAssign)) if nodes else ()
    return {
        each.target.id: each.value
        for each in fields
        if isinstance(each.target, ast.Name) and "ClassVar" not in ast.unparse(each.annotation)
    }


def _defaults(node: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, ast.expr | None]:
    """Return a function's parameters and their defaults."""
    by_place = [*node.args.posonlyargs, *node.args.args]
    values = [None] * (len(by_place) - len(node.args.defaults)) + list(node.args.defaults)
    pairs = [*zip(by_place, values, strict=True), *zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)]
    return {argument.arg: value for argument, value in pairs if argument.arg not in ("self", "cls")}


# Signatures


def committed_signatures() -> dict[str, Any]:
    """Return the committed signatures by file."""
    written = json.loads(SIGNATURES.read_text())
    return {path: owners for path, owners in written.items() if path != "about"}


def signatures(listed: Mapping[str, Any], sources: Mapping[str, str]) -> dict[str, Any]:
    """Return the signatures of the listed functions and classes as a source has them: of each
    parameter or field "required", or the default if it is a literal.
    """
    return {path: {name: _signature(sources.get(path, ""), name) for name in owners} for path, owners in listed.items()}


def _signature(text: str, name: str) -> dict[str, Any]:
    """Return a function's parameters; of a class its fields, or the parameters of its constructor. A
    method that the class does not have may be that of another class, which it inherits from.
    """
    nodes = _find([_tree(text)], name.split("."))
    if not nodes and "." in name:
        method = name.rpartition(".")[2]
        nodes = [each for each in ast.walk(_tree(text)) if isinstance(each, ast.FunctionDef) and each.name == method]
    if nodes and isinstance(nodes[-1], ast.ClassDef):
        fields = _fields(text, name)
        nodes = [] if fields else _find(nodes, ["__init__"])
    elif not nodes:
        return {}
    else:
        fields = {}
    if nodes and isinstance(nodes[-1], ast.FunctionDef | ast.AsyncFunctionDef):
        fields = _defaults(nodes[-1])
    return {field: _literal(value) for field, value in fields.items()}


def _literal(value: ast.expr | None) -> Any:
    if value is None:
        return "required"
    try:
        return {"default": ast.literal_eval(value)}
    except ValueError:
        return {}


def flat(by_path: Mapping[str, Any]) -> dict[str, str]:
    """Return signatures as facts: one for each parameter, whose value is its default as JSON."""
    return {
        f"{path} {owner}.{name}": json.dumps(value["default"]) if "default" in value else str(value or "no literal")
        for path, owners in by_path.items()
        for owner, parameters in owners.items()
        for name, value in parameters.items()
    }


# The check


def problems(
    claimed: Iterable[Claim], facts: Facts, ledger: Ledger, texts: Mapping[str, str], version: str
) -> list[str]:
    """Return one line for each claim that neither vLLM nor our code answers to."""
    own_flags = {flag for name, text in texts.items() if name.endswith(".py") for flag in FLAG_STRING.findall(text)}
    own = own_flags | {"--" + name.replace("_", "-") for name in our_arguments()}
    wrong = [
        f"{each.where}: vLLM {version} has no {each.kind.removesuffix('s')} {each.text}"
        for each in claimed
        if each.text not in facts[each.kind] and each.text not in ledger.gone | ledger.foreign | own
    ]
    values = facts["defaults"]
    wrong += [
        f"{LEDGER.name}: {each.key} is {values.get(each.key)} in vLLM {version}, not {each.value}"
        for each in ledger.defaults
        if values.get(each.key) != each.value
    ]
    return wrong + [
        f"{LEDGER.name}: vLLM {version} has {text}, which our texts call gone"
        for text in ledger.gone & set(facts["flags"])
    ]


def written(facts: Facts) -> dict[str, dict[str, Any]]:
    """Return facts for the list: grouped by file, except defaults; parameters have a list of their own."""
    sections: dict[str, dict[str, Any]] = {}
    for kind in ("flags", "metrics", "logs", "names"):
        grouped: dict[str, list[str]] = {}
        for text, path in sorted(facts[kind].items(), key=lambda item: (item[1], item[0])):
            grouped.setdefault(path, []).append(text)
        sections[kind] = grouped
    return sections | {"defaults": dict(sorted(facts["defaults"].items()))}


def read_facts(sections: Mapping[str, Any]) -> Facts:
    """Read what `written` returned, and the committed signatures."""
    facts: Facts = {
        kind: {text: path for path, held in sections.get(kind, {}).items() for text in held}
        for kind in ("flags", "metrics", "logs", "names")
    }
    return facts | {"defaults": sections.get("defaults", {}), "parameters": flat(committed_signatures())}
