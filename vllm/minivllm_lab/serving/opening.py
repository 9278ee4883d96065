"""Lesson 06's pictures. The moving one: the followed request from a POST to its tokens, through the
server's two processes.

The way in is at the top, from left to right; the way out is at the bottom. The API server has one
event loop, the core a loop of steps; messages cross between them, and neither waits for the other.
"""

from __future__ import annotations

from collections.abc import Sequence

from minivllm_lab.pictures.drawing import QUIET, RULE, arrow, legend, rect, svg, text, tint
from minivllm_lab.pictures.followed import Followed, followed
from minivllm_lab.pictures.frames import Frames
from minivllm_lab.pictures.palette import BLUE, GREEN, INK, ORANGE
from minivllm_lab.serving import timelines
from minivllm_lab.serving.processes import processes

WIDTH, HEIGHT = 700, 372
TOP, MIDDLE, BOTTOM, TALL = 74, 160, 256, 62
PROMPT_COLOUR, STEP_COLOUR, OUTPUT_COLOUR = tint(BLUE, 0.3), tint(ORANGE, 0.75), tint(GREEN, 0.45)
LEGEND = (
    ("tokens of the prompt", PROMPT_COLOUR),
    ("computed in this step", STEP_COLOUR),
    ("tokens of the answer", OUTPUT_COLOUR),
)
CHIP, GAP = 24, 3
Box = tuple[str, float, float, float, float]
"""A name; x, y, width and height."""
CLIENT: Box = ("POST /v1/completions", 14, TOP, 138, TALL)
TEXT: Box = ("what the client has", 14, BOTTOM, 138, TALL)
INPUT: Box = ("input processor", 184, TOP, 264, TALL)
LOOP: Box = ("the event loop", 184, MIDDLE, 264, 56)
COLLECTOR: Box = ("collector", 184, BOTTOM, 124, TALL)
OUTPUT: Box = ("output processor", 332, BOTTOM, 116, TALL)
INBOX: Box = ("inbox", 496, TOP, 190, TALL)
STEP: Box = ("step", 496, MIDDLE, 190, 56)
OUTBOX: Box = ("outbox", 496, BOTTOM, 190, TALL)
BOXES = (CLIENT, TEXT, INPUT, LOOP, COLLECTOR, OUTPUT, INBOX, STEP, OUTBOX)
PROCESSES = (("the client", 6, 154), ("API server: one event loop", 176, 280), ("engine core", 488, 206))


def frames() -> Frames:
    """Draw seven stills: the way in, a step, the way out, a slow reader, and a summary."""
    run = followed()
    return Frames(*zip(*_way_in(run), *_way_out(run), _summary(run), strict=True))


def stills() -> dict[str, str]:
    """Draw the pictures that stand alone in the text, by the name of their file."""
    return {
        "bet": timelines.bet(),
        "reveal": timelines.reveal(),
        "loop": timelines.loop(),
        "tp4": processes(4, 1),
        "dp4": processes(1, 4),
    }


def _way_in(run: Followed) -> list[tuple[str, str]]:
    """Draw the stills from the POST to the first step, with their captions."""
    prompt = run.request.prompt
    ids, pieces = [str(token.id) for token in prompt], [token.shown for token in prompt]
    return [
        (
            _still("reads sockets", _words(CLIENT, "JSON"), _across(CLIENT, INPUT)),
            "A client posts some JSON. The event loop reads it between those of other clients.",
        ),
        (
            _still("tokenizes, checks", _chips(INPUT, ids, PROMPT_COLOUR), _words(COLLECTOR, "empty")),
            "A bad request is refused here. The text becomes token ids, and the request gets a collector.",
        ),
        (
            _still(
                "goes on with others", _across(INPUT, INBOX), _words(INBOX, "ids and limits"), _down(INBOX, STEP),
                _chips(STEP, pieces, STEP_COLOUR), step=1,
            ),
            f"The request crosses to the core. Step 1 computes the prompt and samples {run.request.output[0].shown}.",
        ),
    ]  # fmt: skip


