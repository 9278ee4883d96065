"""Find which functions reach which others, by the names in their source, without running anything."""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping, Set


@functools.lru_cache(maxsize=16)  # a lesson's checks ask for the same files, each of them
def names_in(source: str) -> Mapping[str, frozenset[str]]:
    """Return the names and attributes used in each function and class of a file, keyed by its name."""
    parts = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    ]
    return {part.name: frozenset(_name(node) for node in ast.walk(part)) for part in parts}


def _name(node: ast.AST) -> str:
    return getattr(node, "id", getattr(node, "attr", ""))


def joined(*files: Mapping[str, Set[str]]) -> dict[str, set[str]]:
    """Merge the names of several files, as `names_in` returns them."""
    return {name: set().union(*(file.get(name, ()) for file in files)) for name in set().union(*files)}


def reached(start: str, named: Mapping[str, Set[str]]) -> dict[str, int]:
    """Return the functions that `start` reaches, itself included, each with the number of functions
    nearer to it; `named` is as returned by `names_in`.
    """
    distance, latest = {}, {start} & named.keys()
    while latest:
        distance |= dict.fromkeys(latest, len(distance))
        latest = set().union(*(named[name] for name in latest)) & named.keys() - distance.keys()
    return distance
