"""Test that the site has the repository's text, and that all its links lead somewhere."""

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import site_pages
from address import address
from refusals import assert_refused
from repository import LESSONS, ROOT

from minivllm_lab.exercise import load

ADDRESS = address()
FENCE = re.compile(r"^( *)(```+)(?P<words>[^\n`]*)\n.*?^\1\2 *$", re.DOTALL | re.MULTILINE)


class Parsed(HTMLParser):
    """Links, anchors and visible text of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[tuple[str, str]] = []
        self.anchors: set[str] = set()
        self.tags: list[str] = []
        self.words: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("href", "src") and value is not None:
                self.links.append((tag, value))
            if name in ("id", "data-table") and value:
                self.anchors.add(value)

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Parsed]:
    return {path: Parsed(path) for path in sorted(site.rglob("*.html"))}


def article(site: Path, name: str) -> str:
    """Return the HTML of a page's own text."""
    result = re.search(r"<article.*?</article>", (site / f"{name}.html").read_text(), re.DOTALL)
    assert result
    return result[0]


def anchor(fragment: str) -> str:
    """Return where a link leads on its page: to an anchor, or to a widget whose knobs it sets."""
    return unquote(fragment).partition("?")[0]


def problems(site: Path, pages: dict[Path, Parsed]) -> Iterator[str]:
    for path, page in pages.items():
        for _, link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.is_file():
                yield f"{path.relative_to(site)}: {link} leads nowhere"
            elif parts.fragment and target.suffix == ".html" and anchor(parts.fragment) not in pages[target].anchors:
                yield f"{path.relative_to(site)}: {link}: no such anchor"


def test_every_link_inside_the_site_leads_somewhere(site: Path, pages: dict[Path, Parsed]):
    assert len(pages) > len(LESSONS) * 2
    assert list(problems(site, pages)) == []


def test_a_broken_link_and_a_broken_anchor_would_be_noticed(tmp_path: Path):
    (tmp_path / "a.html").write_text('<a href="b.html">gone</a> <a href="#no">no anchor</a> <a href="a.html#x" id="x">')
    page = {tmp_path / "a.html": Parsed(tmp_path / "a.html")}
    assert list(problems(tmp_path, page)) == ["a.html: b.html leads nowhere", "a.html: #no: no such anchor"]


def test_nothing_is_loaded_from_elsewhere(site: Path, pages: dict[Path, Parsed]):
    loaded = [(path.name, link) for path, page in pages.items() for tag, link in page.links if tag != "a"]
    assert [link for link in loaded if re.match(r"[a-z]+:|//", link[1]) and not link[1].startswith("data:")] == []
    for path in site.rglob("*.css"):
        addresses = re.findall(r"url\(\s*[\"']?(?!data:|#)([^)\"']+)|@import", path.read_text())
        assert not [address for address in addresses if "//" in address], path.name


def test_links_into_the_repository_name_files_that_are_there(pages: dict[Path, Parsed]):
    links = {link for page in pages.values() for _, link in page.links if link.startswith(f"{ADDRESS}/")}
    assert len(links) > 30
    for link in links:
        kind, branch, name = urlsplit(link.removeprefix(f"{ADDRESS}/")).path.split("/", 2)
        assert branch == "main"
        assert (ROOT / name).is_dir() if kind == "tree" else (ROOT / name).is_file(), link


def test_the_front_page_has_all_twelve_rows(site: Path):
    text = article(site, "index")
    rows = dict(re.findall(r"<tr[^>]*><td[^>]*><p>(\d\d)</p></td>\s*(.*?)</tr>", text, re.DOTALL))
    assert [*rows] == [f"{number:02}" for number in range(1, 13)]
    linked = [number for number, row in rows.items() if re.search(rf'href="lessons/{number}_\w+\.html"', row)]
    assert linked == [name[:2] for name in LESSONS]


def test_lessons_lead_to_each_other(site: Path):
    for before, after in pairwise(LESSONS):
        assert f'<a class="next-page" href="{after}.html">' in (site / "lessons" / f"{before}.html").read_text()
        assert f'<a class="prev-page" href="{before}.html">' in (site / "lessons" / f"{after}.html").read_text()


@pytest.mark.parametrize("name", LESSONS)
def test_a_lesson_comes_out_whole(site: Path, name: str):
    source, page = (ROOT / "lessons" / f"{name}.md").read_text(), article(site, f"lessons/{name}")
    prose = re.sub(r"`[^`\n]*`", "", FENCE.sub("", source))
    shown = re.sub(r"<(pre|svg|style|math).*?</\1>|<code.*?</code>", "", page, flags=re.DOTALL)
    shown = re.sub(r"<[^>]*>", "", re.sub(r"<!--.*?-->", "", shown, flags=re.DOTALL))
    folded = source.count("<details") + page.count('class="exercise"')  # the editor stands for the folded stub
    assert page.count('class="steps"') == 1
    assert page.count("<details") == folded == page.count("</details>")
    assert page.count("<math ") == len(re.findall(r"\$\$.+?\$\$|\$[^$\n]+\$", prose, re.DOTALL))
    for heading in re.findall(r"^## (.*)$", prose, re.MULTILINE):
        assert re.sub(r"[`*]", "", heading) in re.sub(r"<[^>]*>", "", page).replace("’", "'").replace("&amp;", "&")
    for left_over in ("```", "$", "**", "](", "exec", "region=", "output: vllm", "{toctree}"):
        assert left_over not in shown, left_over


