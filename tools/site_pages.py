"""Prepare the site's pages: the repository's Markdown, with links, diagrams and widgets adapted to
a browser.

Nothing in the repository is changed. Each page is rewritten into a folder that the generator reads:
links to files that are not pages of the site point to the repository, Mermaid becomes SVG, and each
cell that shows a widget or the steps of a picture is followed by the HTML of what it shows.
"""

from __future__ import annotations

import ast
import posixpath
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import glossary
import mermaidx

from minivllm.errors import MinivllmError
from notebooks import CODE_SPAN, LINKS, Fence, read_lesson

INDEX = "index.md"
PICTURES = (".svg", ".png")
ELSEWHERE = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*:|#|/")
KNOB_LINK = re.compile(r"\[([^][]*)\]\(([^)\s#]*)(#\w+\?[^)\s]*)\)")
"""`[words](page.md#widget?knob=value)`, which Sphinx would take for a broken link to a heading."""
CHEAT_SHEETS = "<!-- cheat sheets -->"
"""The line of a page in whose place all lessons' cheat sheets stand on the site."""
CHEAT_SHEET = re.compile(r"^## Cheat sheet\n(.*?)(?=^## )", re.DOTALL | re.MULTILINE)
MARKDOWN_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
IDS = re.compile(r' id="(?!diagram)[^"]*"')
DIAGRAM = {
    "fontFamily": "system-ui, sans-serif",
    "themeVariables": {"fontSize": "12px"},
    "flowchart": {"nodeSpacing": 22, "rankSpacing": 22, "padding": 8, "wrappingWidth": 180},
}
"""Mermaid's settings. Colours are the style sheet's, so that they follow the page's theme, and so
is the font: one no wider than DejaVu Sans, with which texts are measured.
"""

Embed = Callable[[str, str, Mapping[str, Any]], str]
"""`embed("widgets.kv_cache", "show", {})` -> the HTML of what this call shows, "" where that is
nothing. `embed("exercises", "04_continuous_batching", {})` -> an exercise's place.
"""


@dataclass(frozen=True)
class Pages:
    """The pages of a repository, and the address at which the rest of it can be found."""

    root: Path
    repository: str
    """Its address, without a slash at the end."""
    names: tuple[str, ...]
    """The Markdown files that are pages, as paths from the root."""

    def staged(self, name: str) -> str:
        """Return the path to which a page is written, relative to the top of the site."""
        return INDEX if name == "README.md" else name

    def target(self, page: str, target: str) -> str:
        """Return the target that a link of `page` has on the site.

        Raises:
            MinivllmError: there is no such file.
        """
        if ELSEWHERE.match(target):
            return target
        path, mark, anchor = target.partition("#")
        name = posixpath.normpath(posixpath.join(posixpath.dirname(page), path))
        if not (self.root / name).exists():
            raise MinivllmError(f"{page}: the link {target} leads nowhere")
        if name in self.names:
            return posixpath.relpath(self.staged(name), posixpath.dirname(self.staged(page))) + mark + anchor
        if name.endswith(PICTURES):
            return posixpath.relpath(name, posixpath.dirname(self.staged(page)))
        kind = "tree" if (self.root / name).is_dir() else "blob"
        return f"{self.repository}/{kind}/main/{name}{mark}{anchor}"


def pages_of(root: Path, repository: str) -> Pages:
    """Return a repository's pages: its README, the lessons and what accompanies them, and the pages
    about the engine.
    """
    wanted = ["README.md", "lessons/[0-9][0-9]_*.md", "lessons/README.md", "lessons/GLOSSARY.md"]
    wanted += ["lessons/predict.md", "lessons/workload.md", "lessons/left_out.md"]
    wanted += ["site/*.md", "lessons/bugs/README.md", "lessons/reading/*.md", "lessons/notes/*.md"]
    wanted += ["workshop/*.md", "workshop/guides/*.md", "workshop/quiz/*.md", "workshop/handouts/*.md"]
    wanted += ["ARCHITECTURE.md", "benchmarks/PERFORMANCE.md"]
    wanted += ["vllm/models/README.md", "vllm/minivllm/FROM_VLLM.md", "CONTRIBUTING.md", "CHANGELOG.md"]
    found = [path.relative_to(root).as_posix() for pattern in wanted for path in sorted(root.glob(pattern))]
    return Pages(root, repository.rstrip("/"), tuple(found))


