"""The game in a terminal: draw a round, take a prediction, say what vLLM decided and why."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterable

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from minivllm.errors import MinivllmError
from minivllm_lab.cli import Parser, run, seed, whole_number
from minivllm_lab.predict.answer import HOW, diagnose, is_right, parse
from minivllm_lab.predict.describe import explain, facts, state_of
from minivllm_lab.predict.endless import endless
from minivllm_lab.predict.levels import LEVELS, load
from minivllm_lab.predict.mistakes import FILE
from minivllm_lab.predict.rounds import Decision, Round, Row
from minivllm_lab.tables import MOST_COLUMNS, console

MOST_CELLS = 20
DOC = """Predict the next step of vLLM's scheduler.

A round shows a state of vLLM v0.33.0's scheduler as it was recorded: the running and the waiting requests, how
many tokens of each are computed, the token budget, the free blocks. Type how many tokens each
request gets in the next step, and who is preempted:

    A 1 C 8 -B        A gets 1 token, C gets 8, B is preempted, and the others get nothing
    none              nobody gets a token
    ?                 show the answer; the round counts as missed
    q                 end

The answer is what vLLM decided. A wrong prediction is told the rule that it missed, and you may try once
more before you see the answer.
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
    console.print(f"\n[bold]{title}[/bold]")
    _say(f"{HOW[0].upper()}{HOW[1:]}. The letters are in order of arrival.", indent=0)
    tries: Counter[int] = Counter()
    started = time.perf_counter()
    ended = False
    for number, puzzle in enumerate(rounds, start=1):
        console.print(f"\n[bold]Round {number}[/bold]")
        _draw(puzzle)
        right_at = _take_tries(puzzle, whose)
        ended = right_at is None
        if right_at is None:
            break
        tries[right_at] += 1
    if tries:
        second = f", {tries[2]} more at the second try" if tries[2] else ""
        minutes = (time.perf_counter() - started) / 60
        console.print(f"\n[bold]{tries[1]} of {tries.total()} right{second}[/bold], {minutes:.1f} minutes")
    return not ended


def _draw(puzzle: Round) -> None:
    _say(facts(puzzle), indent=0)
    longest = max(row.known for row in puzzle.requests.values())
    grid = Table.grid(padding=(0, 1))
    for name, rows in (("running", puzzle.running), ("waiting", puzzle.waiting)):
        for index, row in enumerate(rows):
            grid.add_row("" if index else name, Text(row.name, "bold"), _bar(row, longest), state_of(row, puzzle))
    console.print(grid, width=_width())


def _bar(row: Row, longest: int) -> Text:
    scale = min(1.0, MOST_CELLS / longest)
    known = max(1, round(row.known * scale))
    computed = min(known - 1, round(row.done * scale))
    return Text.assemble(("█" * computed, "cyan"), ("░" * (known - computed), "yellow"), no_wrap=True)


def _take_tries(puzzle: Round, whose: str) -> int | None:
    """Take a prediction and, if it is wrong, a second one. Return which was right, 0 for neither,
    None to end.
    """
    for attempt, prompt in enumerate(("your prediction> ", "your second try (Enter shows the answer)> "), start=1):
        answer = _ask(puzzle, prompt, may_skip=attempt == 2)
        if answer is None:
            return None
        if isinstance(answer, str):
            break
        if is_right(answer, puzzle):
            console.print("[bold green]Right.[/bold green]")
            _explain(puzzle)
            return attempt
        for index, (says, rule) in enumerate(diagnose(answer, puzzle)):
            _say(f"{'Or: ' if index else ''}{says} {rule.says}", style="red")
            _say(f"(lesson {rule.lesson}; {FILE}, lines {rule.lines[0]}-{rule.lines[1]})", style="dim")
    decision = puzzle.decision
    tokens = " ".join(f"{name} {count}" for name, count in decision.tokens.items()) or "none"
    victims = "".join(f" -{name}" for name in sorted(decision.preempted))
    console.print(f"[bold red]{whose} decided:[/bold red] {tokens}{victims}")
    _explain(puzzle)
    return 0


def _ask(puzzle: Round, prompt: str, *, may_skip: bool) -> Decision | str | None:
    """Return the prediction; "?" to be shown the answer, None to end."""
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            return None
        if line.lower() in ("q", "quit", "exit"):
            return None
        if line == "?" or (may_skip and not line):
            return "?"
        try:
            return parse(line, puzzle)
        except MinivllmError as error:
            print(error, file=sys.stderr)


def _explain(puzzle: Round) -> None:
    for sentence in (*explain(puzzle), f"({puzzle.source})"):
        _say(sentence, style="dim")


def _say(text: str, *, indent: int = 2, style: str = "") -> None:
    console.print(Padding(Text(text, style), (0, 0, 0, indent), expand=False), width=_width())


def _width() -> int:
    return min(MOST_COLUMNS, console.width)
