"""Which functions lead to which: by the names in their source, without running anything."""

from __future__ import annotations

import ast
from collections.abc import Mapping


def names_in(source: str) -> dict[str, set[str]]:
    """All names and attributes in each function and class of a file, by its name."""
    parts = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    ]
    return {part.name: {getattr(node, "id", getattr(node, "attr", "")) for node in ast.walk(part)} for part in parts}


def joined(*files: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """As `names_in`, of several files together."""
    return {name: set().union(*(file.get(name, ()) for file in files)) for name in set().union(*files)}


def reached(start: str, named: Mapping[str, set[str]]) -> dict[str, int]:
    """What a function leads to, itself included, and how many functions lie nearer to it; `named` as of `names_in`."""
    found, latest = {}, {start} & named.keys()
    while latest:
        found |= dict.fromkeys(latest, len(found))
        latest = set().union(*(named[name] for name in latest)) & named.keys() - found.keys()
    return found
