"""Lesson 06's opening: the followed request from a POST to its tokens, through the server's two
processes.

The way in is at the top, from left to right; the way out is at the bottom. The API process has one
event loop, the core a loop of steps; messages cross between them, and neither waits for the other.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from minivllm.core.engine_messages import EngineCoreRequest
from minivllm.engine.socket_messages import encode
from minivllm.sampling_params import SamplingParams
from minivllm_lab.drawing import QUIET, RULE, arrow, rect, svg, text, tint
from minivllm_lab.followed import MAX_TOKENS, NAME, PROMPT, Followed, followed
from minivllm_lab.frames import Frames
from minivllm_lab.palette import BLUE, GREEN, INK, ORANGE

WIDTH, HEIGHT = 860, 356
TOP, MIDDLE, BOTTOM, TALL = 74, 160, 256, 62
HELD, NEW, OUT = tint(BLUE, 0.3), tint(ORANGE, 0.75), tint(GREEN, 0.45)
CHIP, GAP = 24, 3
Box = tuple[str, float, float, float, float]
"""A name; x, y, width and height."""
CLIENT: Box = ("POST /v1/completions", 20, TOP, 178, TALL)
TEXT: Box = ("what the client has", 20, BOTTOM, 178, TALL)
INPUT: Box = ("input processor", 250, TOP, 300, TALL)
LOOP: Box = ("the event loop", 250, MIDDLE, 300, 56)
COLLECTOR: Box = ("collector", 250, BOTTOM, 148, TALL)
OUTPUT: Box = ("output processor", 412, BOTTOM, 138, TALL)
INBOX: Box = ("inbox", 604, TOP, 234, TALL)
STEP: Box = ("step", 604, MIDDLE, 234, 56)
OUTBOX: Box = ("outbox", 604, BOTTOM, 234, TALL)
BOXES = (CLIENT, TEXT, INPUT, LOOP, COLLECTOR, OUTPUT, INBOX, STEP, OUTBOX)
PROCESSES = (("the client", 10, 198), ("API process: one event loop", 240, 320), ("core process", 594, 254))


def frames() -> Frames:
    """Draw eight stills: the POST, its tokens, the message, step 1, the way back, an event, a
    slow reader, the end.
    """
    run = followed()
    return Frames(*zip(*_way_in(run), *_way_out(run), strict=True))


def _way_in(run: Followed) -> list[tuple[str, str]]:
    """Draw the first four stills, from the POST to its first step, with their captions."""
    prompt, first = run.request.prompt, run.request.output[0].shown
    body = json.dumps({"prompt": PROMPT, "max_tokens": MAX_TOKENS, "stream": True})
    message = len(encode(_message(run)))
    return [
        (
            _still(
                _words(CLIENT, f"{len(body)} bytes of JSON"), _across(CLIENT, INPUT), _words(LOOP, "reads sockets"),
                active=(CLIENT, LOOP),
            ),
            f"A client posts {body}: {len(body)} bytes. The event loop reads them as they arrive, and those of all "
            "other clients in between.",
        ),
        (
            _still(
                _chips(INPUT, [str(token.id) for token in prompt], HELD), _words(LOOP, "tokenizes, checks"),
                _words(COLLECTOR, "empty"), active=(INPUT, LOOP, COLLECTOR),
            ),
            f"Whatever can be refused is refused here, before a stream begins. The text becomes {len(prompt)} tokens; "
            "the request gets a collector, in which its outputs will wait for its reader.",
        ),
        (
            _still(
                _words(INBOX, f"{message} bytes of MessagePack"), _across(INPUT, INBOX),
                _words(LOOP, "waits for no client, serves others"), active=(INBOX, LOOP),
            ),
            f"The request crosses to the core's process as {message} bytes of plain data. Nothing waits for an answer: "
            "the loop goes on with other sockets.",
        ),
        (
            _still(
                _chips(STEP, [token.shown for token in run.steps[0].row().tokens], NEW),  # type: ignore[union-attr]
                _down(INBOX, STEP), _words(LOOP, "serves others"), active=(STEP,), step=1,
            ),
            f"Between two steps the core takes in what has arrived. Its first step with this request computes all "
            f"{len(prompt)} tokens of the prompt, and samples {first}.",
        ),
    ]  # fmt: skip


def _way_out(run: Followed) -> list[tuple[str, str]]:
    """Draw the last four stills, from the first token to the end, with their captions."""
    output = run.request.output
    shown = [token.shown for token in output]
    return [
        (
            _still(
                _chips(OUTBOX, [str(output[0].id)], OUT), _across(OUTBOX, OUTPUT), _chips(OUTPUT, [shown[0]], OUT),
                _chips(STEP, [shown[0]], NEW), _words(LOOP, "token → text"), active=(OUTBOX, OUTPUT, STEP, LOOP),
                step=2,
            ),
            f"Token {output[0].id} crosses back and becomes text; stop strings are looked for. The core has not "
            f"waited: step 2 computes {shown[0]} already.",
        ),
        (
            _still(
                _chips(COLLECTOR, shown[:1], OUT), _across(OUTPUT, COLLECTOR), _across(COLLECTOR, TEXT),
                _chips(TEXT, shown[:1], OUT), _chips(STEP, shown[1:2], NEW), _words(LOOP, "writes an event"),
                active=(COLLECTOR, TEXT, STEP, LOOP), step=3,
            ),
            f'The reader of the collector gets the output and writes an event: data: {{… "text": '
            f"{json.dumps(output[0].text)} …}}. This is the time to the first token, as the client measures it.",
        ),
        (
            _still(
                _chips(COLLECTOR, shown[1:4], OUT), _across(OUTPUT, COLLECTOR), _chips(TEXT, shown[:1], OUT),
                _chips(STEP, shown[3:4], NEW), _words(LOOP, "this client's buffer is full"),
                active=(COLLECTOR, STEP, LOOP), step=5,
            ),
            "A client that reads slowly does not hold up the others. Its next outputs are joined in the collector, "
            "and go out as one event when it reads again: three tokens, one event.",
        ),
        (
            _still(
                _chips(TEXT, [token.shown for token in output], OUT), _across(COLLECTOR, TEXT),
                _words(OUTBOX, f"finish_reason: {run.request.finish_reason}"), _words(STEP, "its blocks are free"),
                _words(LOOP, "data: [DONE]"), active=(TEXT, OUTBOX, LOOP), step=6,
            ),
            f"The {len(output)}th token ends the request: the core frees its blocks, the client gets the rest and "
            "[DONE]. Had it left before, an abort would have crossed, and freed them within a step or two.",
        ),
    ]  # fmt: skip


def _message(run: Followed) -> EngineCoreRequest:
    """Encode the request as it crosses the socket. Its arrival time always takes nine bytes."""
    ids = [token.id for token in run.request.prompt]
    return EngineCoreRequest(NAME, ids, SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS), (), 0.5)


def _still(*parts: str, active: Sequence[Box], step: int | None = None) -> str:
    frames = [_process(*process) for process in PROCESSES]
    boxes = [_box(box, box in active, f"step {step}" if box is STEP and step else box[0]) for box in BOXES]
    names = ", ".join(box[0] for box in active)
    return svg(WIDTH, HEIGHT, *frames, *boxes, *parts, label=f"Client, API process and core process; at work: {names}")


def _process(name: str, x: float, width: float) -> str:
    fill = "none" if name == "the client" else tint(INK, 0.04)
    frame = rect(x, 34, width, HEIGHT - 48, fill, stroke=RULE, stroke_width=1.5, radius=8)
    return text(x + 4, 24, name, size=14, bold=True) + ("" if name == "the client" else frame)


def _box(box: Box, is_active: bool, name: str) -> str:
    _, x, y, width, height = box
    stroke, thick = ("#3C4043", 2) if is_active else (RULE, 1.5)
    title = text(x, y - 6, name, size=12, colour=QUIET)
    return title + rect(x, y, width, height, "#FFFFFF", stroke=stroke, stroke_width=thick, radius=6)


def _words(box: Box, content: str) -> str:
    _, x, y, width, height = box
    return text(x + width / 2, y + height / 2 + 4, content, size=12, anchor="middle", colour=INK)


def _chips(box: Box, pieces: Sequence[str], fill: str) -> str:
    """Draw tokens in the middle of a box, in as many rows as they need."""
    _, x, y, width, height = box
    rows: list[list[str]] = [[]]
    for piece in pieces:
        if rows[-1] and _width([*rows[-1], piece]) > width - 10:
            rows.append([])
        rows[-1].append(piece)
    top, shown = y + (height - len(rows) * (CHIP + GAP) + GAP) / 2, []
    for index, row in enumerate(rows):
        left = x + (width - _width(row)) / 2
        for piece in row:
            place = left, top + index * (CHIP + GAP), _width([piece]), CHIP
            shown.append(rect(*place, fill, radius=4, label=piece, mono=True, size=11))
            left += _width([piece]) + GAP
    return "".join(shown)


def _width(pieces: Sequence[str]) -> float:
    return sum(max(20.0, len(piece) * 7.0 + 8) for piece in pieces) + GAP * (len(pieces) - 1)


def _across(start: Box, end: Box) -> str:
    """Draw an arrow between two boxes of the same height: a message on its way."""
    y = start[2] + start[4] / 2
    right = start[1] < end[1]
    first, last = (start[1] + start[3], end[1]) if right else (start[1], end[1] + end[3])
    sign = 1 if right else -1
    return arrow((first + 3 * sign, y), (last - 3 * sign, y), INK, width=2)


def _down(start: Box, end: Box) -> str:
    x = start[1] + start[3] - 30
    return arrow((x, start[2] + start[4] + 2), (x, end[2] - 3), INK, width=2)
