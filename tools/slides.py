"""Build the workshop's slides: HTML with a speaker's view, and PDF, one of each a lesson.

    uv run python tools/slides.py                  # into out/slides; open out/slides/index.html
    uv run python tools/slides.py --only 04        # one lesson's
    uv run python tools/slides.py --no-pdf         # without Chromium

A deck is `workshop/slides/NN_name.md`. A line `---` ends a slide, and what follows a line `Note:` is
for the speaker. reveal.js, pinned by version and hash, shows it: the S key opens the notes. A picture
is a lesson's own figure, and `04_opening.svg#3` is the third step of a moving one. Below a command
stands how long it takes, from `workshop/slides/demos.toml`. Only the first build uses the network.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tarfile
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from math import ceil, floor
from pathlib import Path

import npm_packages
from doctor import BROWSERS
from markdown_it import MarkdownIt

from minivllm.errors import MinivllmError
from minivllm_lab.cli import Parser, run

ROOT = Path(__file__).resolve().parents[1]
DECKS = Path("workshop", "slides")
DEMOS = DECKS / "demos.toml"
STYLE = DECKS / "slides.css"
FILES = ("LICENSE", "dist/reset.css", "dist/reveal.css", "dist/reveal.js", "dist/plugin/notes.js")
WIDTH, HEIGHT = 1280, 720
NOTE = re.compile(r"^Note:[ \n]", re.MULTILINE)
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
COMMAND = re.compile(r"^```bash\n(.*?)^```\n?", re.DOTALL | re.MULTILINE)
PICTURE = re.compile(r"!\[([^\]]*)\]\(([^)#\s]+)(?:#(\d+))?\)")
SVG = "{http://www.w3.org/2000/svg}"
MARKDOWN = MarkdownIt("commonmark").enable("table")

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="stylesheet" href="reveal/reset.css">
<link rel="stylesheet" href="reveal/reveal.css">
<link rel="stylesheet" href="slides.css">
</head>
<body>
<div class="reveal"><div class="slides">
{slides}
</div></div>
<script src="reveal/reveal.js"></script>
<script src="reveal/notes.js"></script>
<script>
Reveal.initialize({{
  width: {width}, height: {height}, margin: 0, center: false, hash: true, transition: "none", controls: false,
  slideNumber: "c/t", pdfMaxPagesPerSlide: 1, pdfSeparateFragments: false, plugins: [RevealNotes],
}});
</script>
</body>
</html>
"""


@dataclass(frozen=True)
class Slide:
    """One slide's Markdown: what the room sees, and what the speaker says."""

    body: str
    notes: str

    @property
    def title(self) -> str:
        """The text of its first heading, or "" if it has none."""
        heading = HEADING.search(self.body)
        return heading[1] if heading else ""

    @property
    def commands(self) -> list[str]:
        """The commands that it shows, one for each line of a `bash` fence."""
        return [line for fence in COMMAND.findall(self.body) for line in fence.splitlines() if line.strip()]

    @property
    def pictures(self) -> list[tuple[str, str, str]]:
        """Text, path and step ("" for a still) of each picture."""
        return PICTURE.findall(self.body)


@dataclass(frozen=True)
class Deck:
    """One lesson's slides."""

    path: Path

    @cached_property
    def slides(self) -> list[Slide]:
        """The slides, in order."""
        parts = re.split(r"^---\n", self.path.read_text(), flags=re.MULTILINE)
        split = [NOTE.split(part, maxsplit=1) for part in parts]
        return [Slide(body.strip(), "".join(notes).strip()) for body, *notes in split]

    @property
    def title(self) -> str:
        """The title of the first slide."""
        return self.slides[0].title


def decks(root: Path, only: str | None = None) -> list[Deck]:
    """Return all decks, or those whose file begins with `only`.

    Raises:
        MinivllmError: there is none.
    """
    found = [Deck(path) for path in sorted((root / DECKS).glob(f"{only or '[0-9][0-9]'}_*.md"))]
    if not found:
        raise MinivllmError(f"{DECKS} has no {only or 'NN'}_*.md: say for example --only 04")
    return found


@dataclass(frozen=True)
class Time:
    """Hold what a command took, in seconds: on the processor (user and system), and until it ended."""

    processor: float
    elapsed: float
    first: float = 0
    """Seconds that its first run on a machine takes beyond that; 0 if they were not noticed."""

    @property
    def seconds(self) -> tuple[int, int]:
        """The range to expect: its own work alone, and with other work beside it."""
        low, high = floor(min(self.processor, self.elapsed)), ceil(self.elapsed)
        return (low, high) if low < high else (low, low + 1)

    @property
    def words(self) -> str:
        """The line below the command."""
        more = f"; {ceil(self.first)} s more the first time" if self.first else ""
        return "takes {} to {} s on two cores".format(*self.seconds) + more


def demos(root: Path) -> dict[str, Time]:
    """Return the time of each command that was measured."""
    return {command: Time(**took) for command, took in tomllib.loads((root / DEMOS).read_text()).items()}


# ---- HTML ----------------------------------------------------------------------------------------


def build(root: Path, out: Path, chosen: Sequence[Deck]) -> list[Path]:
    """Write the decks as HTML, with all that they need beside them, and return their paths.

    Raises:
        MinivllmError: reveal.js cannot be had, or a slide's picture or command is unknown.
    """
    (out / "figures").mkdir(parents=True, exist_ok=True)
    add_reveal(out / "reveal")
    shutil.copyfile(root / STYLE, out / "slides.css")
    known = demos(root)
    pages = []
    for deck in chosen:
        slides = "\n".join(section(slide, deck, out, known) for slide in deck.slides)
        page = out / f"{deck.path.stem}.html"
        page.write_text(PAGE.format(title=escape(deck.title), slides=slides, width=WIDTH, height=HEIGHT))
        pages.append(page)
    return pages


