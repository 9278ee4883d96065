"""Draw lesson 05's prefix cache: which users' contexts are in the pool, and a map of hit rates."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from minivllm_lab.optimization_catalog.prefix_reuse import SHARED, Reuse
from minivllm_lab.pictures.drawing import QUIET, RULE, number, text_width
from minivllm_lab.pictures.palette import BLUE, GREEN, INK, PURPLE, VERMILLION
from widgets.prefix_caching.state import POOLS, USERS, State, milliseconds
from widgets.shell.plot import MARGIN, WIDE, Axes, Scale, counted, hidden_note, percent, tokens
from widgets.shell.strip import draw_title
from widgets.shell.svg import BOLD, HEADING, SMALL, Box, Drawing, Segment, legend
from widgets.shell.theme import BROKEN, CARD, MISSED, PINNED, RAMP

GUTTER = 40
ROW, STRIP = 18, 148
"""Heights in pixels of a row of the map, and of the strip."""
MOST_PIECES = 200
"""The number of pieces into which the strip's bars are cut, so that they grow as the drawing
plays.
"""


ACROSS = Scale(POOLS[0] / 2**0.25, POOLS[0] * 2 ** (len(POOLS) / 2 - 0.25), log=True)
UP = Scale(0, len(USERS))
MIDDLES = {pool: POOLS[0] * 2 ** (index / 2) for index, pool in enumerate(POOLS)}
"""Where the columns' middles are on the axis: a step is about half an octave."""
TICKS = {middle: tokens(pool) for pool, middle in MIDDLES.items()}


def figure(state: State, width: float = 640, pinned: State | None = None) -> str:
    """Draw the pool from request to request, and the map of hit rates."""
    here = _of_cell(state, state.users, state.pool, state.here)
    drawing = Drawing(width, 1000, f"Prefix cache: {state.kind.title}", here)
    drawing.height = _draw_map(drawing, state, _draw_strip(drawing, state) + 27, pinned)
    return drawing.render()


def _of_cell(state: State, users: int, pool: int, cell: Reuse) -> str:
    """Write a cell's tooltip."""
    where = f"{users} users, {tokens(pool)} tokens of KV cache"
    hits = f"{where}: {percent(cell.hit_rate, 1)} hits, {cell.evicted:,} evictions"
    wrong = f", {percent(sum(cell.wrong) / sum(cell.prompts), 1)} in blocks of another text" if any(cell.wrong) else ""
    ttft = f"; p95 TTFT {milliseconds(state.ttft(cell), state.target)}"
    return f"{hits}{wrong}{ttft}{', too late' * state.missed(cell)}."


# ---- the map


def _draw_map(drawing: Drawing, state: State, top: float, pinned: State | None) -> float:
    """Draw the map with its title and axes; return the y below."""
    late = f"p95 time to first token above {state.target * 1e3:g} ms"
    keys = [Segment(f"too slow: first token over {state.target * 1e3:g} ms", 0, BROKEN, hatched=True)]
    y, row = draw_title(drawing, "Hit rate, %", keys, top), ROW if drawing.width >= WIDE else 24
    plane = Box(MARGIN + GUTTER, y + 12, drawing.width - 2 * MARGIN - GUTTER, row * len(USERS))
    axes = Axes(drawing, replace(plane, height=plane.height + 9), ACROSS, UP)
    axes.frame("KV cache, tokens", "", x_ticks=[*TICKS], x_format=TICKS.__getitem__, y_ticks=())
    axes.here(MIDDLES[state.pool], "pool", line=False)  # under the cells, so that their tooltips work
    drawing.rect(plane, CARD, stroke=RULE)
    boxes = {place: _cell_box(plane, *place) for place in state.cells}
    for place, box in boxes.items():
        with drawing.layer(answer="1" if _is_hidden(state, *place) else ""):
            _draw_cell(drawing, state, place, box)
    if pinned:
        with drawing.layer(group="pinned"):
            for start, end in _borders(pinned, {place: _cell_box(plane, *place) for place in pinned.cells}):
                drawing.line(start, end, PINNED, width=2, dash="5 4")
    with drawing.layer(broken=late), drawing.answer():
        for start, end in _borders(state, boxes):
            drawing.line(start, end, VERMILLION, width=2.5)
    here = boxes[state.users, state.pool]
    corners = [(here.x, here.y), (here.right, here.y), (here.right, here.bottom), (here.x, here.bottom)]
    drawing.polyline([*corners, corners[0], corners[1]], INK, width=2.5)
    for users in USERS:
        place = (plane.x - 7, _cell_box(plane, users, POOLS[0]).bottom - row / 2 + 4)
        drawing.text(place, str(users), size=SMALL, colour=QUIET, anchor="end", bold=users == state.users)
    drawing.text((MARGIN + 4, plane.y + plane.height / 2), "users", size=SMALL, colour=QUIET, anchor="middle", turn=-90)
    return axes.box.bottom + 44


