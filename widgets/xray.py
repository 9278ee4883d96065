"""Show a recorded run in a notebook, step by step, like a server's `/xray` page.

    from minivllm_lab.engines.step_recording import record
    from widgets import xray
    with record(llm, "run.jsonl"):
        llm.generate(prompts)
    xray.show("run.jsonl")

The view is the page's own (`minivllm/entrypoints/xray/view.js`) and needs no kernel once it is
drawn.
"""

from __future__ import annotations

from pathlib import Path

import anywidget
import traitlets

from minivllm.entrypoints.xray.page import script, style
from minivllm_lab.engines.step_recording import read_recording


class XRay(anywidget.AnyWidget):
    """A player for a recorded run: pause, step back, choose a request."""

    _esm = script()
    _css = style()
    text = traitlets.Unicode().tag(sync=True)


def show(path: str | Path) -> XRay:
    """Show a recorded run.

    Raises:
        MinivllmError: The file cannot be read, or is not a recording.
    """
    read_recording(path)
    return XRay(text=Path(path).read_text())
