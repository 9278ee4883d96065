"""Run a lesson once and update its measurements everywhere: results, figures, text, claims,
notebook.

    uv run python tools/measure.py 01                  # make measure N=01
    uv run python tools/measure.py 01 --machine h100   # on another machine: only its results file
    uv run python tools/measure.py 01 --redraw         # only the figure, from the recorded results

A lesson, or its page in `lessons/notes`, quotes output in a fence under a comment that names the
command and, after bars, the parts to show:

    <!-- output: vllm/01_kv_cache.py | 1 and 2. | What you saw -->

A part is the section under a heading, or the lines from the first that starts with these words to
the next blank line; without parts, everything is shown. The command without flags is the run that
also writes the results and the figure, so all of a lesson's numbers come from one run.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path

from minivllm.errors import MinivllmError
from minivllm_lab.cli import Parser
from minivllm_lab.marks import pages_of
from widgets.__main__ import IN_LESSONS

ROOT = Path(__file__).resolve().parents[1]
WIDTH = "100"
QUOTE = re.compile(
    r"(<!-- output: (?P<command>[^|\n]+?)(?P<parts>(?: \|[^|\n]+)*) -->\n\n```text\n)(?:.*?\n)??(```)", re.DOTALL
)
HEADING = re.compile(r"(\d.*?\. .*|What you saw)")


def stem_of(number: str) -> str:
    """Return the file stem that a lesson's six parts share."""
    found = sorted((ROOT / "vllm").glob(f"{number}_*.py"))
    if not found:
        raise MinivllmError(f"no lesson {number!r}: give a number such as 01")
    return found[0].stem


def output_of(command: str, more: list[str]) -> str:
    """Return what a command prints, errors included, on a terminal of `WIDTH` columns, without the
    lines that name the files it wrote.
    """
    arguments = [sys.executable, *shlex.split(command), *more]
    environment = {**os.environ, "COLUMNS": WIDTH}
    done = subprocess.run(
        arguments, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode not in (0, 2):
        raise MinivllmError(f"{command} exited with {done.returncode}:\n{done.stdout}")
    return "\n".join(line.rstrip() for line in done.stdout.splitlines() if not line.startswith("wrote "))


def part_of(output: str, start: str) -> str:
    """Return the section under the heading `start`, or the lines from the first that starts with
    `start` to the next blank one.
    """
    lines = output.splitlines()
    begin = next((index for index, line in enumerate(lines) if line.startswith(start)), None)
    if begin is None:
        raise MinivllmError(f"the output has no line that starts with {start!r}")
    is_section = HEADING.fullmatch(lines[begin])
    for end in range(begin + 1, len(lines)):
        if (HEADING.fullmatch(lines[end]) and not lines[end - 1]) if is_section else not lines[end]:
            return "\n".join(lines[begin:end]).rstrip()
    return "\n".join(lines[begin:]).rstrip()


def filled(text: str, outputs: dict[str, str]) -> str:
    """Return a page's text with every quoted output refreshed. Commands that `outputs` lacks are
    run and added to it.
    """

    def quote(match: re.Match) -> str:
        command = match["command"].strip()
        if command not in outputs:
            outputs[command] = output_of(command, [])
        parts = [part.strip() for part in match["parts"].split("|") if part.strip()]
        shown = "\n\n…\n\n".join(part_of(outputs[command], part) for part in parts) if parts else outputs[command]
        return f"{match[1]}{shown}\n{match[4]}"

    return QUOTE.sub(quote, text)


def redraw(stem: str, path: str) -> None:
    """Draw a lesson's figure from its recorded results, without measuring again."""
    recorded = json.loads((ROOT / "benchmarks" / "results" / f"{stem}.cpu.json").read_text())
    import_module(f"minivllm_lab.{stem[3:]}.report").draw(recorded["figures"], path)


def main() -> int:
    """Measure one lesson and refresh everything that quotes it."""
    parser = Parser(description=__doc__)
    parser.add_argument("number", help="the lesson's number, as in 01")
    parser.add_argument("--machine", default="cpu", help="the machine that measures (default: cpu)")
    parser.add_argument("--redraw", action="store_true", help="draw the figure again from the recorded results")
    arguments = parser.parse_args()
    stem = stem_of(arguments.number)
    figure = f"lessons/figures/{stem}.svg"
    if arguments.redraw:
        redraw(stem, str(ROOT / figure))
        return 0
    results = ["--json", f"benchmarks/results/{stem}.{arguments.machine}.json"]
    if arguments.machine != "cpu":
        print(output_of(f"vllm/{stem}.py", results))
        return 0
    script = f"vllm/{stem}.py"
    outputs = {script: output_of(script, [*results, "--plot", figure])}
    for page in pages_of(ROOT / "lessons", stem[:2]):
        page.write_text(filled(page.read_text(), outputs))
    pictures = [["-P", "-m", "widgets", name] for name, file in IN_LESSONS.items() if file.startswith(stem[:2])]
    for tool in (*pictures, ["tools/claims.py", "--write"], ["tools/notebooks.py", "--write"]):
        if code := subprocess.run([sys.executable, *tool], cwd=ROOT).returncode:
            return code  # it has said why
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MinivllmError as error:
        print(f"measure: error: {error}", file=sys.stderr)
        sys.exit(2)