def _is_hidden(state: State, users: int, pool: int) -> bool:
    """Return whether a cell would give the answer away: its pool is no larger than the reader's, or
    too small for what must stay cached.
    """
    return pool <= max(state.pool, state.kind.kept(users, state.load.turns, state.load.prefix))


def _cell_box(plane: Box, users: int, pool: int) -> Box:
    wide, high = plane.width / len(POOLS), plane.height / len(USERS)
    return Box(plane.x + POOLS.index(pool) * wide, plane.bottom - (USERS.index(users) + 1) * high, wide, high)


def _draw_cell(drawing: Drawing, state: State, place: tuple[int, int], box: Box) -> None:
    """Draw a cell with its hit rate in percent, quieter outside the reader's row, and a cross if hits are wrong."""
    cell, mine = state.cells[place], place[0] == state.users
    missed = state.missed(cell)
    fill = BROKEN if missed else RAMP[1]
    drawing.rect(box, fill, stroke=CARD, tip=_of_cell(state, *place, cell))
    if missed:
        drawing.hatch(box, MISSED, gap=12)
    words = "✕ " * any(cell.wrong) + percent(cell.hit_rate).removesuffix(" %")
    at, colour = (box.x + box.width / 2, box.y + box.height / 2 + 4), INK if mine else QUIET
    drawing.text(at, words, size=SMALL, colour=colour, anchor="middle", bold=mine, halo=fill)


def _borders(state: State, boxes: dict[tuple[int, int], Box]) -> Iterator[tuple[tuple[float, float], ...]]:
    """Yield lines between cells that miss the limit and neighbours that do not."""
    for (users, pool), box in boxes.items():
        missed = state.missed(state.cells[users, pool])
        row, column = USERS.index(users), POOLS.index(pool)
        right = (users, POOLS[column + 1]) if column + 1 < len(POOLS) else None
        above = (USERS[row + 1], pool) if row + 1 < len(USERS) else None
        if right in boxes and state.missed(state.cells[right]) != missed:
            yield (box.right, box.y), (box.right, box.bottom)
        if above in boxes and state.missed(state.cells[above]) != missed:
            yield (box.x, box.y), (box.right, box.y)


# ---- the strip


def _draw_strip(drawing: Drawing, state: State) -> float:
    """Draw a row for each user, with their context in the pool and each request's hits; return the
    y below.
    """
    y = drawing.heading((MARGIN, 22), "Whose context is in the pool", "paler: only a part of it")
    colour = VERMILLION if state.wrong_rate or state.missed(state.here) else BLUE
    words = f"hit rate; {percent(state.endless_rate, 1)} with an endless cache"
    drawing.number((MARGIN, y + 32), percent(state.hit_rate, 1), words, colour)
    box = Box(MARGIN + GUTTER, y + 66, drawing.width - 2 * MARGIN - GUTTER, STRIP)
    strip = _Strip(drawing, state, box)
    drawing.play([strip.caption(index) for index in range(len(state.here.admissions))])
    strip.draw()
    keys = [Segment(kind, 0, INK, draw=partial(_draw_mark, drawing, kind)) for kind in strip.kinds()]
    drawing.text((box.right, box.bottom + 16), "requests →", size=SMALL, colour=QUIET, anchor="end")
    with drawing.answer():
        return legend(drawing, (box.x, box.bottom + 16), keys, box.width - 80) - 19


