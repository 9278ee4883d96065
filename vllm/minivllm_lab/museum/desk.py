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
import textwrap
from pathlib import Path, PurePosixPath
from typing import Any

from minivllm.errors import MinivllmError
from minivllm_lab.cli import Parser
from minivllm_lab.museum.copies import is_set_up, note_solved, observe, room_of, set_up, solved
from minivllm_lab.museum.exhibits import ENGINE, NUM_HINTS, Exhibit, exhibit, exhibits, what_happens_in
from minivllm_lab.tables import MOST_COLUMNS, console, table

NOTHING = "—"
LONGEST = 240
VERDICTS = {
    "function": "Warm: this is the right function.",
    "file": "Lukewarm: this is the right file, and another function.",
    "cold": "Cold: the defect is in another file.",
}


def show_list() -> None:
    """All exhibits by lesson: number, whether solved, title and symptom."""
    done = solved()
    console.print("[bold]The bug museum[/bold]")
    for lesson, group in itertools.groupby(exhibits().values(), key=lambda one: one.lesson):
        console.print(f"lesson {lesson:02d}")
        for one in group:
            mark = "✓" if str(one.number) in done else " "
            _say(f"{mark} {one.number:>2}  {one.title}: {one.symptom}", indent=" " * 6)
    console.print(f"{len(done)} of {len(exhibits())} solved")
    console.print("make bugs B=1 sets one up; lessons/bugs/README.md says the rest")


def show_exhibit(one: Exhibit) -> None:
    """Sets an exhibit up, runs its workload on it and on the sound engine, and shows the difference."""
    fresh = set_up(one)
    sound, came = (seen[one.workload] for seen in observe([one.workload], None, room_of(one)))
    console.print(f"[bold]{one.number}. {one.title}[/bold] (lesson {one.lesson:02d})")
    _say(one.symptom)
    _say(f"The workload: {what_happens_in(one.workload)} ({one.workload} in vllm/minivllm_lab/museum/workloads.py)")
    _show_difference(sound, came)
    here = _shown(room_of(one))
    console.print(f"The engine with the defect is in {here}/minivllm.", markup=False)
    if not fresh:
        _say(f"You have changed it, so it was left as it is. To start anew, delete {here}.")
    console.print(
        f"  PYTHONPATH={here} uv run python -P FILE.py   a script of yours on this engine\n"
        f"  make bugs B={one.number} HINT=1                a hint, of {NUM_HINTS}\n"
        f"  make bugs B={one.number} LINE=core/stop.py:12  is it this line?\n"
        f"  make bugs B={one.number} TRY=1                 is the symptom gone after your edit?",
        markup=False,
    )


def show_hint(one: Exhibit, which: str) -> None:
    """One of an exhibit's hints.

    Raises:
        MinivllmError: there is no such hint.
    """
    if which not in [str(index + 1) for index in range(NUM_HINTS)]:
        raise MinivllmError(f"there is no hint {which!r} (there are 1 to {NUM_HINTS})")
    _say(f"Hint {which}: {one.hints[int(which) - 1]}")


def judge_line(one: Exhibit, place: str) -> None:
    """Says how near a guessed line is, and notes it if it is right.

    Raises:
        MinivllmError: it does not name a line of the engine.
    """
    file, line = parse_place(place)
    verdict = one.judge(file, line)
    if verdict != "found":
        console.print(VERDICTS[verdict])
        return
    note_solved(one, "line")
    console.print(f"Found: {one.file}, line {one.lines()[0]}, in {one.function}.", markup=False)
    _say(one.why)


def parse_place(place: str) -> tuple[str, int]:
    """The file below the engine's package and the line that "core/scheduler.py:99" names.

    Raises:
        MinivllmError: it is not a file of the engine and a line.
    """
    path, _, number = place.strip().rpartition(":")
    if not path or not number.isascii() or not number.isdigit():
        raise MinivllmError(f"{place!r} is no line; write it like core/scheduler.py:99")
    parts = PurePosixPath(path).parts
    if "minivllm" in parts:
        parts = parts[len(parts) - parts[::-1].index("minivllm") :]
    file = str(PurePosixPath(*parts))
    if ".." in parts or not (ENGINE / file).is_file() or file.startswith("/"):
        raise MinivllmError(f"{path!r} is no file of the engine; write it like core/scheduler.py:99")
    most = len((ENGINE / file).read_text().splitlines())
    if not 1 <= int(number[:9]) <= most:
        raise MinivllmError(f"{file} has the lines 1 to {most}, and you said {number}")
    return file, int(number)