@pytest.mark.parametrize("name", LESSONS)
def test_code_of_a_lesson_is_highlighted_whatever_else_its_fence_says(site: Path, name: str):
    words = [match["words"].split() for match in FENCE.finditer((ROOT / "lessons" / f"{name}.md").read_text())]
    python = sum(said[:1] == ["python"] for said in words)
    openings = 'class="steps"' in article(site, f"lessons/{name}")
    added = name == LESSONS[0]
    assert article(site, f"lessons/{name}").count('<div class="highlight-python') == python - openings + added


def test_diagrams_and_steps_are_drawn(site: Path):
    for path in [*(ROOT / "lessons").glob("0*.md"), ROOT / "ARCHITECTURE.md"]:
        name = path.relative_to(ROOT).with_suffix("").as_posix()
        assert article(site, name).count('<div class="mermaid"') == path.read_text().count("```mermaid")
        for diagram in re.findall(r'<div class="mermaid".*?</svg>', article(site, name), re.DOTALL):
            assert "<text" in diagram or "nodeLabel" in diagram
    first = article(site, f"lessons/{LESSONS[0]}")
    assert "_opening.svg" not in first, "the steps take the place of the moving picture beside them"
    ids = re.findall(r' id="([^"]+)"', first)
    assert len(ids) == len(set(ids))


def a_repository(folder: Path, page: str) -> site_pages.Pages:
    (folder / "lessons").mkdir()
    (folder / "README.md").write_text(page)
    (folder / "lessons" / "01_a.md").write_text("# A\n")
    (folder / "lessons" / "a.py").write_text("")
    return site_pages.pages_of(folder, "https://x.org/r/")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("[a](lessons/01_a.md#b)", "[a](lessons/01_a.md#b)"),
        ("[a](lessons/a.py)", "[a](https://x.org/r/blob/main/lessons/a.py)"),
        ("[a](lessons)", "[a](https://x.org/r/tree/main/lessons)"),
        ("[a](#b) [c](https://d.e)", "[a](#b) [c](https://d.e)"),
        ("`[a](lessons/a.py)`", "`[a](lessons/a.py)`"),
    ],
)
def test_each_kind_of_link(tmp_path: Path, line: str, expected: str):
    assert site_pages.page_lines(a_repository(tmp_path, line), "README.md", lambda *_: "") == [expected]


def test_a_link_from_a_lesson_to_the_readme_leads_to_the_front_page(tmp_path: Path):
    assert a_repository(tmp_path, "").target("lessons/01_a.md", "../README.md#b") == "../index.md#b"


def test_a_link_that_sets_knobs_may_run_over_the_end_of_a_line(tmp_path: Path):
    pages = a_repository(tmp_path, "Now [break\nit](#tiny?load=1.5).")
    site_pages.stage(pages, tmp_path / "staged", lambda *_: "")
    staged = (tmp_path / "staged" / pages.staged("README.md")).read_text()
    assert '<a class="knob" href="#tiny?load=1.5" title="Show this in the widget">break\nit</a>' in staged


def test_a_link_that_leads_nowhere_is_named(tmp_path: Path):
    pages = a_repository(tmp_path, "[a](lessons/no.md)")
    words = "README.md: the link lessons/no.md leads nowhere"
    assert_refused(words, site_pages.page_lines, pages, "README.md", lambda *_: "")


def test_what_is_live_takes_the_place_of_its_still_picture(tmp_path: Path):
    cell = "```python exec\nfrom widgets import a\n\na.show()\n```"
    for text in (f"![Still](lessons/a.py)\n\n{cell}", f"{cell}\n\n![Still](lessons/a.py)"):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        pages = a_repository(folder, f"Words.\n\n{text}\n\nMore.\n\n![Other](lessons/a.py)")
        live = "\n".join(site_pages.page_lines(pages, "README.md", lambda *call: f"<live {call[0]} {call[1]}>"))
        assert "<live widgets.a show>" in live
        assert "Still" not in live
        assert "Other" in live
        assert "Still" in "\n".join(site_pages.page_lines(pages, "README.md", lambda *_: ""))


def test_a_diagram_that_mermaid_does_not_understand_is_named(tmp_path: Path):
    pages = a_repository(tmp_path, "```mermaid\nflowchart LR\n    a -- b\n```")
    assert_refused(r"Mermaid cannot draw .*flowchart LR", site_pages.page_lines, pages, "README.md", lambda *_: "")


def test_a_hint_is_the_entry_without_links_and_forms():
    hints = site_pages.definitions(site_pages.pages_of(ROOT, ADDRESS))
    assert hints["block-table"].startswith("A request's list of blocks")
    assert not [anchor for anchor, words in hints.items() if not words or re.search(r"\]\(|<!--|`|\(\[?lesson", words)]


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path: Path):
    (tmp_path / "mine.txt").write_text("mine")
    build = load(ROOT / "tools" / "build_site.py").build
    assert_refused("holds something that is not a site", build, ROOT, tmp_path, {})
    assert (tmp_path / "mine.txt").read_text() == "mine"
