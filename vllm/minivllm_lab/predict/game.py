"""The game in a terminal: draw a round, take a prediction, say what vLLM decided and why."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable

from rich.text import Text

from minivllm.errors import MinivllmError
from minivllm_lab.cli import Parser, run, seed, whole_number
from minivllm_lab.predict.answer import HOW, diagnose, is_right, parse
from minivllm_lab.predict.describe import explain, facts, state_of
from minivllm_lab.predict.endless import endless
from minivllm_lab.predict.levels import LEVELS, load
from minivllm_lab.predict.rounds import Decision, Round, Row
from minivllm_lab.tables import console

MOST_CELLS = 24
DOC = """Predict the next step of vLLM's scheduler.

A round shows a state of vLLM v0.33.0's scheduler as it was recorded: the running and the waiting requests, how
many tokens of each are computed, the token budget, the free blocks. Type how many tokens each
request gets in the next step, and who is preempted:

    A 1 C 8 -B        A gets 1 token, C gets 8, B is preempted, and the others get nothing
    none              nobody gets a token
    ?                 show the answer; the round counts as missed
    q                 end

The answer is what vLLM decided. A wrong prediction is answered with the rule that it missed.
"""


def main() -> None:
    """Read the command line and play."""
    parser = Parser(prog="predict", description=DOC, formatter_class=argparse.RawDescriptionHelpFormatter)
    titles = ", ".join(f"{number} {level.title}" for number, level in enumerate(LEVELS, start=1))
    parser.add_argument("--level", type=whole_number(1, len(LEVELS)), help=f"play one level only: {titles}")
    parser.add_argument(
        "--endless",
        action="store_true",
        help="random workloads and our scheduler, without end (default: level 1)",
    )
    parser.add_argument("--seed", type=seed, default=0, help="seed of the random workloads (default: 0)")
    run(_play, parser)


def _play(arguments: argparse.Namespace) -> None:
    if arguments.endless:
        level = (arguments.level or 1) - 1
        _play_rounds(endless(level, arguments.seed), f"{LEVELS[level].title}, without end", "our scheduler")
        return
    levels = load()
    chosen = range(len(LEVELS)) if arguments.level is None else [arguments.level - 1]
    for index in chosen:
        title = f"Level {index + 1} of {len(LEVELS)}: {LEVELS[index].title} (after lesson {LEVELS[index].lesson})"
        if not _play_rounds(levels[index], title, "vLLM"):
            return


def _play_rounds(rounds: Iterable[Round], title: str, whose: str) -> bool:
    """Play rounds and print the score. Return whether the player wants to go on."""
    console.print(f"\n[bold]{title}[/bold]\n{HOW[0].upper()}{HOW[1:]}.", highlight=False)
    right = played = 0
    started = time.perf_counter()
    for number, puzzle in enumerate(rounds, start=1):
        console.print(f"\n[bold]Round {number}[/bold]")
        _draw(puzzle)
        answer = _ask(puzzle)
        if answer is None:
            _score(right, played, started)
            return False
        played += 1
        right += _reply(answer, puzzle, whose)
    _score(right, played, started)
    return True


def _draw(puzzle: Round) -> None:
    console.print(facts(puzzle))
    longest = max(row.known for row in puzzle.requests.values())
    for name, rows in (("running", puzzle.running), ("waiting", puzzle.waiting)):
        for index, row in enumerate(rows):
            console.print(Text.assemble(f"{name if index == 0 else '':8}", *_bar(row, longest, puzzle)))


def _bar(row: Row, longest: int, puzzle: Round) -> list[str | tuple[str, str]]:
    scale = min(1.0, MOST_CELLS / longest)
    known = max(1, round(row.known * scale))
    computed = min(known - 1, round(row.done * scale))
    return [
        (f" {row.name} ", "bold"),
        ("█" * computed, "cyan"),
        ("░" * (known - computed), "yellow"),
        f" {state_of(row, puzzle)}",
    ]


def _ask(puzzle: Round) -> Decision | str | None:
    """Return the prediction; "?" to be shown the answer, None to end."""
    while True:
        try:
            line = input("your prediction> ").strip()
        except EOFError:
            return None
        if line.lower() in ("q", "quit", "exit"):
            return None
        if line == "?":
            return "?"
        try:
            return parse(line, puzzle)
        except MinivllmError as error:
            print(error, file=sys.stderr)


def _reply(answer: Decision | str, puzzle: Round, whose: str) -> bool:
    """Say whether a prediction is right, and why. Return whether it is."""
    right = not isinstance(answer, str) and is_right(answer, puzzle)
    if right:
        console.print("[bold green]Right.[/bold green]")
    else:
        tokens = " ".join(f"{name} {count}" for name, count in puzzle.decision.tokens.items()) or "none"
        victims = "".join(f" -{name}" for name in sorted(puzzle.decision.preempted))
        console.print(f"[bold red]{whose} decided:[/bold red] {tokens}{victims}")
        if not isinstance(answer, str):
            for sentence in diagnose(answer, puzzle):
                console.print(f"  {sentence}", markup=False)
    for sentence in explain(puzzle):
        console.print(f"  {sentence}", style="dim", markup=False)
    console.print(f"  ({puzzle.source})", style="dim", markup=False)
    return right


def _score(right: int, played: int, started: float) -> None:
    if played:
        minutes = (time.perf_counter() - started) / 60
        console.print(f"\n[bold]{right} of {played} right[/bold], {minutes:.1f} minutes")
