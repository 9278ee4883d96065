"""Fill the lessons' tables of claims from measured results: no number in them is typed by hand.

    uv run python tools/claims.py --write     # make claims
    uv run python tools/claims.py --check     # fails when a table is stale

`lessons/claims.toml` has one row for every claim that a lesson quotes. The row's `measured` is a
template: `{dotted.path:.1%}` is looked up in the figures of `benchmarks/results/<stem of the
script>.<machine>.json`, once for each machine that has results; `results` names another stem.
`also` adds figures from one other results file. The table goes between `<!-- claims:NN -->` and
`<!-- /claims -->`, in the lesson or on its page in `lessons/notes`. A table that compares the cost
model with published measurements goes between `<!-- published-checks -->` and its end mark.

A `[[sentence]]` is a piece of a lesson's prose that quotes one results file. Both commands fail
unless the lesson's pages contain it word for word, apart from line breaks. In a list of rows,
`{decode.64 decodes of 4,096 + fp8.gb_per_s}` picks the row that has both values.
"""

from __future__ import annotations

import json
import re
import string
import sys
import tomllib
from pathlib import Path

from lever_checks import published_checks

from minivllm.errors import MinivllmError
from minivllm_lab.cli import Parser
from minivllm_lab.marks import pages_of, put_between_marks
from minivllm_lab.tables import markdown_table

ROOT = Path(__file__).resolve().parents[1]
LESSONS = ROOT / "lessons"
CLAIMS = LESSONS / "claims.toml"
RESULTS = ROOT / "benchmarks" / "results"
REQUIRED = {"id", "lesson", "words", "source", "script", "measured", "verdict", "why"}
PUBLISHED = "published-checks"
HEADER = ("The claim", "Who says so", "Measured here", "Verdict")


class _Figures(string.Formatter):
    """A formatter of templates whose fields are dotted paths into one results file."""

    def __init__(self, figures: dict, name: str):
        self.figures, self.name = figures, name

    def get_field(self, field_name: str, args: object, kwargs: object) -> tuple[object, str]:
        value: object = self.figures
        for part in field_name.split("."):
            found = _picked(value, part)
            if found is None:
                raise MinivllmError(f"{self.name} has no figure {field_name!r}: measure again, or fix claims.toml")
            value = found
        return value, field_name


def _picked(value: object, part: str) -> object:
    """Return the value under this name, or the only row that has all the values joined by " + ";
    None if there is none.
    """
    if isinstance(value, dict):
        return value.get(part)
    if not isinstance(value, list):
        return None
    rows = [row for row in value if set(part.split(" + ")) <= {str(one) for one in row.values()}]
    return rows[0] if len(rows) == 1 else None


def read_claims(path: Path = CLAIMS) -> list[dict]:
    """Return the rows of claims.toml, after checking that each is complete and has an id of its
    own.
    """
    rows = tomllib.loads(path.read_text())["claim"]
    for row in rows:
        if missing := REQUIRED - row.keys():
            raise MinivllmError(f"claim {row.get('id', '?')!r} in {path.name} lacks {', '.join(sorted(missing))}")
    names = [row["id"] for row in rows]
    if doubles := {name for name in names if names.count(name) > 1}:
        raise MinivllmError(f"{path.name} has two claims named {', '.join(sorted(doubles))}")
    return rows


def results_of(script: str, stem: str = "") -> list[tuple[str, dict]]:
    """Return (machine, record) for every committed result of a script; `stem` is the stem of the
    files (default: the script's).
    """
    stem = stem or Path(script).stem
    found = sorted(RESULTS.glob(f"{stem}.*.json"))
    if not found:
        raise MinivllmError(f"no results of {script}: run it with --json benchmarks/results/{stem}.<machine>.json")
    return [(path.name.removeprefix(f"{stem}.").removesuffix(".json"), json.loads(path.read_text())) for path in found]


