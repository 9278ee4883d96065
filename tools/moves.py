"""Find the fewest turns of a widget's knobs that lead from one state to a goal.

    uv run python tools/moves.py "speculative_decoding?batch=32" broken batch,k,context

A move turns one knob by one place, as an arrow key does. The goal is `broken` or `fine`, the tone of
the widget's verdict, or `challenge 1` to `challenge 3`. The search goes through all states in the
order of their distance, so what it finds first is the fewest.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any
from urllib.parse import parse_qsl

from minivllm.errors import MinivllmError
from minivllm_lab.cli import Parser, run
from widgets.shell.knobs import Knob, Value
from widgets.shell.spec import Spec

MOST_MOVES = 12
Moves = tuple[str, ...]


def spec_of(name: str) -> Spec:
    """Return a widget's specification.

    Raises:
        MinivllmError: there is no such widget.
    """
    try:
        return import_module(f"widgets.{name}").SPEC
    except (ModuleNotFoundError, AttributeError) as error:
        raise MinivllmError(f"there is no widget {name!r}") from error


def start_of(link: str) -> tuple[Spec, dict[str, Value]]:
    """Return the widget of a link such as `kv_cache?gpu=H100`, and the values of all its knobs."""
    name, _, query = link.partition("?")
    spec = spec_of(name)
    named = {knob: value_of(spec.flat().get(knob), text) for knob, text in parse_qsl(query)}
    return spec, spec.start() | spec.accept(named)


def value_of(knob: Knob | None, text: str) -> Any:
    """Return a knob's value for a text of an address, as the site's page does."""
    known = {str(value): value for value in knob.places()} if knob and knob.kind not in ("entry", "switch") else {}
    return known.get(text, text)


def goal_of(spec: Spec, goal: str) -> Callable[[Any], bool]:
    """Return the function that tells whether a state meets a goal.

    Raises:
        MinivllmError: it is not a goal.
    """
    if goal in ("broken", "fine"):
        return lambda state: spec.verdict(state).tone == goal
    word, _, number = goal.partition(" ")
    if word == "challenge" and number in ("1", "2", "3"):
        return lambda state: spec.challenges[int(number) - 1].check(state).met
    raise MinivllmError(f"{goal!r} is not a goal: say broken, fine or challenge 1 to challenge 3")


def turns(spec: Spec, values: dict[str, Value], knobs: tuple[str, ...]) -> Iterator[tuple[str, dict[str, Value]]]:
    """Yield each state that is one move away, with the words for the move."""
    flat = spec.flat()
    for name in knobs:
        places = flat[name].places()
        at = places.index(values[name])
        for other in (at - 1, at + 1):
            if 0 <= other < len(places):
                yield f"{name} {flat[name].words(places[other])}", values | {name: places[other]}


def fewest_moves(link: str, goal: str, knobs: tuple[str, ...], most: int = MOST_MOVES) -> Moves:
    """Return one shortest row of moves from a link's state to a goal.

    Raises:
        MinivllmError: a knob is unknown, or no row of `most` moves leads there.
    """
    spec, start = start_of(link)
    met = goal_of(spec, goal)
    if unknown := [name for name in knobs if name not in spec.flat()]:
        raise MinivllmError(f"{spec.name} has no knob {', '.join(unknown)}; it has {', '.join(spec.flat())}")
    seen = {tuple(start.values())}
    waiting: deque[tuple[dict[str, Value], Moves]] = deque([(start, ())])
    while waiting:
        values, moves = waiting.popleft()
        if met(spec.complete(**values)):
            return moves
        for words, further in turns(spec, values, knobs) if len(moves) < most else ():
            if tuple(further.values()) not in seen:
                seen.add(tuple(further.values()))
                waiting.append((further, (*moves, words)))
    raise MinivllmError(f"no {most} moves of {', '.join(knobs)} lead from {link} to {goal}")


def main(arguments: argparse.Namespace) -> None:
    moves = fewest_moves(arguments.link, arguments.goal, tuple(arguments.knobs.split(",")), arguments.most)
    print(f"{len(moves)} moves: {' · '.join(moves)}")


def parser() -> argparse.ArgumentParser:
    flags = Parser(prog="moves", description=__doc__)
    flags.add_argument("link", help="the widget and its first state: kv_cache?gpu=H100")
    flags.add_argument("goal", help="broken, fine or challenge 1 to challenge 3")
    flags.add_argument("knobs", help="the knobs that may turn: batch,k")
    flags.add_argument("--most", type=int, default=MOST_MOVES, help=f"give up beyond (default: {MOST_MOVES})")
    return flags


if __name__ == "__main__":
    run(main, parser())
