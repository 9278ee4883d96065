"""Build the site: the repository's lessons as web pages with search, formulas, diagrams and live
widgets.

    uv run python tools/build_site.py                  # into out/site; open out/site/index.html
    uv run python tools/build_site.py --out FOLDER

Sphinx builds the pages (its settings, style and scripts are in `site/`) from the Markdown that
`site_pages` prepares; `site_widgets` draws each widget's views in advance, and `site_live` adds the
Python that turns all knobs on a page from a server. Only its first build uses the network, and no
page requests anything from another host.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import site_exercises
import site_live
import site_pages
import site_request
import site_widgets
from address import address
from site_exercises import Exercise
from site_pages import Pages
from sphinx.application import Sphinx

from minivllm.errors import MinivllmError
from minivllm_lab.cli import Parser, run
from minivllm_lab.predict import page as predict_page
from widgets.shell.lesson_widget import script as shell_script
from widgets.shell.lesson_widget import style as shell_style
from widgets.shell.spec import Spec

ROOT = Path(__file__).resolve().parents[1]
START_GAMES = """
document.addEventListener("DOMContentLoaded", () => {
  document.querySelectorAll(".predict").forEach((root) => new Game(root, window.predictRounds, window.predictRules));
});
"""


class Embedded:
    """A builder of the HTML below the cells that show something, and of the scripts that this HTML
    needs.

    Args:
        specs: the widgets' specifications, by module name.
        exercises: the exercises that the site can check, by name.
        static: the folder for scripts.
        most_views: the maximum number of views of each widget.
        live: whether the site has Python to run the widgets.
    """

    def __init__(
        self, specs: Mapping[str, Spec], exercises: Mapping[str, Exercise], static: Path, most_views: int, live: bool
    ) -> None:
        self.specs = specs
        self.exercises = exercises
        self.static = static
        self.most_views = most_views
        self.live = live

    def __call__(self, module: str, function: str, arguments: Mapping[str, Any]) -> str:
        """Return the HTML for one call, or "" if it shows nothing."""
        package, _, name = module.rpartition(".")
        if (package, function) == ("widgets", "show") and name in self.specs:
            return self.widget(name, arguments)
        if package.startswith("minivllm_lab.") and (name, function) == ("opening", "frames"):
            return f'<div class="steps">{site_pages.one_line(import_module(module).frames(**arguments).html())}</div>'
        if (module, function) == ("widgets.predict", "show"):
            return self.game()
        if module == "exercises" and function in self.exercises:
            return self.exercise(self.exercises[function])
        return ""

    def exercise(self, part: Exercise) -> str:
        """Return the HTML of an exercise's place."""
        path = self.static / "exercises" / f"{part.name}.js"
        path.parent.mkdir(exist_ok=True)
        path.write_text(site_exercises.script(part))
        return site_exercises.html(part.name)

    def game(self) -> str:
        """Return the HTML of the game of the next step."""
        folder = ROOT / "vllm" / "minivllm_lab" / "predict"
        data = {"predictRounds": predict_page.rounds(), "predictRules": predict_page.rules()}
        (self.static / "predict_rounds.js").write_text(f"Object.assign(window, {json.dumps(data)});\n")
        (self.static / "predict.js").write_text((folder / "game.js").read_text() + START_GAMES)
        (self.static / "predict.css").write_text((folder / "game.css").read_text())
        return (
            '<link rel="stylesheet" href="../_static/predict.css"><div class="predict"></div>'
            '<script src="../_static/predict_rounds.js" defer></script>'
            '<script src="../_static/predict.js" defer></script>'
        )

    def widget(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return a widget's HTML: its first picture, which the script then replaces."""
        table = site_widgets.table(self.specs[name], arguments, self.most_views)
        known = "-".join([name, *(f"{key}-{value}" for key, value in arguments.items())])
        path = self.static / "widgets" / f"{known}.js"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(site_widgets.script(known, table))
        (self.static / "shell.js").write_text(site_widgets.front_end(shell_script()))
        live = f' data-widget="{name}"' if self.live else ""
        return site_pages.one_line(
            f'<div class="lesson-widget" data-table="{known}"{live}><figure>{site_widgets.still(table)}</figure></div>'
            f'<p class="widget-note">{site_widgets.note(table, self.live)}</p>'
            '<script src="../_static/shell.js" defer></script>'
            f'<script src="../_static/widgets/{path.name}" defer></script>'
        )


def build(root: Path, out: Path, specs: Mapping[str, Spec], most_views: int = site_widgets.MOST_VIEWS) -> Path:
    """Build a repository's site and return the page to open.

    Raises:
        MinivllmError: a page has a broken link, an invalid formula or the like;
            Sphinx has printed which.
    """
    if out.exists() and any(out.iterdir()) and not (out / "searchindex.js").is_file():
        raise MinivllmError(f"{out} holds something that is not a site: name another folder, or empty this one")
    pages = site_pages.pages_of(root, address(root))
    with tempfile.TemporaryDirectory() as folder:
        source, static, built = (Path(folder, part) for part in ("source", "static", "built"))
        static.mkdir()
        missing = site_live.add(root, static, specs)
        if missing:
            print(f"the site's widgets turn only the knobs that were drawn in advance: {missing}")
        exercises = {} if missing else site_exercises.exercises(root)
        site_pages.stage(pages, source, Embedded(specs, exercises, static, most_views, live=not missing))
        request, own = source / site_request.PAGE, source / site_request.OWN
        request.write_text(site_request.page(request.read_text(), root))
        own.write_text(site_request.own_page(own.read_text()))
        site_request.add(static)
        (static / "shell.css").write_text(shell_style())
        (static / "glossary.js").write_text(f"window.glossary = {json.dumps(site_pages.definitions(pages))};\n")
        run_sphinx(pages, source, built, static)
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(built, out, ignore=shutil.ignore_patterns(".buildinfo"))
    return out / "index.html"


def run_sphinx(pages: Pages, source: Path, out: Path, static: Path) -> None:
    """Build HTML from the staged pages."""
    settings = {
        "html_static_path": [str(pages.root / "site" / "static"), str(static)],
    }
    app = Sphinx(
        srcdir=source,
        confdir=ROOT / "site",
        outdir=out,
        doctreedir=source / ".doctrees",
        buildername="html",
        confoverrides=settings,
        status=None,
        warning=sys.stderr,
        freshenv=True,
    )
    app.build(force_all=True)
    if app.statuscode or app._warncount:
        raise MinivllmError(f"Sphinx printed {app._warncount} warnings, see above: fix them and build again")


def main(arguments: argparse.Namespace) -> None:
    """Build this repository's site and print where it is."""
    front = build(ROOT, arguments.out.resolve(), site_widgets.specs())
    print(f"the site is built: open {front.as_uri()}")
    if (front.parent / "_static" / "pyodide").is_dir():
        print(f"from a server, every knob turns: python3 -m http.server --directory {front.parent}")


def parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    flags = Parser(description=__doc__)
    flags.add_argument("--out", type=Path, default=ROOT / "out" / "site", help="folder of the site (default: out/site)")
    return flags


if __name__ == "__main__":
    run(main, parser())