def try_copy(one: Exhibit) -> bool:
    """Runs all workloads on the learner's copy and on the sound engine; returns whether all of them agree.

    Raises:
        MinivllmError: there is no copy yet.
    """
    if not is_set_up(one):
        raise MinivllmError(f"{_shown(room_of(one))} is not there yet: make bugs B={one.number} sets it up")
    names = sorted({other.workload for other in exhibits().values()})
    sound, came = observe(names, None, room_of(one))
    if came[one.workload] != sound[one.workload]:
        console.print("The symptom is still there:")
        _show_difference(sound[one.workload], came[one.workload])
        return False
    broken = [name for name in names if came[name] != sound[name]]
    if broken:
        _say(f"The symptom is gone, but now something else is wrong: {', '.join(broken)}. The first of them:")
        _show_difference(sound[broken[0]], came[broken[0]])
        return False
    note_solved(one, "mended")
    _say(f"Mended: the symptom is gone, and the other {len(names) - 1} workloads are as on the sound engine.")
    _say(one.why)
    return True


def _show_difference(sound: dict[str, Any], came: dict[str, Any]) -> None:
    names = list(dict.fromkeys([*sound, *came]))
    differing = [name for name in names if sound.get(name) != came.get(name)]
    if not differing:
        console.print("Nothing differs from the sound engine.")
        return
    rows = [(name, _value(sound, name), _value(came, name)) for name in differing]
    table("What was looked at", ["", "the sound engine", "this engine"], rows, words=True)
    if alike := len(names) - len(differing):
        console.print(f"Of what was looked at, {alike} more {'is' if alike == 1 else 'are'} the same.")


def _value(seen: dict[str, Any], name: str) -> str:
    if seen.get(name) is None:
        return NOTHING
    value = seen[name]
    text = repr(value) if isinstance(value, str) and name != "raised" else str(value)
    text = text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
    return text.replace("[", "\\[")


def _say(text: str, indent: str = "") -> None:
    """Print a text, wrapped at words; all lines but the first begin with `indent`."""
    lines = textwrap.wrap(text, min(console.width, MOST_COLUMNS), subsequent_indent=indent)
    console.print("\n".join(lines), markup=False)


def _shown(path: Path) -> str:
    root = ENGINE.parents[1]
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)


def main(arguments: argparse.Namespace) -> None:
    """Carry out one command; exit with 1 if a try has not mended the engine."""
    asked = [name for name in ("hint", "line", "try_it") if getattr(arguments, name) not in (None, False)]
    if arguments.bug is None:
        if asked:
            raise MinivllmError("which exhibit? Say for example: make bugs B=7 HINT=1")
        show_list()
        return
    one = exhibit(arguments.bug)
    if len(asked) > 1:
        raise MinivllmError("one at a time: HINT, LINE or TRY")
    if arguments.hint is not None:
        show_hint(one, arguments.hint)
    elif arguments.line is not None:
        judge_line(one, arguments.line)
    elif arguments.try_it:
        if not try_copy(one):
            raise SystemExit(1)
    else:
        show_exhibit(one)


def parser() -> argparse.ArgumentParser:
    """The command line of `python -m minivllm_lab.museum`."""
    flags = Parser(prog="bugs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--bug", metavar="NUMBER", help="the exhibit's number, such as 7")
    flags.add_argument("--hint", metavar="1..3", help="show a hint")
    flags.add_argument("--line", metavar="FILE:LINE", help="ask whether the defect is here")
    flags.add_argument("--try", dest="try_it", action="store_true", help="run the workload on your edited copy")
    return flags
