"""Sphinx's configuration of the site. `tools/build_site.py` gives it the pages, and what it can
read from the repository.
"""

from docutils import nodes
from docutils.utils.math import latex2mathml
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

project = "vLLM from first principles"
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
highlight_language = "text"
root_doc = "index"

# GitHub's Markdown, and nothing more: MyST's own syntax would read meaning into a line that begins
# with a percentage.
myst_enable_extensions = ["dollarmath", "strikethrough"]
myst_disable_syntax = ["myst_line_comment", "myst_block_break", "myst_target", "myst_role"]
myst_heading_anchors = 6
myst_dmath_double_inline = True
suppress_warnings = ["myst.header", "misc.highlighting_failure"]

html_theme = "furo"
html_title = project
html_favicon = "static/favicon.svg"
html_css_files = ["site.css", "shell.css"]
html_js_files = [(name, {"defer": ""}) for name in ("glossary.js", "page.js", "widgets.js", "room.js")]
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#00639b", "color-brand-content": "#00639b"},
    "dark_css_variables": {"color-brand-primary": "#6cb8ee", "color-brand-content": "#6cb8ee"},
}
html_copy_source = False
html_show_copyright = False
html_use_index = False
html_math_renderer = "mathml"

REPLACED = {r"\ln ": r"\ln\, ", r"\dots": r"\ldots ", "½": r"{\tfrac{1}{2}}", "¼": r"{\tfrac{1}{4}}"}
"""What docutils does not know -> what it does."""


def mathml(source: str, display: bool) -> str:
    """Return a formula for the browser to typeset. Raise docutils' MathError where it is not
    understood.
    """
    for unknown, known in REPLACED.items():
        source = source.replace(unknown, known)
    return latex2mathml.tex2mathml(source, as_block=display).replace("\n", "")


def inline(page: HTML5Translator, node: nodes.math) -> None:
    """Write a formula in a line."""
    page.body.append(mathml(node.astext(), display=False))
    raise nodes.SkipNode


def block(page: HTML5Translator, node: nodes.math_block) -> None:
    """Write a formula in a block."""
    page.body.append(f'<div class="math">{mathml(node.astext(), display=True)}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> None:
    """Sphinx calls this."""
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
