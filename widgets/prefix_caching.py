"""Lesson 05: what a prefix cache finds, against users, prefix length and pool; and the cliff where it finds nothing.

The engine's own scheduler and block pool serve sessions that share their beginnings, under a virtual clock; a step's
time is that of Llama-3.1-8B on an H100, modelled. Every figure but the time is counted.

The picture in the lesson's text: `uv run python -P -m widgets.prefix_caching lessons/figures/05_prefix_cache.svg`
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from minivllm.config import CacheConfig, SchedulerConfig
from minivllm.errors import MinivllmError
from minivllm.lab.palette import BLUE, GREEN, GREY, INK, SKY, VERMILLION
from minivllm.simulate.cost_model import RooflineCost
from minivllm.simulate.hardware import get_hardware
from minivllm.simulate.known_models import known_model
from minivllm.simulate.sharing import Sharing, sessions, sharing
from minivllm.simulate.virtual_clock import simulate
from widgets.base import Challenge, LessonWidget, Progress, Verdict, choice, require_numbers, steps
from widgets.svg import MID, QUIET, SMALL, Axes, Box, Drawing, Scale, Segment, legend, stacked_bar, tokens

BLOCK_SIZE = 16
USERS, TURNS, PREFIXES = (1, 2, 4, 8, 16), (1, 2, 3, 4), (128, 256, 512, 1024)
POOLS = (2048, 4096, 8192, 16384, 32768)
LABELS = {
    "system": "one system prompt",
    "documents": "a document each",
    "chat": "conversations",
    "agent": "agents",
    "none": "nothing",
}
MOST = {"users": 64, "turns": 16, "prefix": 4096, "pool": 2**24}
START: dict[str, Any] = {"kind": "chat", "users": 8, "turns": 3, "prefix": 512, "pool": 16384}
THRASH: dict[str, Any] = {"kind": "documents", "users": 16, "turns": 4, "prefix": 512, "pool": 4096}


@dataclass(frozen=True)
class Turn:
    """Prompt tokens of all users in one turn, by what became of them."""

    found: int
    """In the cache: their prefill is skipped."""
    again: int
    """Computed, though an endless cache would have had them: evicted, and computed again."""
    first: int
    """Computed because nobody had computed them before, or not as part of a whole block."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.found + self.again + self.first


