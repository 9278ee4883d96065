"""The view of an engine's steps: one ES module and its style sheet, for the server's page and for
notebooks alike.
"""

import base64
import hashlib
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
RECORDED = HERE / "recorded.jsonl"
"""A run that the page shows while its server is idle; `tools/record_request.py` writes it."""


def theme_script() -> str:
    """Return the script that tells a dark page from a light one; the widgets' front end uses it
    too.
    """
    return (HERE / "theme.js").read_text()


def script() -> str:
    """Return the view, an ES module that fetches nothing by itself."""
    return (HERE / "view.js").read_text() + theme_script()


def style() -> str:
    """Return the view's style sheet."""
    return (HERE / "view.css").read_text()


@cache
def page() -> tuple[str, str]:
    """Return the server's page with everything it needs inlined, and its Content-Security-Policy."""
    code = f'{script()}\nstart(document.getElementById("xray"));\n'
    # The policy allows exactly this script, so nothing that a request contains can ever run in the
    # page.
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    html = (HERE / "page.html").read_text()
    return html.replace("{{style}}", style()).replace("{{script}}", code), policy
