"""Show a widget in a notebook, whose packages are imported only then: a page's worker has none."""

from __future__ import annotations

from typing import Any

from widgets.shell.live import Live
from widgets.shell.spec import Spec


def notebook_widget(spec: Spec, **settings: Any) -> Live:
    """Return a widget that JupyterLab displays; its arguments are those of `Live`."""
    from widgets.shell.lesson_widget import LessonWidget

    return LessonWidget(spec, **settings)