@dataclass(frozen=True)
class State:
    """One run of the sessions; the same for other numbers of users; and what an endless cache would find."""

    kind: Sharing
    users: int
    turns: tuple[Turn, ...]
    prefix: int
    pool: int
    """Tokens that the pool's usable blocks hold."""
    kept: int
    """Tokens that must stay for everyone's last turn."""
    curve: tuple[tuple[int, float, float], ...]
    """(users, hit rate, hit rate of an endless cache)."""
    ttft: float
    """Median time to first token of the turns after the first (of all, where there is one), in seconds, modelled."""
    endless_ttft: float

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens found in the cache."""
        return sum(turn.found for turn in self.turns) / sum(turn.total for turn in self.turns)

    @property
    def endless_hit_rate(self) -> float:
        """The same for a cache that never evicts."""
        return sum(turn.found + turn.again for turn in self.turns) / sum(turn.total for turn in self.turns)


def sweep(
    kind: str = START["kind"],
    users: int = START["users"],
    turns: int = START["turns"],
    prefix: int = START["prefix"],
    pool: int = START["pool"],
) -> State:
    """Serve sessions of users who take turns.

    Args:
        kind: who shares what, of `minivllm.simulate.sharing`.
        users: sessions.
        turns: requests of each session.
        prefix: tokens of the shared beginning.
        pool: tokens that the KV cache holds.

    Raises:
        MinivllmError: a value makes no sense, or the pool cannot hold a single request.
    """
    require_numbers(MOST, users=users, turns=turns, prefix=prefix, pool=pool)
    which = sharing(kind)
    if pool < BLOCK_SIZE:
        raise MinivllmError(f"the pool ({pool} tokens) holds at least one block of {BLOCK_SIZE}")
    runs = {n: _served(which, n, turns, prefix, pool) for n in sorted({users, *USERS})}
    could = {n: which.findable(n, turns, prefix, BLOCK_SIZE) for n in runs}
    evicted = sum(runs[users].found) < sum(could[users])
    return State(
        kind=which,
        users=users,
        turns=tuple(_turn(runs[users], could[users], turn, turns) for turn in range(turns)),
        prefix=prefix,
        pool=pool // BLOCK_SIZE * BLOCK_SIZE,
        kept=which.kept(users, turns, prefix),
        curve=tuple((n, run.hit_rate, sum(could[n]) / sum(run.prompts)) for n, run in runs.items()),
        ttft=runs[users].ttft,
        endless_ttft=_served(which, users, turns, prefix, None if evicted else pool).ttft,
    )


@dataclass(frozen=True)
class _Run:
    """Found and prompt tokens of each request, user by user."""

    found: tuple[int, ...]
    prompts: tuple[int, ...]
    ttft: float

    @property
    def hit_rate(self) -> float:
        return sum(self.found) / sum(self.prompts)


def _served(kind: Sharing, users: int, turns: int, prefix: int, pool: int | None) -> _Run:
    """The sessions on a pool of `pool` tokens; all pools that hold every token share one cached result."""
    longest = prefix + turns * (kind.question + kind.answer)
    ample = users * turns * (-(-longest // BLOCK_SIZE) + 1)
    blocks = ample if pool is None else min(ample, pool // BLOCK_SIZE)
    return _simulated(kind, users, turns, prefix, blocks)


@lru_cache(maxsize=1024)
def _simulated(kind: Sharing, users: int, turns: int, prefix: int, blocks: int) -> _Run:
    work = sessions(kind, users, turns, prefix)
    config = SchedulerConfig(max_model_len=4096, max_num_batched_tokens=8192)
    run = simulate(work, config, CacheConfig(num_gpu_blocks=1 + blocks, block_size=BLOCK_SIZE), _cost())
    later = [one.ttft for index, one in enumerate(run.requests) if index % turns or turns == 1]
    return _Run(
        tuple(one.num_cached_tokens for one in run.requests),
        tuple(one.prompt_tokens for one in work),
        statistics.median(later),
    )


@cache
def _cost() -> RooflineCost:
    return RooflineCost.of(known_model("Llama-3.1-8B"), get_hardware("H100"))


def _turn(run: _Run, could: list[int], turn: int, turns: int) -> Turn:
    found = sum(run.found[turn::turns])
    again = sum(could[turn::turns]) - found
    return Turn(found, again, sum(run.prompts[turn::turns]) - found - again)


WIDTH, MARGIN = 720, 20
PLOT = Box(MARGIN + 44, 62, WIDTH - 2 * MARGIN - 56, 150)
POOL_BAR = Box(MARGIN, 318, WIDTH - 2 * MARGIN, 26)
ROWS = Box(MARGIN + 62, 418, WIDTH - 2 * MARGIN - 62, 26 * max(TURNS))
HEIGHT = ROWS.bottom + 12
AGAIN, FIRST = VERMILLION, BLUE


def figure(state: State) -> str:
    """Hit rate against users; what must stay, against the pool; and what became of the prompts, turn by turn."""
    drawing = Drawing(WIDTH, HEIGHT, f"Prefix cache: {state.kind.title}", verdict(state).words)
    _draw_curve(drawing, state)
    _draw_pool(drawing, state)
    _draw_turns(drawing, state)
    return drawing.render()


def _draw_curve(drawing: Drawing, state: State) -> None:
    drawing.heading((MARGIN, 26), "Share of prompt tokens found in the cache", state.kind.title)
    users = [row[0] for row in state.curve]
    axes = Axes(drawing, PLOT, Scale(users[0], users[-1], log=True), Scale(0, 1))
    axes.frame(
        "users",
        "",
        x_format=lambda value: f"{value:.0f}",
        x_ticks=users,
        y_format=lambda value: f"{value:.0%}",
        y_ticks=(0, 0.25, 0.5, 0.75, 1),
    )
    axes.line(users, [row[2] for row in state.curve], GREY, dash="6 4", tip="an endless cache")
    axes.line(users, [row[1] for row in state.curve], GREEN, tip="this pool")
    axes.points(
        users,
        [row[1] for row in state.curve],
        GREEN,
        radius=3.5,
        tips=[f"{n} users: {rate:.1%} found, {could:.1%} with an endless cache" for n, rate, could in state.curve],
    )
    x, y = axes.at(state.users, state.hit_rate)
    drawing.circle((x, y), 6.5, GREEN)
    last = x > PLOT.right - 60
    above, below = (18, 26) if last else (8, 18)
    place = (x + 10 if last else x + 11, y - above if y > PLOT.y + 30 else y + below)
    drawing.text(place, f"{state.hit_rate:.1%}", colour=INK, bold=True, halo=True, anchor="end" if last else "start")
    keys = [Segment("this pool", 0, GREEN), Segment("a cache that never evicts (dashed)", 0, GREY)]
    legend(drawing, (PLOT.x, 52), keys, PLOT.width)


def _draw_pool(drawing: Drawing, state: State) -> None:
    """The pool as a frame; what must stay fills it, or sticks out of it."""
    y = POOL_BAR.y - 36
    note = f"{tokens(state.kept)} tokens; the pool holds {tokens(state.pool)}"
    note += "; agents do not pause, so most can leave early" if not state.kind.pause else ""
    drawing.heading((MARGIN, y), "What must stay for everyone's last turn", note)
    scale = POOL_BAR.width / (max(state.pool, state.kept) * 1.02)
    pool, kept = state.pool * scale, state.kept * scale
    fits = Box(POOL_BAR.x, POOL_BAR.y, min(kept, pool), POOL_BAR.height)
    beyond = Box(POOL_BAR.x + pool, POOL_BAR.y, kept - pool, POOL_BAR.height)
    drawing.rect(Box(POOL_BAR.x, POOL_BAR.y, pool, POOL_BAR.height), "#F4F4F4")
    drawing.rect(fits, SKY, tip=f"{state.kept:,} tokens are wanted again")
    if kept > pool:
        drawing.rect(beyond, "#FFFFFF", stroke=AGAIN, dash="4 3", tip=f"{state.kept - state.pool:,} tokens too many")
        drawing.hatch(beyond, "#F0C3A6")
    drawing.rect(Box(POOL_BAR.x, POOL_BAR.y, pool, POOL_BAR.height), "none", stroke=INK)
    edge = POOL_BAR.x + pool
    words = "the pool ends here"
    anchor = "end" if edge > POOL_BAR.x + 140 else "start"
    drawing.text((edge, POOL_BAR.y - 9), words, size=SMALL, colour=QUIET, anchor=anchor)


def _draw_turns(drawing: Drawing, state: State) -> None:
    """A bar for each turn: prompt tokens found, computed again, computed for the first time."""
    drawing.heading((MARGIN, ROWS.y - 42), "Prompt tokens, turn by turn", "of all users together")
    keys = [
        Segment("found: prefill skipped", 0, GREEN),
        Segment("evicted, computed again", 0, AGAIN),
        Segment("computed: new, or less than a block", 0, FIRST),
    ]
    legend(drawing, (MARGIN, ROWS.y - 18), keys, WIDTH - 2 * MARGIN)
    most = max(turn.total for turn in state.turns)
    for index, turn in enumerate(state.turns):
        bar = Box(ROWS.x, ROWS.y + index * 26, ROWS.width, 20)
        drawing.text((MARGIN, bar.y + 14), f"turn {index + 1}", size=SMALL, colour=QUIET)
        drawing.rect(bar, "none", stroke="#FFFFFF")
        parts = [
            Segment(_share(turn.found, turn), turn.found, GREEN, tip=f"{turn.found:,} tokens found"),
            Segment(_share(turn.again, turn), turn.again, AGAIN, tip=f"{turn.again:,} tokens computed again"),
            Segment(_share(turn.first, turn), turn.first, FIRST, tip=f"{turn.first:,} tokens computed first"),
        ]
        stacked_bar(drawing, bar, [part for part in parts if part.value], most)
    drawing.line((ROWS.x, ROWS.y - 4), (ROWS.x, ROWS.y + 26 * len(state.turns) - 2), colour=MID)


def _share(part: int, turn: Turn) -> str:
    return f"{part / turn.total:.0%}"


def verdict(state: State) -> Verdict:
    """What this configuration means, in one line."""
    found = f"{state.hit_rate:.1%} of the prompt tokens are found"
    if state.kind.prefix_of == "request":
        return Verdict(
            f"{found}: nothing is shared, so there is nothing to find. Looking cost next to nothing.", "fine"
        )
    lost = state.endless_hit_rate - state.hit_rate
    if lost > 0.5 * state.endless_hit_rate:
        slower = f", and half of the later turns wait more than {state.ttft * 1e3:.0f} ms instead of "
        slower += f"{state.endless_ttft * 1e3:.0f} for their first token (modelled)"
        return Verdict(
            f"The cache thrashes: {found}, {state.endless_hit_rate:.1%} would be if nothing were evicted{slower}. Each "
            "user's blocks leave just before that user comes back.",
            "broken",
        )
    if lost > 0.02:
        return Verdict(f"{found}; {lost:.1%} more would be if the pool had not evicted them.", "tight")
    return Verdict(f"{found}, as many as an endless cache would find. The rest is new.", "fine")


def _nearly_all_is_found(state: State) -> Progress:
    return Progress(state.hit_rate >= 0.95, f"{state.hit_rate:.1%} of the prompt tokens are found.")


CHALLENGE = Challenge(
    goal="Prefix caching is said to skip about 95% of the prefill. Find a load on which it does.",
    check=_nearly_all_is_found,
    hint="Every token must be new once. Whose beginning is computed once for all, how long is it beside the question, "
    "and how many must come until the first one no longer counts?",
    lesson="95% is a property of the load, not of the cache: a long beginning that everybody shares, and short "
    "questions. Change who shares what, and nothing else.",
)


def show() -> LessonWidget:
    """The widget: knobs for the sessions and the pool, the picture, and the challenge."""
    knobs = {
        "The sessions": {
            "kind": choice("They share", [(label, name) for name, label in LABELS.items()], START["kind"]),
            "users": steps("Users", USERS, START["users"], "sessions; users take turns"),
            "turns": steps("Turns", TURNS, START["turns"], "requests of each session"),
            "prefix": steps("Prefix", [(tokens(n), n) for n in PREFIXES], START["prefix"], "tokens of the beginning"),
        },
        "The pool": {
            "pool": steps("KV cache", [(tokens(n), n) for n in POOLS], START["pool"], "tokens, in blocks of 16"),
        },
    }
    return LessonWidget(
        title="What a prefix cache finds",
        lead="Full blocks of every prompt stay in the pool until somebody needs the room; the longest unused leave "
        "first. Add users, or shrink the pool, and watch for the cliff.",
        knobs=knobs,
        presets={"Start again": START, "Too many documents": THRASH},
        sweep=sweep,
        figure=figure,
        verdict=verdict,
        challenge=CHALLENGE,
    )


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(figure(sweep(**THRASH)))
