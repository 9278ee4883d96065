"""Compare pictures by what they show, not by the bytes of their files."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

HALF_A_PIXEL = 0.5
NUMBER = re.compile(r"(?<![\w#.])[-−+]?\d+(?:\.\d+)?(?![\w.])")
COORDINATE = re.compile(r"[-+]?\d*\.?\d+(?:e[-+]?\d+)?")
DESCRIPTION = ".//{http://purl.org/dc/elements/1.1/}description"
WORDS = ("aria-label", "class", "fill", "font-family", "stroke")


def differences(drawn: str, shown: str) -> list[str]:
    """Return how two drawings of our own SVG differ, one line each, or nothing if a reader could
    not tell them apart.

    Elements, their order, words and whole numbers must be equal. Coordinates may be half a pixel
    apart, and decimals in words one unit of their last digit, because other machines round sums
    differently.
    """
    return list(_element_differences(ET.fromstring(drawn), ET.fromstring(shown), "svg"))


def _element_differences(drawn: ET.Element, shown: ET.Element, place: str) -> Iterator[str]:
    if drawn.tag != shown.tag or drawn.keys() != shown.keys() or len(drawn) != len(shown):
        yield f"{place}: <{_outline(drawn)}> and <{_outline(shown)}>"
        return
    for name, value in drawn.items():
        same = _same_words if name in WORDS else _same_coordinates
        if not same(value, shown.get(name, "")):
            yield f"{place}: {name}={value[:80]!r} and {shown.get(name, '')[:80]!r}"
    for mine, theirs in ((drawn.text, shown.text), (drawn.tail, shown.tail)):
        if not _same_words(mine or "", theirs or ""):
            yield f"{place}: {mine!r} and {theirs!r}"
    for index, (mine, theirs) in enumerate(zip(drawn, shown, strict=True)):
        yield from _element_differences(mine, theirs, f"{place}/{_name(mine)}[{index}]")


def _name(element: ET.Element) -> str:
    return element.tag.rpartition("}")[2]


def _outline(element: ET.Element) -> str:
    return f"{_name(element)} {' '.join(element.keys())}> with {len(element)} parts"


def _same_words(word: str, other: str) -> bool:
    if NUMBER.sub("#", word) != NUMBER.sub("#", other):
        return False
    return all(map(_same_number, NUMBER.findall(word), NUMBER.findall(other)))


def _same_number(number: str, other: str) -> bool:
    decimals, others = (len(each.partition(".")[2]) for each in (number, other))
    apart = abs(float(number.replace("−", "-")) - float(other.replace("−", "-")))
    return decimals == others and apart <= (1.5 * 10**-decimals if decimals else 0)


def _same_coordinates(coordinates: str, other: str) -> bool:
    if COORDINATE.sub("#", coordinates) != COORDINATE.sub("#", other):
        return False
    pairs = zip(COORDINATE.findall(coordinates), COORDINATE.findall(other), strict=True)
    return all(abs(float(a) - float(b)) <= HALF_A_PIXEL for a, b in pairs)


def contents(path: Path) -> list[dict[str, Any]]:
    """Read what each panel of a figure shows, from the data that `minivllm_lab.pictures.figures.panels`
    stores in it.
    """
    description = ET.parse(path).find(DESCRIPTION)
    assert description is not None, f"{path.name} does not say what it shows: draw it again"
    return json.loads(description.text or "")


def contents_differ(drawn: Any, shown: Any, place: str = "panels") -> list[str]:
    """Return how the contents of two figures differ: words must be equal, numbers within a
    thousandth.
    """
    if isinstance(drawn, dict) and isinstance(shown, dict) and drawn.keys() == shown.keys():
        return [line for key in drawn for line in contents_differ(drawn[key], shown[key], f"{place}.{key}")]
    if isinstance(drawn, list) and isinstance(shown, list):
        pairs = enumerate(zip_longest(drawn, shown))
        return [line for index, pair in pairs for line in contents_differ(*pair, f"{place}[{index}]")]
    if isinstance(drawn, float | int) and isinstance(shown, float | int):
        same = abs(drawn - shown) <= 1e-3 * max(abs(drawn), abs(shown), 1e-9)
    else:
        same = drawn == shown
    return [] if same else [f"{place}: {drawn!r} and {shown!r}"]