class _Strip:
    """A drawing with users as rows and admissions as columns."""

    def __init__(self, drawing: Drawing, state: State, box: Box) -> None:
        self.drawing = drawing
        self.state = state
        self.box = box
        self.could = state.load.findable()
        self.admissions = state.here.admissions
        self.rows = [SHARED] * (state.load.shared_blocks > 0) + list(range(state.users))
        self.high, self.wide = box.height / len(self.rows), box.width / len(self.admissions)
        self.last = len(self.admissions) - 1
        returns = (
            at for at, each in enumerate(self.admissions) if any(index % state.load.turns for index in each.requests)
        )
        self.first_return = next(returns, 0)
        self.held = self._held()

    def kinds(self) -> list[str]:
        """List what happens to prompts here."""
        found = {self._kind(index) for admission in self.admissions for index in admission.requests}
        return [kind for kind in ("hit", "recomputed", "of another text") if kind in found]

    def draw(self) -> None:
        """Draw all rows, up to the first user's return and then the rest, hidden until the reader has
        guessed; each user's row forms a group.
        """
        every = math.ceil(13 / self.high)
        self.drawing.rect(self.box, CARD, stroke=RULE)
        left = self.box.x + self.first_return * self.wide
        hidden_note(self.drawing, Box(left, self.box.y, self.box.right - left, self.box.height))
        for index, user in enumerate(self.rows):
            with self.drawing.layer(group=f"user {user}"):
                top = self.box.y + index * self.high
                # The whole row reacts to the pointer.
                self.drawing.rect(Box(self.box.x, top, self.box.width, self.high), "transparent")
                self._bars(user, top, 0, self.first_return)
                with self.drawing.answer():
                    self._bars(user, top, self.first_return, self.last + 1)
            if index % every == 0:
                name = "all" if user == SHARED else str(user + 1)
                place = (self.box.x - 7, top + self.high / 2 + 4)
                self.drawing.text(place, name, size=SMALL, colour=QUIET, anchor="end")
        self._marks(0, self.first_return)
        with self.drawing.answer():
            self._draw_evictions()
            self._marks(self.first_return, self.last + 1)
        middle = (MARGIN + 4, self.box.y + self.box.height / 2)
        self.drawing.text(middle, "user", size=SMALL, colour=QUIET, anchor="middle", turn=-90)

    def caption(self, index: int) -> str:
        """Describe what happens in a frame."""
        admission = self.admissions[index]
        user, turn = divmod(admission.requests[0], self.state.load.turns)
        parts = [self._parts(request) for request in admission.requests]
        hits = sum(part[0] for part in parts)
        prompts = sum(sum(part[:3]) for part in parts)
        subject = f"User {user + 1}, turn {turn + 1}" if len(parts) == 1 else f"{len(parts)} requests at once"
        lost = sum(blocks for _, blocks in admission.lost)
        users = [str(user + 1) for user, _ in admission.lost if user != SHARED]
        owners = ["all"] * (len(users) < len(admission.lost))
        owners += [f"user{'s' * (len(users) > 1)} {', '.join(users)}"] * bool(users)
        evicts = f"; {counted(lost, 'block')} of {' and '.join(owners)} evicted" if lost else ""
        return f"{subject}: {hits:,} of {prompts:,} tokens hit{evicts}."

    def _parts(self, index: int) -> tuple[int, int, int, int]:
        """Return a request's prompt tokens that hit, are recomputed and are new, and those of the
        hits that are wrong.
        """
        hits = self.state.here.found[index]
        again = max(0, self.could[index] - hits)
        return hits, again, self.state.here.prompts[index] - hits - again, self.state.here.wrong[index]

    def _held(self) -> dict[int, list[float]]:
        """Return, by user, what share of their context is in the pool after each admission."""
        load = self.state.load
        held = Counter[int]()
        full = dict.fromkeys(self.rows, 1)
        shares: dict[int, list[float]] = {user: [] for user in self.rows}
        for admission in self.admissions:
            for user, blocks in admission.lost:
                held[user] -= blocks
            for index in admission.requests:
                user, turn = divmod(index, load.turns)
                full[user] = max(1, load.context_blocks(turn) - load.shared_blocks)
                held[user] = load.context_blocks(turn) - load.shared_blocks
                if load.shared_blocks:
                    held[SHARED] = full[SHARED] = load.shared_blocks
            for user in self.rows:
                shares[user].append(max(0, held[user]) / full[user])
        return shares

    def _bars(self, user: int, top: float, first: int, end: int) -> None:
        """Draw bars in pieces, each from its first column, and paler where only part of the context
        is left.
        """
        most = max(1, math.ceil(len(self.rows) * len(self.admissions) / MOST_PIECES))
        shares = self.held[user]
        y = number(top + self.high / 2)
        self.drawing.add(f'<g stroke="{RAMP[3]}" stroke-width="{number(self.high - 2)}" fill="none">')
        for index in range(first + 1, end + 1):
            if index < end and index - first < most and shares[index] == shares[first]:
                continue
            if shares[first] > 0:
                seam = 0.5 * (shares[first] == 1)  # which full pieces cover
                x, wide = number(self.box.x + first * self.wide), number((index - first) * self.wide + seam)
                faint = f"{0.2 + 0.8 * shares[first] ** 2:.2f}".lstrip("0")
                shape = f'd="M{x} {y}h{wide}" stroke-opacity="{faint}"'
                self.drawing.add(f'<path {shape} data-at="{first} {self.last}"/>')
            first = index
        self.drawing.add("</g>")

    def _kind(self, index: int) -> str:
        """Return what happens to a request's prompt."""
        hits, again, _, wrong = self._parts(index)
        return "of another text" if wrong else "recomputed" if again else "hit" if hits else "new"

    def _marks(self, first: int, end: int) -> None:
        for column in range(first, end):
            for index in self.admissions[column].requests:
                user = index // self.state.load.turns
                with self.drawing.layer(group=f"user {user}", at=f"{column} {self.last}"):
                    _draw_mark(self.drawing, self._kind(index), self._start(column, user), min(6, self.high / 2 - 1))

    def _start(self, column: int, user: int) -> tuple[float, float]:
        """Return where a user's row is when a request is admitted."""
        return self.box.x + column * self.wide, self.box.y + (self.rows.index(user) + 0.5) * self.high

    def _draw_evictions(self) -> None:
        """Mark each context that is evicted before its user returns, up to their return, and say how
        long before.
        """
        evicted: dict[int, int] = {}
        spans: list[tuple[int, int, int]] = []
        for column, admission in enumerate(self.admissions):
            for user in (index // self.state.load.turns for index in admission.requests if self._parts(index)[1]):
                if user in evicted and not self.held[user][column - 1]:
                    (x, y), end = self._start(evicted[user], user), self._start(column, user)
                    at = f"{column} {self.last}"
                    self.drawing.polyline([(x, y - 4), (x, y + 4), (x, y), end], VERMILLION, dash="1 3", at=at)
                    spans.append((evicted[user], column, user))
            evicted |= {user: column for user, _ in admission.lost}
        if spans:
            early, (left, first, gone) = sorted(end - start for start, end, _ in spans), spans[0]
            said = f"evicted {counted(early[0], 'request')}{' or more' * (early[0] < early[-1])} too early"
            said = "always " * (self.state.hit_rate == 0) + said
            room, at = BOLD * text_width(said, HEADING), f"{first} {self.last}"
            place = (min(self.box.x + left * self.wide, self.box.right - room), self.box.y - 9)
            self.drawing.text(place, said, size=HEADING, bold=True, colour=VERMILLION, at=at)
            self._draw_culprit(left, gone)

    def _draw_culprit(self, column: int, gone: int) -> None:
        """Draw a line from a context that goes out to the new user for whom it goes, where there is room for words."""
        user, turn = divmod(self.admissions[column].requests[-1], self.state.load.turns)
        (x, y), (_, end) = self._start(column, gone), self._start(column, user)
        lines = f"{user + 1} comes in", f"{gone + 1} goes out"
        if turn or x - 5 - text_width(lines[0], SMALL) < self.box.x:
            return
        self.drawing.line((x, y), (x, end), INK, width=1.5)
        for row, words in enumerate(lines):
            place = x - 5, min(end + 4, self.box.bottom - 20) + 15 * row
            self.drawing.text(place, words, size=SMALL, anchor="end", halo=True)


def _draw_mark(drawing: Drawing, kind: str, middle: tuple[float, float], radius: float = 4.5) -> None:
    """Draw a mark whose shape and colour show what happened to the prompt."""
    x, y = middle
    if kind == "of another text":
        drawing.polygon([(x - radius, y + radius), (x + radius, y + radius), (x, y - radius)], PURPLE)
    elif kind == "recomputed":
        wide = radius + 1
        drawing.polygon([(x - wide, y), (x, y - wide), (x + wide, y), (x, y + wide)], VERMILLION)
    elif kind == "hit":
        drawing.circle(middle, radius, GREEN, stroke=CARD if radius > 3.5 else "none")
    else:
        drawing.circle(middle, radius, "transparent", stroke="none")
