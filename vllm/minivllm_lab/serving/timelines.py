"""Lesson 06's timelines: which client gets a token when, and an event loop that one call blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from minivllm_lab.pictures.drawing import BLANK, BORDER, QUIET, RULE, line, rect, svg, text, tint
from minivllm_lab.pictures.palette import GREEN, SKY, VERMILLION

WIDTH, LEFT, RIGHT, ROW, TALL, MARK = 700, 76, 676, 28, 20, 5
TUNNEL, END = (6, 21), 30
"""Tenths of a second. The engine makes a step in each."""
OTHERS = ("Ann", "Ben", "Cleo", "Dan")
CALL = 3
"""The call beside the ticks waits for this many tenths of a second."""
LATE = tint(VERMILLION, 0.35)
TOKEN, AWAY, WAITS = ("a token", GREEN), ("reads nothing", BLANK), ("due, and must wait", LATE)

Bar = tuple[int, int, str, str]
"""Start, end, colour and words."""
Rows = dict[str, tuple[Sequence[int], Sequence[Bar]]]
"""The lines of a picture by their names: marks at their times, and bars below them."""


def bet() -> str:
    """Draw all tokens up to the tunnel, and a question mark for the others."""
    before = range(TUNNEL[0])
    rows: Rows = {name: (before, [(TUNNEL[0], END, "#FFFFFF", "?")]) for name in OTHERS}
    rows |= {"phone": (before, [(*TUNNEL, BLANK, "in a tunnel")])}
    return _picture("When do the others get their tokens?", {"": rows}, END, [TOKEN, AWAY])


def reveal() -> str:
    """Draw both servers while the phone is in the tunnel."""
    every, outside = turns(stops=False), turns(stops=True)
    tunnel, merged = (*TUNNEL, BLANK, "in a tunnel"), (TUNNEL[1], TUNNEL[1] + 1, SKY, "")
    naive: Rows = {name: (outside, [(*TUNNEL, LATE, "waits")]) for name in OTHERS}
    ours: Rows = {name: (every, []) for name in OTHERS}
    panels = {
        "The naive server": naive | {"phone": (outside, [tunnel])},
        "This lesson's server": ours | {"phone": ([at for at in outside if at != TUNNEL[1]], [tunnel, merged])},
    }
    legend = [TOKEN, AWAY, WAITS, ("all that it missed", SKY)]
    return _picture("One phone reads nothing for 1.5 s", panels, END, legend)


def turns(stops: bool) -> list[int]:
    """Return when the others get tokens; a server that `stops` waits until the phone reads again."""
    return [at for at in range(END) if not stops or not TUNNEL[0] <= at < TUNNEL[1]]


def loop() -> str:
    """Draw the lesson's ticks beside a wait that hands the thread back, and one that keeps it."""
    waits: Rows = {"ticks": (ticks(blocked=False), []), "phone": ([], [(0, CALL, BLANK, "asyncio.sleep(0.3)")])}
    blocks: Rows = {
        "ticks": (ticks(blocked=True), [(1, CALL, LATE, "waits")]),
        "phone": ([], [(0, CALL, VERMILLION, "time.sleep(0.3)")]),
    }
    panels = {"A wait with await: the loop goes on": waits, "A call that blocks: the loop stands still": blocks}
    legend = [("a tick", GREEN), ("paused", BLANK), ("keeps the thread", VERMILLION), WAITS]
    return _picture("One event loop, one thread", panels, 8, legend)


def ticks(blocked: bool) -> list[int]:
    """Return when five ticks come that are a tenth apart; a call may block the loop after the first."""
    start = CALL if blocked else 1
    return [0, *range(start, start + 4)]


def _picture(title: str, panels: Mapping[str, Rows], end: int, legend: Sequence[tuple[str, str]]) -> str:
    """Draw panels of rows below each other over one axis in seconds."""
    scale = (RIGHT - LEFT) / end
    parts = [text(16, 28, title, size=15, bold=True)]
    y = 44.0
    for panel, rows in panels.items():
        y += 26 if panel else 0
        parts.append(text(16, y - 12, panel))
        for name, (marks, bars) in rows.items():
            parts += [text(LEFT - 10, y + 15, name, anchor="end"), line((LEFT, y + TALL), (RIGHT, y + TALL), RULE)]
            for start, stop, fill, words in bars:
                width = (stop - start) * scale
                parts.append(rect(LEFT + start * scale, y, width, TALL, fill, stroke=QUIET, label=words, size=12))
            parts += [rect(LEFT + at * scale, y, MARK, TALL - 2, GREEN) for at in marks]
            y += ROW
        y += 8
    for tenth in range(0, end + 1, 5 if end > 10 else 1):
        parts.append(text(LEFT + tenth * scale, y + 6, f"{tenth / 10:g} s", size=12, colour=QUIET, anchor="middle"))
    for index, (words, colour) in enumerate(legend):
        x = LEFT + 155 * index
        parts += [rect(x, y + 20, 18, 14, colour, stroke=BORDER), text(x + 25, y + 32, words, size=12)]
    return svg(WIDTH, y + 46, *parts, label=f"{title}. {'; '.join(filter(None, panels))}")
