"""Keep results of several kinds of processor in one file: a benchmark replaces those of its own
kind and keeps the others.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

OTHERS = "other_processors"
"""Where the newest record holds those of other kinds, newest first."""


def kind_of(found: dict[str, Any]) -> str:
    """Return the name of a record's processor, its vector instructions and its number of cores."""
    machine = found["machine"]
    vectors = f" ({', '.join(machine['vectors'])})" if machine.get("vectors") else ""
    return f"{machine['cpu']}{vectors}, {machine['cores']} cores"


def all_kinds(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the record and those of other processors inside it."""
    return [{name: value for name, value in found.items() if name != OTHERS}, *found.get(OTHERS, [])]


def with_others(path: str | Path | None, found: dict[str, Any]) -> dict[str, Any]:
    """Return the record, merged with those of other processors in the file at `path`, if there is
    one.
    """
    if path is None:
        return found
    try:
        earlier = json.loads(Path(path).read_text())
    except (OSError, ValueError):
        return found
    if earlier.get("name") != found["name"]:
        return found
    kinds: dict[str, dict[str, Any]] = {}
    for one in (*all_kinds(found), *all_kinds(earlier)):
        kinds.setdefault(kind_of(one), one)  # the newer of two stays
    newest, *others = kinds.values()
    return newest | {OTHERS: others} if others else newest