def measured(row: dict) -> str:
    """Format this repository's measurements, one per machine, or only one if all machines agree."""
    texts = {}
    for machine, record in results_of(row["script"], row.get("results", "")):
        figures = _Figures(record["figures"], f"{machine}'s result of {row['script']}")
        texts[machine] = figures.format(row["measured"])
    also = f". {quoted(row['also']['results'], row['also']['measured'])}" if "also" in row else ""
    if len(set(texts.values())) == 1:
        return next(iter(texts.values())) + also
    return "<br>".join(f"{machine}: {text}" for machine, text in texts.items()) + also


def quoted(results: str, template: str) -> str:
    """Return a template filled with the figures of one results file, `<stem>.<machine>`."""
    path = RESULTS / f"{results}.json"
    return _Figures(json.loads(path.read_text())["figures"], path.name).format(template)


def missing_sentences(path: Path = CLAIMS, lessons: Path = LESSONS) -> list[str]:
    """Return the sentences of claims.toml that no page of their lesson contains, each after its
    lesson's number.
    """
    missing = []
    for row in tomllib.loads(path.read_text()).get("sentence", []):
        words = re.sub(r"(?<=\d)%", " %", quoted(row["results"], row["words"]))
        pages = [" ".join(page.read_text().split()) for page in pages_of(lessons, row["lesson"])]
        if not any(words in page for page in pages):
            missing.append(f"{row['lesson']}: {words}")
    return missing


def claims_table(rows: list[dict]) -> str:
    """Return the Markdown table of one lesson's claims."""
    cells = [(f"“{row['words']}”", row["source"], measured(row), f"**{row['verdict']}.** {row['why']}") for row in rows]
    return markdown_table(HEADER, cells, words=True)


def page_with_claims(number: str, lessons: Path = LESSONS) -> Path:
    """Return the page of a lesson that has the marks for claims: its text or its notes.

    Raises:
        MinivllmError: neither page has them, or both have.
    """
    pages = pages_of(lessons, number)
    found = [page for page in pages if f"<!-- claims:{number} -->" in page.read_text()]
    if len(found) != 1:
        raise MinivllmError(f"<!-- claims:{number} --> must stand once in {' or '.join(page.name for page in pages)}")
    return found[0]


def filled(text: str, number: str, rows: list[dict]) -> str:
    """Return a page's text with its table put between the markers."""
    return put_between_marks(text, f"claims:{number}", claims_table(rows))


def published_table() -> str:
    """Return the Markdown table that compares the cost model with published measurements on which
    it was not calibrated.
    """
    rows = [
        (check.what, check.source, f"{check.measured:.4g}", f"{check.modelled:.4g}", f"{check.error:+.0%}")
        for check in published_checks()
    ]
    return markdown_table(("What", "Who measured", "Measured", "Modelled", "Off by"), rows)


def main() -> int:
    """Fill the tables, or report which are stale."""
    parser = Parser(description=__doc__)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true", help="fill the tables")
    action.add_argument("--check", action="store_true", help="fail when a table is stale")
    write = parser.parse_args().write
    rows, stale = read_claims(), []
    for number in sorted({row["lesson"] for row in rows}):
        page = page_with_claims(number)
        old = page.read_text()
        new = filled(old, number, [row for row in rows if row["lesson"] == number])
        if f"<!-- {PUBLISHED} -->" in new:
            new = put_between_marks(new, PUBLISHED, published_table())
        if new != old and write:
            page.write_text(new)
        elif new != old:
            stale.append(str(page.relative_to(ROOT)))
    if stale:
        print(f"stale claims tables in {', '.join(stale)}: run `make claims`", file=sys.stderr)
    missing = missing_sentences()
    for sentence in missing:
        print(f"results have changed: update this sentence of lesson {sentence}", file=sys.stderr)
    return 1 if stale or missing else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MinivllmError as error:
        print(f"claims: error: {error}", file=sys.stderr)
        sys.exit(2)
