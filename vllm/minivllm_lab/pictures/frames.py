"""A picture in steps: one SVG for each step, shown as an animation on a page and with buttons in
a notebook.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Sequence
from html import escape

from minivllm_lab.pictures.drawing import QUIET, RULE, attributes, line, number, svg, text, wrapped

MARGIN, CAPTION_SIZE, LINE_HEIGHT, COUNT_WIDTH = 16, 14, 20, 64
BUTTONS = (("|◀", "First step"), ("◀", "Step back"), ("▶", "Step forward"), ("▶|", "Last step"))
"""Sign and name of each; ⏮ and ⏭ are missing from too many fonts."""


class Frames:
    """Stills of one mechanism, in order, each an SVG of the same size without an `id`, and with a caption."""

    def __init__(self, stills: Sequence[str], captions: Sequence[str]) -> None:
        self.stills, self.captions = zip(*zip(stills, captions, strict=True), strict=True)
        assert not any(re.search(r"\sid=", still) for still in stills), "an id would occur several times on a page"
        (size,) = {re.findall(r'^<svg [^>]*?width="([\d.]+)" height="([\d.]+)"', still)[0] for still in stills}
        self.width, self.height = map(float, size)

    def __len__(self) -> int:
        return len(self.stills)

    def still(self, index: int) -> str:
        """Return the SVG of one step; -1 is the last."""
        return self.stills[index]

    def animated(self, seconds: float = 7.0) -> str:
        """Return one SVG that shows each still for `seconds`, the last one for twice as long, in a
        loop.

        It needs no script. Viewers that do not animate, printers, and readers who asked for reduced
        motion see the last still alone, so it should sum up the others.
        """
        lines = [wrapped(caption, self.width - 2 * MARGIN - COUNT_WIDTH, CAPTION_SIZE) for caption in self.captions]
        height = self.height + max(map(len, lines)) * LINE_HEIGHT + MARGIN
        name = self._name()
        frames = [self._frame(name, index, lines[index]) for index in range(len(self))]
        rule = line((MARGIN, self.height), (self.width - MARGIN, self.height), RULE, width=1)
        label = f"{len(self)} steps. " + " ".join(f"{step}: {words}" for step, words in enumerate(self.captions, 1))
        return (
            svg(self.width, height, f"<style>{self._motion(name, seconds)}</style>", rule, *frames, label=label) + "\n"
        )

    def html(self) -> str:
        """Return the steps with buttons, for a notebook: no kernel and no script is needed to move
        through them.
        """
        name = f"{self._name()}-{uuid.uuid4().hex[:8]}"  # the same figure may stand on a page twice
        inputs = "".join(self._radio(name, index) for index in range(len(self)))
        steps = "".join(self._step(name, index) for index in range(len(self)))
        return f'<div class="{name}"><style>{self._looks(name)}</style>{inputs}{steps}</div>'

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return {"text/html": self.html(), "image/svg+xml": self.animated(), "text/plain": f"{len(self)} steps"}

    def _name(self) -> str:
        """Return a class name for the styles, unlike that of other figures: styles apply to the
        whole page.
        """
        return "f" + hashlib.sha256("\n".join(self.captions).encode()).hexdigest()[:8]

    def _motion(self, name: str, seconds: float) -> str:
        turns = len(self) + 1  # the last still counts twice
        shown = [f"@keyframes {name}{end} {{0% {{visibility: visible}} {number(100 * share / turns)}% "
                 "{visibility: hidden}}" for end, share in (("a", 1), ("z", 2))]  # fmt: skip
        rules = [f".{name} {{visibility: hidden; animation: {name}a {number(turns * seconds)}s step-end infinite}}"]
        rules += [f".{name}:last-of-type {{animation-name: {name}z}}"]
        rules += [
            f".{name}:nth-of-type({index + 1}) {{animation-delay: {number(index * seconds)}s}}"
            for index in range(len(self))
        ]
        return f"{''.join(shown)} @media (prefers-reduced-motion: no-preference) {{{' '.join(rules)}}}"

    def _frame(self, name: str, index: int, lines: list[str]) -> str:
        baseline = self.height + LINE_HEIGHT
        count = text(
            self.width - MARGIN, baseline, f"{index + 1} / {len(self)}", size=CAPTION_SIZE, colour=QUIET, anchor="end"
        )
        words = [
            text(MARGIN, baseline + row * LINE_HEIGHT, words, size=CAPTION_SIZE) for row, words in enumerate(lines)
        ]
        shown = None if index == len(self) - 1 else "hidden"
        return f'<g class="{name}"{attributes(visibility=shown)}>{self.stills[index]}{"".join(words)}{count}</g>'

    def _radio(self, name: str, index: int) -> str:
        """Return one of the radio inputs that select the visible step; the arrow keys move between
        them.
        """
        checked = " checked" if index == 0 else ""
        label = escape(f"Step {index + 1} of {len(self)}: {self.captions[index]}")
        return (
            f'<input type="radio" name="{name}" id="{name}-{index}" aria-label="{label}"{checked} '
            'data-lm-suppress-shortcuts="true">'
        )

    def _step(self, name: str, index: int) -> str:
        last = len(self) - 1
        targets = (0, max(index - 1, 0), min(index + 1, last), last)
        buttons = "".join(
            f'<label for="{name}-{target}" title="{title}"{" class=off" if target == index else ""}>{sign}</label>'
            for (sign, title), target in zip(BUTTONS, targets, strict=True)
        )
        caption = f"<span>{index + 1} / {len(self)}</span> <b>{escape(self.captions[index])}</b>"
        return f'<div class="step"><p>{buttons}{caption}</p>{self.stills[index]}</div>'

    def _looks(self, name: str) -> str:
        shown = ", ".join(
            f".{name} input:nth-of-type({step}):checked ~ .step:nth-of-type({step})" for step in range(1, len(self) + 1)
        )
        focused = f".{name} input:focus-visible ~ .step"
        return (
            f".{name} {{position: relative; font: 14px var(--jp-ui-font-family, system-ui, sans-serif)}}"
            f".{name} input {{position: absolute; opacity: 0; width: 1px; height: 1px}}"
            f".{name} .step {{display: none}} {shown} {{display: block}}"
            f"{focused} p {{outline: 2px solid #0072B2; outline-offset: 2px}}"
            f".{name} p {{margin: 0 0 6px; line-height: 1.9}} .{name} b {{font-weight: 500}}"
            f".{name} span {{opacity: .7; margin: 0 6px}}"
            f".{name} label {{display: inline-block; min-width: 34px; margin-right: 4px; text-align: center; "
            "cursor: pointer; background: #E8EAED; color: #202124; border-radius: 4px; line-height: 28px}"
            f".{name} label.off {{opacity: .4; cursor: default}}"
            f".{name} svg {{max-width: 100%; height: auto}}"
        )
