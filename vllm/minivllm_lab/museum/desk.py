"""The bug museum: an engine with one defect, its symptom, and the search for the line.

make bugs                                the exhibits
make bugs B=7                            set one up and show its symptom
make bugs B=7 HINT=1                     the first of three hints
make bugs B=7 LINE=core/scheduler.py:99  is it this line?
make bugs B=7 TRY=1                      run its workload on your edited copy
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path, PurePosixPath
from typing import Any

from minivllm.errors import MinivllmError
from minivllm_lab.cli import Parser
from minivllm_lab.museum.copies import is_set_up, note_solved, observe, room_of, set_up, solved
from minivllm_lab.museum.exhibits import ENGINE, NUM_HINTS, Exhibit, exhibits, find_exhibit, what_happens_in
from minivllm_lab.tables import console, say, table

NOTHING = "—"
LONGEST = 240
VERDICTS = {
    "function": "Warm: this is the right function.",
    "file": "Lukewarm: this is the right file, but the wrong function.",
    "cold": "Cold: the defect is in another file.",
}


def show_list() -> None:
    """List all exhibits by lesson: number, whether solved, title and symptom."""
    done = solved()
    console.print("[bold]The bug museum[/bold]")
    for lesson, group in itertools.groupby(exhibits().values(), key=lambda entry: entry.lesson):
        console.print(f"lesson {lesson:02d}")
        for entry in group:
            mark = "✓" if str(entry.number) in done else " "
            say(f"{mark} {entry.number:>2}  {entry.title}: {entry.symptom}", others=" " * 6)
    console.print(f"{len(done)} of {len(exhibits())} solved")
    console.print("make bugs B=1 sets one up; lessons/bugs/README.md explains the rest")


def show_exhibit(exhibit: Exhibit) -> None:
    """Set an exhibit up, run its workload on it and on the sound engine, and show the
    difference.
    """
    fresh = set_up(exhibit)
    sound, changed = (seen[exhibit.workload] for seen in observe([exhibit.workload], None, room_of(exhibit)))
    console.print(f"[bold]{exhibit.number}. {exhibit.title}[/bold] (lesson {exhibit.lesson:02d})")
    say(exhibit.symptom)
    say(f"The workload: {what_happens_in(exhibit.workload)} ({exhibit.workload} in minivllm_lab/museum/workloads.py)")
    _show_difference(sound, changed)
    here = _shown(room_of(exhibit))
    console.print(f"The engine with the defect is in {here}/minivllm.", markup=False)
    if not fresh:
        say(f"You have changed it, so it was left unchanged. To start again, delete {here}.")
    console.print(
        f"  PYTHONPATH={here} uv run python -P FILE.py   a script of yours on this engine\n"
        f"  make bugs B={exhibit.number} HINT=1                a hint, of {NUM_HINTS}\n"
        f"  make bugs B={exhibit.number} LINE=core/stop.py:12  is it this line?\n"
        f"  make bugs B={exhibit.number} TRY=1                 is the symptom gone after your edit?",
        markup=False,
    )


def show_hint(exhibit: Exhibit, which: str) -> None:
    """Show one of an exhibit's hints.

    Raises:
        MinivllmError: there is no such hint.
    """
    if which not in [str(index + 1) for index in range(NUM_HINTS)]:
        raise MinivllmError(f"there is no hint {which!r} (choose 1 to {NUM_HINTS})")
    say(f"Hint {which}: {exhibit.hints[int(which) - 1]}")


def judge_line(exhibit: Exhibit, place: str) -> None:
    """Report how near a guessed line is, and record it if it is right.

    Raises:
        MinivllmError: it does not name a line of the engine.
    """
    file, line = parse_place(place)
    verdict = exhibit.judge(file, line)
    if verdict != "found":
        console.print(VERDICTS[verdict])
        return
    note_solved(exhibit, "line")
    console.print(f"Found: {exhibit.file}, line {exhibit.lines()[0]}, in {exhibit.function}.", markup=False)
    say(exhibit.why)


def parse_place(place: str) -> tuple[str, int]:
    """Split "core/scheduler.py:99" into a file below the engine's package and a line.

    Raises:
        MinivllmError: it is not a file of the engine and a line.
    """
    path, _, number = place.strip().rpartition(":")
    if not path or not number.isascii() or not number.isdigit():
        raise MinivllmError(f"{place!r} is not a line; write it like core/scheduler.py:99")
    parts = PurePosixPath(path).parts
    if "minivllm" in parts:
        parts = parts[len(parts) - parts[::-1].index("minivllm") :]
    file = str(PurePosixPath(*parts))
    if ".." in parts or not (ENGINE / file).is_file() or file.startswith("/"):
        raise MinivllmError(f"{path!r} is not a file of the engine; write it like core/scheduler.py:99")
    most = len((ENGINE / file).read_text().splitlines())
    if not 1 <= int(number[:9]) <= most:
        raise MinivllmError(f"{file} has lines 1 to {most}, not {number}")
    return file, int(number)


def try_copy(exhibit: Exhibit) -> bool:
    """Run all workloads on the learner's copy and on the sound engine; return whether they all
    agree.

    Raises:
        MinivllmError: there is no copy yet.
    """
    if not is_set_up(exhibit):
        raise MinivllmError(f"{_shown(room_of(exhibit))} is not there yet: make bugs B={exhibit.number} sets it up")
    names = sorted({entry.workload for entry in exhibits().values()})
    sound, changed = observe(names, None, room_of(exhibit))
    if changed[exhibit.workload] != sound[exhibit.workload]:
        console.print("The symptom is still there:")
        _show_difference(sound[exhibit.workload], changed[exhibit.workload])
        return False
    broken = [name for name in names if changed[name] != sound[name]]
    if broken:
        say(f"The symptom is gone, but now something else is wrong: {', '.join(broken)}. The first of them:")
        _show_difference(sound[broken[0]], changed[broken[0]])
        return False
    note_solved(exhibit, "mended")
    say(f"Repaired: the symptom is gone, and the other {len(names) - 1} workloads behave as on the sound engine.")
    say(exhibit.why)
    return True


def _show_difference(sound: dict[str, Any], changed: dict[str, Any]) -> None:
    names = list(dict.fromkeys([*sound, *changed]))
    differing = [name for name in names if sound.get(name) != changed.get(name)]
    if not differing:
        console.print("Nothing differs from the sound engine.")
        return
    rows = [(name, _value(sound, name), _value(changed, name)) for name in differing]
    table("Observations", ["", "the sound engine", "this engine"], rows, words=True)
    if alike := len(names) - len(differing):
        console.print(f"{alike} more observation{'s are' if alike > 1 else ' is'} the same.")


def _value(seen: dict[str, Any], name: str) -> str:
    if seen.get(name) is None:
        return NOTHING
    value = seen[name]
    text = repr(value) if isinstance(value, str) and name != "raised" else str(value)
    text = text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
    return text.replace("[", "\\[")


def _shown(path: Path) -> str:
    root = ENGINE.parents[1]
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)


def main(arguments: argparse.Namespace) -> None:
    """Run one command; exit with status 1 if a try has not repaired the engine."""
    asked = [name for name in ("hint", "line", "try_it") if getattr(arguments, name) not in (None, False)]
    if arguments.bug is None:
        if asked:
            raise MinivllmError("which exhibit? For example: make bugs B=7 HINT=1")
        show_list()
        return
    exhibit = find_exhibit(arguments.bug)
    if len(asked) > 1:
        raise MinivllmError("use one at a time: HINT, LINE or TRY")
    if arguments.hint is not None:
        show_hint(exhibit, arguments.hint)
    elif arguments.line is not None:
        judge_line(exhibit, arguments.line)
    elif arguments.try_it:
        if not try_copy(exhibit):
            raise SystemExit(1)
    else:
        show_exhibit(exhibit)


def parser() -> argparse.ArgumentParser:
    """Return the command line of `python -m minivllm_lab.museum`."""
    flags = Parser(prog="bugs", description=__doc__)
    flags.add_argument("--bug", metavar="NUMBER", help="the exhibit's number, such as 7")
    flags.add_argument("--hint", metavar="1..3", help="show a hint")
    flags.add_argument("--line", metavar="FILE:LINE", help="check whether the defect is on this line")
    flags.add_argument("--try", dest="try_it", action="store_true", help="run the workload on your edited copy")
    return flags
