"""Draw lesson 07's still pictures: its bet and the reveal, and a tree of drafts beside the mask
with which one pass verifies all of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from minivllm_lab.pictures.drawing import BLANK, QUIET, RULE, line, rect, svg, text, tint
from minivllm_lab.pictures.palette import BLUE, GREEN, GREY, ORANGE, VERMILLION

WIDTH, LEFT = 700, 16
KNOWN = tint(BLUE, 0.2)
OWN = tint(BLUE, 0.6)
DRAFT = tint(ORANGE, 0.6)
ACCEPTED = tint(GREEN, 0.6)
REJECTED = "#FFFFFF"
"""Fills with one meaning in all pictures of this lesson; `chip` outlines rejected drafts."""

TOKENS, TARGET, GUESSED = ("+", "-", "*"), (0.5, 0.3, 0.2), (0.3, 0.1, 0.6)
"""The lesson's example by hand: p is the target's distribution, q the guesser's."""
FLOOR, SCALE, BAR, GROUP = 250, 300, 78, 222

NODES = (("a", -1, 150), ("*", 0, 102), ("+", 0, 198), ("b", 1, 78), ("2", 1, 126), ("b", 2, 174), ("1", 2, 222))
"""The last known token and six drafts: the token, the node before it, and where it stands."""
CHANCES = (1.0, 0.6, 0.3, 0.42, 0.12, 0.24, 0.06)
"""The product of the drafter's probabilities up to each node."""
SAMPLED, FIRST_POSITION = (2, 5), 9
BOX, DEPTH, TALL = 56, 116, 28
MASK_LEFT, MASK_TOP, CELL = 420, 74, 27

Bar = Sequence[tuple[float, str]]
"""The parts of a bar from the bottom up: a probability and a fill."""


def bet() -> str:
    """Draw how often each token is guessed, and how often the model would sample it."""
    bars = [([(q, DRAFT)], [(p, OWN)]) for p, q in zip(TARGET, GUESSED, strict=True)]
    legend = (("q: the guesser draws it", DRAFT), ("p: your model would sample it", OWN))
    return _bars("The text so far: “return a”. Which token is next?", bars, ("q", "p"), legend)


def reveal() -> str:
    """Draw which part of the guesses is accepted, and what has to be added to it."""
    bars = []
    for p, q in zip(TARGET, GUESSED, strict=True):
        both = min(p, q)
        bars.append(([(both, ACCEPTED), (q - both, REJECTED)], [(both, ACCEPTED), (p - both, OWN)]))
    legend = (("accepted: min(p, q)", ACCEPTED), ("rejected", REJECTED), ("recovered: max(p − q, 0)", OWN))
    return _bars("Accept what p and q share, add what p lacks", bars, ("guess", "result"), legend)


def tree() -> str:
    """Draw the tree on the left and the mask on the right."""
    title = "Six drafts in a tree, verified by one pass"
    parts = [text(LEFT, 30, title, size=16, bold=True), text(MASK_LEFT, 50, "a row sees its branch only", colour=QUIET)]
    for node, (token, parent, y) in enumerate(NODES):
        x = _left(node)
        if parent >= 0:
            parts.append(line((_left(parent) + BOX, NODES[parent][2] + TALL / 2), (x, y + TALL / 2)))
            parts.append(text(x + BOX / 2, y - 5, f"{CHANCES[node]:g}", anchor="middle"))
        fill = KNOWN if parent < 0 else ACCEPTED if node in SAMPLED else REJECTED
        parts += [chip(x, y, BOX, TALL, fill, token, 15), *_row(node, token)]
    notes = ("above a draft: the drafter's", "probability of its whole branch")
    parts += [text(LEFT, 268 + 16 * row, words, size=12, colour=QUIET) for row, words in enumerate(notes)]
    legend = (("known", KNOWN), ("accepted", ACCEPTED), ("rejected", REJECTED), ("seen", GREY), ("hidden", BLANK))
    return svg(WIDTH, 344, *parts, *legend_at(312, legend), label=f"{title}: each row sees its own branch")


def chip(x: float, y: float, width: float, height: float, fill: str, label: str = "", size: float = 13) -> str:
    """Draw a box in one of this lesson's colours."""
    stroke, dash = (VERMILLION, "4 3") if fill == REJECTED else ("#FFFFFF", None)
    return rect(x, y, width, height, fill, stroke=stroke, dash=dash, radius=3, label=label, mono=True, size=size)


def legend_at(y: float, entries: Iterable[tuple[str, str]]) -> list[str]:
    """Draw a line of boxes, each with what its colour means."""
    parts, x = [], float(LEFT)
    for words, fill in entries:
        parts += [chip(x, y, 22, 15, fill), text(x + 30, y + 12, words)]
        x += 56 + 7.2 * len(words)
    return parts


def _bars(
    title: str, bars: Sequence[tuple[Bar, Bar]], names: tuple[str, str], legend: Iterable[tuple[str, str]]
) -> str:
    """Draw two bars for each token, with a name below each bar."""
    parts = [text(LEFT, 30, title, size=16, bold=True)]
    for group, (token, pair) in enumerate(zip(TOKENS, bars, strict=True)):
        middle = LEFT + 112 + group * GROUP
        for x, name, bar in zip((middle - BAR - 3, middle + 3), names, pair, strict=True):
            y = float(FLOOR)
            for share, fill in bar:
                y -= share * SCALE
                parts += [chip(x, y, BAR, share * SCALE, fill, f"{share:.1f}", 15)] if share > 0 else []
            parts.append(text(x + BAR / 2, FLOOR + 19, name, colour=QUIET, anchor="middle"))
        parts.append(text(middle, FLOOR + 48, token, size=22, anchor="middle", bold=True, mono=True))
    parts.append(line((LEFT, FLOOR), (WIDTH - LEFT, FLOOR)))
    words = [f"{token}: q {q}, p {p}" for token, p, q in zip(TOKENS, TARGET, GUESSED, strict=True)]
    return svg(WIDTH, FLOOR + 96, *parts, *legend_at(FLOOR + 68, legend), label=f"{title} {'; '.join(words)}.")


def _row(node: int, token: str) -> list[str]:
    """Draw a node's row of the mask, and its position in the text."""
    y, branch = MASK_TOP + node * CELL, _branch(node)
    parts = [
        rect(MASK_LEFT + key * CELL, y, CELL, CELL, GREY if key in branch else BLANK, stroke=RULE)
        for key in range(len(NODES))
    ]
    position = f"position {FIRST_POSITION + len(branch) - 1}"
    parts.append(text(MASK_LEFT - 12, y + 18, token, size=14, anchor="end", mono=True))
    parts.append(text(MASK_LEFT + (node + 0.5) * CELL, MASK_TOP - 6, token, anchor="middle", mono=True))
    parts.append(text(MASK_LEFT + len(NODES) * CELL + 10, y + 18, position, size=12, colour=QUIET))
    return parts


def _branch(node: int) -> list[int]:
    """Return a node and all before it, up to the last known token."""
    return [node, *_branch(NODES[node][1])] if node >= 0 else []


def _left(node: int) -> float:
    return LEFT + (len(_branch(node)) - 1) * DEPTH