def _way_out(run: Followed) -> list[tuple[str, str]]:
    """Draw the stills from the first token to the last, with their captions."""
    pieces = [token.shown for token in run.request.output]
    first, back, at_client = pieces[:1], _across(OUTPUT, COLLECTOR), _chips(TEXT, pieces[:1], OUTPUT_COLOUR)
    sampled = str(run.request.output[0].id)
    return [
        (
            _still(
                "makes text of tokens", _chips(OUTBOX, [sampled], OUTPUT_COLOUR), _across(OUTBOX, OUTPUT),
                _chips(OUTPUT, first, OUTPUT_COLOUR), _chips(STEP, first, STEP_COLOUR), step=2,
            ),
            f"Token {sampled} crosses back and becomes text. Meanwhile, step 2 computes it.",
        ),
        (
            _still(
                "writes an event", back, _chips(COLLECTOR, first, OUTPUT_COLOUR), _across(COLLECTOR, TEXT), at_client,
                _chips(STEP, pieces[1:2], STEP_COLOUR), step=3,
            ),
            "The request's own coroutine takes it from the collector and writes an event: the first token.",
        ),
        (
            _still(
                "goes on with others", back, _chips(COLLECTOR, pieces[1:4], OUTPUT_COLOUR), at_client,
                _chips(STEP, pieces[3:4], STEP_COLOUR), step=5,
            ),
            "The client is slow, so three tokens are joined in its collector. They will be one event.",
        ),
    ]  # fmt: skip


def _summary(run: Followed) -> tuple[str, str]:
    """Draw the whole way in one still, with its caption."""
    ways = [(CLIENT, INPUT), (INPUT, INBOX), (OUTBOX, OUTPUT), (OUTPUT, COLLECTOR), (COLLECTOR, TEXT)]
    words = {CLIENT: "JSON", INPUT: "checks; text to token ids", INBOX: "requests and aborts", STEP: "one by one",
             OUTBOX: "token ids", OUTPUT: "ids to text", COLLECTOR: "joins unread text"}  # fmt: skip
    still = _still(
        "serves all clients, waits for none",
        *(_across(*way) for way in ways),
        *(_words(box, content) for box, content in words.items()),
        _down(INBOX, STEP),
        _down(STEP, OUTBOX),
        _chips(TEXT, [token.shown for token in run.request.output], OUTPUT_COLOUR),
    )
    return still, "The whole way. The last token frees the blocks, and the client gets [DONE]."


def _still(loop: str, *parts: str, step: int | None = None) -> str:
    """Draw the three frames, all boxes with their names, what the event loop does, and `parts`."""
    frames = [_process(*process) for process in PROCESSES]
    boxes = [_box(box, f"step {step}" if box is STEP and step else box[0]) for box in BOXES]
    used = [entry for entry in LEGEND if any(entry[1] in part for part in parts)]
    boxes += [*legend(14, HEIGHT - 22, 216, used), _words(LOOP, loop)]
    label = f"Client, API server and engine core; the event loop {loop}"
    return svg(WIDTH, HEIGHT, *frames, *boxes, *parts, label=label)


def _process(name: str, x: float, width: float) -> str:
    frame = rect(x, 34, width, 302, tint(INK, 0.04), stroke=RULE, stroke_width=1.5, radius=8)
    return text(x + 4, 24, name, size=14, bold=True) + frame


def _box(box: Box, name: str) -> str:
    _, x, y, width, height = box
    title = text(x, y - 6, name, size=12, colour=QUIET)
    return title + rect(x, y, width, height, "#FFFFFF", stroke=QUIET, radius=6)


def _words(box: Box, content: str) -> str:
    _, x, y, width, height = box
    return text(x + width / 2, y + height / 2 + 4, content, size=12, anchor="middle")


def _chips(box: Box, pieces: Sequence[str], fill: str) -> str:
    """Draw tokens in the middle of a box, in as many rows as they need."""
    _, x, y, width, height = box
    rows: list[list[str]] = [[]]
    for piece in pieces:
        if rows[-1] and _width([*rows[-1], piece]) > width - 10:
            rows.append([])
        rows[-1].append(piece)
    top = y + (height - len(rows) * (CHIP + GAP) + GAP) / 2
    parts = []
    for index, row in enumerate(rows):
        left = x + (width - _width(row)) / 2
        for piece in row:
            place = left, top + index * (CHIP + GAP), _width([piece]), CHIP
            parts.append(rect(*place, fill, radius=4, label=piece, mono=True, size=12))
            left += _width([piece]) + GAP
    return "".join(parts)


def _width(pieces: Sequence[str]) -> float:
    return sum(max(20.0, len(piece) * 7.3 + 8) for piece in pieces) + GAP * (len(pieces) - 1)


def _across(start: Box, end: Box) -> str:
    """Draw an arrow between two boxes of the same height: a message on its way."""
    y = start[2] + start[4] / 2
    sign = 1 if start[1] < end[1] else -1
    first, last = (start[1] + start[3], end[1]) if sign > 0 else (start[1], end[1] + end[3])
    return arrow((first + 3 * sign, y), (last - 3 * sign, y), INK, width=2)


def _down(start: Box, end: Box) -> str:
    x = start[1] + start[3] - 30
    return arrow((x, start[2] + start[4] + 2), (x, end[2] - 3), INK, width=2)