def stage(pages: Pages, folder: Path, embed: Embed) -> None:
    """Write every page, and the lessons' pictures, below `folder`."""
    for name in pages.names:
        path = folder / pages.staged(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = "\n".join(page_lines(pages, name, embed)) + "\n"
        text = KNOB_LINK.sub(knob_link, text)  # of the whole page: a link's words may run over a line's end
        path.write_text(text + contents(pages) if name == "README.md" else text)
    for path in sorted(pages.root.glob("lessons/figures/*")):
        copy = folder / path.relative_to(pages.root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)


def page_lines(pages: Pages, name: str, embed: Embed) -> list[str]:
    """Return a page's Markdown for the generator, with live widgets and steps in place of their
    still pictures.
    """
    lines: list[str] = []
    diagrams, embedded = 0, False
    for part in read_lesson(pages.root / name).parts:
        if isinstance(part, str):
            if embedded and part.startswith("!["):
                embedded = False
                continue
            embedded = embedded and not part
            if part == CHEAT_SHEETS:
                lines += cheat_sheets(pages, name)
                continue
            lines.append(relinked(part, lambda target: pages.target(name, target)))
        elif part.language == "mermaid":
            diagrams += 1
            lines += ["", diagram(part, diagrams), ""]
        elif part.kind == "exercise" and part.script and (html := embed("exercises", Path(part.script).stem, {})):
            summary = f"<details><summary>The whole file: <code>{escape(part.script)}</code></summary>"
            lines += [html, "", summary, "", part.opening, *part.body, part.closing, "", "</details>"]
        else:
            live = list(calls(part)) if part.kind == "exec" else []
            shown = [html for call in live if (html := embed(*call))]
            opening = bool(shown) and live[0][1] == "frames"
            removed = bool(shown) and remove_still(lines, opening)
            embedded = bool(shown) and not opening and not removed
            lines += [] if opening else [part.opening, *part.body, part.closing]
            lines += [line for html in shown for line in ("", html, "")]
    return lines


def remove_still(lines: list[str], opening: bool) -> bool:
    """Remove the still picture just above or, for an opening, the one in the same section; return
    whether there was one.
    """
    for index in range(len(lines) - 1, -1, -1):
        is_picture = lines[index].startswith("![") and (not opening or "_opening.svg" in lines[index])
        if is_picture:
            del lines[index]
            return True
        if lines[index].startswith("## ") or (lines[index] and not opening):
            break
    return False


def relinked(line: str, turn: Callable[[str], str]) -> str:
    """Return the line with `turn` applied to the target of each link; code spans are left alone."""

    def replaced(match: re.Match[str]) -> str:
        spans = (span.span() for span in CODE_SPAN.finditer(match.string))
        if any(start <= match.start("target") < end for start, end in spans):
            return match[0]
        return match["before"] + turn(match["target"])

    for pattern in LINKS:
        line = pattern.sub(replaced, line)
    return line


def knob_link(match: re.Match[str]) -> str:
    """Return the HTML of a link that sets knobs of a widget on its page."""
    address = escape(match[2].replace(".md", ".html") + match[3])
    return f'<a class="knob" href="{address}" title="Show this in the widget">{match[1]}</a>'


def cheat_sheets(pages: Pages, name: str) -> list[str]:
    """Return all lessons' cheat sheets, each below its lesson's title, with links as on page `name`."""
    lines = []
    for lesson in sorted(page for page in pages.names if re.fullmatch(r"lessons/\d\d_\w+\.md", page)):
        text = (pages.root / lesson).read_text()
        sheet = CHEAT_SHEET.search(text)
        if sheet is None:
            raise MinivllmError(f"{lesson} has no cheat sheet")
        lines += ["", f"## {text.splitlines()[0].removeprefix('# ')}", ""]
        elsewhere = partial(moved_target, pages, lesson, name)
        lines += [relinked(line, elsewhere) for line in sheet[1].splitlines()]
    return lines


def moved_target(pages: Pages, page: str, other: str, target: str) -> str:
    """Return the target that a link of `page` has on the page `other`."""
    target = pages.target(page, posixpath.basename(page) + target if target.startswith("#") else target)
    if ELSEWHERE.match(target):
        return target
    place = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
    return posixpath.relpath(place, posixpath.dirname(other))


def calls(cell: Fence) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield module, function and arguments of each `imported_module.function(name=literal)` that is
    a statement of its own; the reader runs the rest.
    """
    modules = {}
    for statement in ast.parse("\n".join(cell.body)).body:
        match statement:
            case ast.ImportFrom(module=package, names=names):
                modules |= {name.asname or name.name: f"{package}.{name.name}" for name in names}
            case ast.Expr(ast.Call(ast.Attribute(ast.Name(name), function), args=[], keywords=keys)) if name in modules:
                try:
                    yield modules[name], function, {str(key.arg): ast.literal_eval(key.value) for key in keys}
                except ValueError:
                    continue


def diagram(fence: Fence, number: int) -> str:
    """Return a Mermaid diagram as SVG in one line.

    Raises:
        MinivllmError: Mermaid cannot draw it.
    """
    source = "\n".join(fence.body)
    try:
        svg = mermaidx.render(source, config=DIAGRAM).svg()
    except Exception as error:
        raise MinivllmError(f"Mermaid cannot draw the diagram that starts with {fence.body[:2]}: {error}") from error
    svg = IDS.sub("", svg.replace("my-svg", f"diagram-{number}"))
    width = float(re.findall(r'viewBox="\S+ \S+ (\S+) ', svg)[0])
    words = "; ".join(re.findall(r'\["?([^"\]]+)"?\]', source)).replace("<br>", " ").replace("<br/>", ": ")
    said = f'role="img" aria-label="Diagram. {escape(words)}"'
    return f'<div class="mermaid" style="--width: {width:.0f}px" {said}>{one_line(svg)}</div>'


def one_line(html: str) -> str:
    """Join HTML into one line: in Markdown, a blank line would end it."""
    return re.sub(r"\s*\n\s*", " ", html)


def contents(pages: Pages) -> str:
    """Return the order of all pages, for the side bar and for `previous` and `next`."""

    def these(pattern: str) -> list[str]:
        return [name.removesuffix(".md") for name in pages.names if re.fullmatch(pattern, name)]

    parts = {
        "Lessons": [
            *these(r"lessons/README\.md"),
            *these(r"site/o.*_request\.md"),
            *these(r"lessons/\d\d_.*"),
            *these(r"lessons/predict\.md"),
        ],
        "Alongside the lessons": [
            *these(r"lessons/GLOSSARY\.md"),
            *these(r"site/exercises\.md"),
            *these(r"lessons/bugs/.*"),
            *these(r"lessons/workload\.md"),
            *these(r"lessons/left_out\.md"),
        ],
        "Reading vLLM": [
            *these(r"lessons/reading/README\.md"),
            *these(r"lessons/reading/\d\d_.*"),
            *these(r"lessons/reading/(?:reports|drift)\.md"),
        ],
        "Notes": these(r"lessons/notes/.*"),
        "For a workshop": [
            *these(r"workshop/README\.md"),
            *(name for name in these(r"workshop/[^/]*\.md") if not name.endswith("README")),
            *these(r"workshop/guides/.*"),
            *these(r"workshop/handouts/.*"),
            *these(r"workshop/quiz/.*"),
        ],
        "The engine": [
            *these(r"ARCHITECTURE\.md"),
            *these(r"benchmarks/.*"),
            *these(r"vllm/.*"),
            *these(r"CONTRIBUTING\.md"),
            *these(r"CHANGELOG\.md"),
            f"The repository <{pages.repository}>",
        ],
    }
    # Sphinx copies the headings of all pages for each page, and drops them, unless the depth leaves them out.
    tree = "```{{toctree}}\n:hidden:\n:maxdepth: 1\n:caption: {}\n\n{}\n```\n"
    return "\n" + "\n".join(tree.format(caption, "\n".join(names)) for caption, names in parts.items())


def definitions(pages: Pages) -> dict[str, str]:
    """Map each glossary entry's anchor to its text without links, which a link to the entry shows
    as a hint.
    """
    text = (pages.root / "lessons" / glossary.GLOSSARY).read_text()
    found = {}
    for term, match in zip(glossary.read_glossary(text), glossary.ENTRY.finditer(text), strict=True):
        words = re.sub(r"<!--.*?-->|\(\[lesson \d\d\]\([^)]*\)\)", "", match["text"], flags=re.DOTALL)
        found[term.anchor] = " ".join(MARKDOWN_LINK.sub(r"\1", words).replace("`", "").replace("*", "").split())
    return found
