"""The x-ray of a recorded run in a notebook: each step of an engine, as a server's page `/xray` shows it.

    from minivllm_lab.step_recording import record
    from widgets import xray
    with record(llm, "run.jsonl"):
        llm.generate(prompts)
    xray.show("run.jsonl")

The view is the page's own (`minivllm/entrypoints/xray/view.js`) and needs no kernel once it stands. Where it cannot
come to life, the step with the most blocks held stands there as a picture.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import anywidget
import traitlets
from IPython.display import display

from minivllm.entrypoints.xray.page import script, style
from minivllm_lab.drawing import QUIET, RULE, ink_on
from minivllm_lab.palette import BLUE, GREEN, ORANGE, PALE, PURPLE, SKY, VERMILLION, YELLOW
from minivllm_lab.step_recording import ReplayedState, read_lines, replay
from widgets.shell.svg import Box, Drawing

HUES = (BLUE, ORANGE, GREEN, VERMILLION, PURPLE, SKY, YELLOW)
"""Colours of requests, in the order of `view.js`."""
WIDTH, CELL, CELLS = 720, 20, 1200


class XRay(anywidget.AnyWidget):
    """A recorded run, live: pause, step back, choose a request.

    Raises:
        MinivllmError: the file cannot be read, or is no recording.
    """

    _esm = script()
    _css = style()
    described = traitlets.Dict().tag(sync=True)

    def __init__(self, path: str | Path) -> None:
        self._still = f"xr-still-{uuid.uuid4().hex[:8]}"
        self._fullest = fullest(replay(path))
        text = b"\n".join(read_lines(path)).decode() + "\n"
        super().__init__(described={"text": text, "still": self._still})

    def still(self) -> str:
        """The step with the most blocks held, as SVG."""
        return draw(self._fullest)

    def _ipython_display_(self) -> None:
        """The picture, then the live view, which takes the picture away where it comes to life."""
        html = f'<figure class="{self._still}">{self.still()}</figure>'
        display({"text/html": html, "text/plain": self._fullest.words}, raw=True)
        bundle = super()._repr_mimebundle_()
        data, metadata = bundle if isinstance(bundle, tuple) else (bundle, None)
        display(data, metadata=metadata, raw=True)


@dataclass(frozen=True)
class Still:
    """The pool at one step."""

    step: int
    num_blocks: int
    holders: dict[int, list[int]]
    cached: frozenset[int]
    num_running: int
    num_waiting: int

    @property
    def words(self) -> str:
        """What there is to see, in one sentence."""
        idle = len(self.cached - self.holders.keys())
        return (
            f"Step {self.step}: {self.num_running} requests run and {self.num_waiting} wait; they hold "
            f"{len(self.holders)} of {self.num_blocks - 1} blocks, {idle} more are cached and free."
        )


def show(path: str | Path) -> XRay:
    """Show a recorded run.

    Raises:
        MinivllmError: the file cannot be read, or is no recording.
    """
    return XRay(path)


def fullest(states: Iterable[ReplayedState]) -> Still:
    """The state with the most blocks held, the first of them."""
    best: Still | None = None
    for state in states:
        holders = state.holders()
        if best is None or len(holders) > len(best.holders):
            running = sum(one.running for one in state.requests.values())
            best = Still(state.step, state.num_blocks, holders, frozenset(state.cached), running, state.waiting[0])
    assert best is not None, "a recording has a state"
    return best


def draw(still: Still) -> str:
    """A cell for each block: coloured and numbered by request, hatched when shared, with a dot when cached and free."""
    columns = WIDTH // CELL
    shown = min(still.num_blocks, CELLS)
    drawing = Drawing(WIDTH, 30 + -(-shown // columns) * CELL, "X-ray", still.words)
    drawing.paragraph((0, 14), still.words, WIDTH)
    for block in range(shown):
        box = Box(block % columns * CELL, 26 + block // columns * CELL, CELL - 2, CELL - 2)
        _cell(drawing, box, still.holders.get(block, []), block in still.cached or block == 0)
    return drawing.render()


def _cell(drawing: Drawing, box: Box, holders: list[int], dim: bool) -> None:
    if not holders:
        drawing.rect(box, PALE if dim else "none", stroke=RULE)
        if dim:
            drawing.circle((box.x + box.width / 2, box.y + box.height / 2), 2, QUIET)
        return
    colour = HUES[(holders[0] - 1) % len(HUES)]
    drawing.rect(box, colour)
    if len(holders) > 1:
        drawing.hatch(box, ink_on(colour), gap=5)
    middle = (box.x + box.width / 2, box.bottom - 5)
    drawing.text(middle, str(holders[0]), colour=ink_on(colour), size=9, anchor="middle")