def add_reveal(folder: Path) -> None:
    """Copy the parts of reveal.js that a deck needs, downloaded once.

    Raises:
        MinivllmError: npm cannot download it, or it is not the pinned one.
    """
    try:
        (archive,) = npm_packages.downloaded(npm_packages.OF_THE_SLIDES).values()
    except npm_packages.NotAvailable as reason:
        raise MinivllmError(f"the slides need reveal.js: {reason}") from None
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as package:
        for name in FILES:
            source = package.extractfile(f"package/{name}")
            assert source, f"{archive} has no {name}"
            (folder / Path(name).name).write_bytes(source.read())


def section(slide: Slide, deck: Deck, out: Path, known: Mapping[str, Time]) -> str:
    """Return one slide as HTML; its figures are written below `out`."""

    def shown(match: re.Match[str]) -> str:
        figure = (deck.path.parent / match[2]).resolve()
        return f"![{match[1]}](figures/{copied(figure, match[3], out / 'figures')})"

    def timed(match: re.Match[str]) -> str:
        missing = [line for line in match[1].splitlines() if line not in known]
        if missing:
            raise MinivllmError(f"{deck.path.name}: {DEMOS} does not say how long {missing[0]!r} takes")
        return match[0] + "\n" + ", then ".join(known[line].words for line in match[1].splitlines()) + "\n"

    body = MARKDOWN.render(COMMAND.sub(timed, PICTURE.sub(shown, slide.body)))
    kind = "title" if slide.body.startswith("# ") else "pictured" if slide.pictures else "words"
    notes = MARKDOWN.render(slide.notes)
    return f'<section><div class="slide {kind}">\n{body}</div><aside class="notes">\n{notes}</aside></section>'


def copied(figure: Path, step: str, folder: Path) -> str:
    """Copy a lesson's figure, or one step of a moving one, and return the name of the copy.

    Raises:
        MinivllmError: there is no such figure or step.
    """
    if not figure.is_file():
        raise MinivllmError(f"there is no figure {figure.name}")
    if not step:
        shutil.copyfile(figure, folder / figure.name)
        return figure.name
    ET.register_namespace("", SVG.strip("{}"))
    stills = ET.parse(figure).getroot().findall(f"{SVG}g[@class]/{SVG}svg")
    if not 1 <= int(step) <= len(stills):
        raise MinivllmError(f"{figure.name} has {len(stills)} steps, so not #{step}")
    name = f"{figure.stem}_{step}.svg"
    (folder / name).write_text(ET.tostring(stills[int(step) - 1], encoding="unicode"))
    return name


def write_index(out: Path, chosen: Sequence[Deck], pdf: bool) -> Path:
    """Write the page that lists the decks, and return its path."""
    rows = "\n".join(
        f'<li><a href="{deck.path.stem}.html">{escape(deck.title)}</a>'
        + (f' · <a href="{deck.path.stem}.pdf">PDF</a>' if pdf else "")
        + f" · {len(deck.slides)} slides</li>"
        for deck in chosen
    )
    page = out / "index.html"
    page.write_text(
        '<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8"><title>Slides</title>'
        '<link rel="stylesheet" href="slides.css"></head>\n<body class="index">\n<h1>Slides</h1>\n'
        "<p>Press S in a deck for the speaker's view, O for an overview, and ? for all keys.</p>\n"
        f"<ul>\n{rows}\n</ul>\n</body>\n</html>\n"
    )
    return page


# ---- PDF -----------------------------------------------------------------------------------------


def print_pdfs(pages: Sequence[Path], chromium: str) -> None:
    """Print the decks, each into a PDF beside it, with one Chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        sheet = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        for page in pages:
            open_printed(sheet, page)
            sheet.pdf(path=page.with_suffix(".pdf"), prefer_css_page_size=True, print_background=True, tagged=True)
        browser.close()


def open_printed(sheet, page: Path) -> None:
    """Open a deck with all its slides below each other, and wait until they are laid out."""
    sheet.goto(f"{page.as_uri()}?view=print")
    sheet.wait_for_function("() => Reveal.isReady() && document.querySelector('.pdf-page')")
    sheet.evaluate("() => Promise.all([...document.images].map(image => image.decode()))")


def main(arguments: argparse.Namespace) -> None:
    """Build the decks and print where they are."""
    out = arguments.out.resolve()
    chosen = decks(ROOT, arguments.only)
    pages = build(ROOT, out, chosen)
    chromium = None if arguments.no_pdf else next(filter(None, map(shutil.which, BROWSERS)), None)
    if chromium:
        print_pdfs(pages, chromium)
    elif not arguments.no_pdf:
        print("no PDF: that takes Chromium (apt-get install chromium)", file=sys.stderr)
    front = write_index(out, chosen, pdf=bool(chromium))
    print(f"the slides are built: open {front.as_uri()}")


def parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    flags = Parser(description=__doc__)
    flags.add_argument("--out", type=Path, default=ROOT / "out" / "slides", help="the folder (default: out/slides)")
    flags.add_argument("--only", metavar="NN", help="one lesson's number")
    flags.add_argument("--no-pdf", action="store_true", help="HTML only")
    return flags


if __name__ == "__main__":
    run(main, parser())
