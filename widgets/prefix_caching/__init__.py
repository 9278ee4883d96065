"""Lesson 05: what a prefix cache finds, over users and pool; the cliff, and why it is one.

The picture in the lesson's text: `uv run python -P -m widgets prefix_caching lessons/figures/05_prefix_cache.svg`
"""

from __future__ import annotations

from typing import Any

from minivllm_lab.optimization_catalog.prefix_reuse import BLOCK_SIZE, CONFIG
from widgets.prefix_caching.figure import figure
from widgets.prefix_caching.state import (
    MODEL,
    ORDERS,
    POOLS,
    PREFIXES,
    TARGETS,
    TURNS,
    USERS,
    State,
    milliseconds,
    sweep,
    told,
)
from widgets.shell.knobs import choice, steps
from widgets.shell.lesson_widget import LessonWidget
from widgets.shell.plot import tokens
from widgets.shell.spec import Challenge, Guess, Progress, Spec, Verdict

LABELS = {
    "system": "one system prompt",
    "documents": "a document each",
    "chat": "conversations",
    "agent": "agents",
    "none": "nothing",
}
START: dict[str, Any] = {
    "kind": "documents",
    "users": 8,
    "turns": 3,
    "prefix": 1024,
    "order": "in turn",
    "pool": 6144,
    "target": 15,
}
SESSIONS = ("kind", "users", "turns", "prefix", "order", "target")


def verdict(state: State) -> Verdict:
    """What this configuration means, in one line."""
    found = f"{state.hit_rate:.1%} of the prompt is found"
    if state.wrong_rate:
        return Verdict(
            f"Your names lead to the wrong blocks: {state.wrong_rate:.1%} of the prompt is taken from another text's "
            "keys. What the model writes then is wrong, and there is no error.",
            "broken",
        )
    slow = f"p95 TTFT {milliseconds(state.ttft(state.here), state.target)} (modelled)"
    asked = f"{state.target * 1e3:g} ms are asked for"
    if state.missed(state.here):
        return Verdict(f"{_why_missed(state, found)} {slow}; {asked}.", "broken")
    if state.findable == 0:
        return Verdict(f"{found}: nobody comes back to anything, so there is nothing to find. {slow}; {asked}.", "fine")
    if state.lost:
        could = told(state.endless_rate, state.hit_rate, 100, "%")
        return Verdict(f"{found}; a cache that never evicts finds {could}. {slow}; {asked}.", "tight")
    spare = f" {state.here.evicted:,} blocks were evicted, none of them wanted again." if state.here.evicted else ""
    return Verdict(f"{found}, all that an endless cache would find.{spare} {slow}; {asked}.", "fine")


def _why_missed(state: State, found: str) -> str:
    if state.findable == 0:
        return f"{found}: nobody comes back to anything, so there is nothing to find, and no pool helps."
    if state.endless is not None and state.missed(state.endless):
        return f"{found}, where {state.endless_rate:.1%} could be: even a cache that never evicts is too slow."
    lost = f"{found}, where a cache that never evicts finds {state.endless_rate:.1%}"
    if state.kind.pause == 0:
        return f"{lost}. The pool holds too few users at once; the others wait for room."
    if state.lost > state.findable / 2:
        return f"The cache thrashes: {lost}. Blocks leave before their user returns."
    return f"{lost}. Some blocks leave before their user returns."


def command(state: State) -> str:
    """The engine's settings; block 0, which no request gets, counts."""
    line = (
        f"vllm serve meta-llama/{MODEL} --enable-prefix-caching --block-size {BLOCK_SIZE} "
        f"--num-gpu-blocks-override {state.pool // BLOCK_SIZE + 1} --max-model-len {CONFIG.max_model_len} "
        f"--max-num-batched-tokens {CONFIG.max_num_batched_tokens}"
    )
    own = "\n# no flag takes a hash of your own; --prefix-caching-hash-algo picks one of vLLM's"
    return line + own * (state.load.hash_block_tokens is not None)


# ---- challenges


def _like_start(state: State) -> list[str]:
    """Knobs of the sessions that do not stand as at the start."""
    load = state.load
    now = (load.kind.name, load.users, load.turns, load.prefix, ORDERS[load.at_random], round(state.target * 1e3, 9))
    return [name for name, value in zip(SESSIONS, now, strict=True) if value != START[name]]


def _smallest_pool(state: State) -> Progress:
    words = f"p95 time to first token {milliseconds(state.ttft(state.here), state.target)} with {tokens(state.pool)}"
    words += f" tokens; {state.target * 1e3:g} ms are asked for."
    moved = _like_start(state)
    if moved:
        return Progress(False, words, f"Only the pool is to change; put {', '.join(moved)} back, or start again.")
    if state.missed(state.here):
        advice = f"The pool is too small: {state.users} documents are {tokens(state.kept)} tokens, and whoever runs "
        return Progress(False, words, advice + f"needs room too. It holds {tokens(state.pool)}.")
    smaller = POOLS[max(0, POOLS.index(state.pool) - 1)]
    cell = state.cells.get((state.users, smaller))
    if cell is None:
        return Progress(False, words, "The map is not finished.")
    met = state.missed(cell) or state.pool == POOLS[0]
    return Progress(met, words, f"The target is met, and {tokens(smaller)} tokens meet it as well. Go down.")


def _nearly_all_is_found(state: State) -> Progress:
    right = state.hit_rate - state.wrong_rate
    words = f"{told(right, 0.95, 100, '%')} of the prompt tokens are found; 95 % are asked for."
    load, requests = state.load, state.users * state.load.turns
    if load.kind.prefix_of != "all":
        advice = "Each user's beginning is computed at least once, and that is too much. Change who shares it."
    elif load.kind.grows:
        advice = "Here every turn adds new tokens, and a turn's tokens are new once. Which sessions add the least?"
    elif load.prefix < max(PREFIXES):
        question = load.kind.question
        advice = f"A question of {question} tokens is always new: beside {load.prefix} shared ones that is too much."
    else:
        advice = f"The beginning is computed once for all, and {requests} requests are too few to make that little."
    return Progress(right >= 0.95, words, advice)


def _documents_that_stay(state: State) -> Progress:
    load, right = state.load, state.hit_rate - state.wrong_rate
    words = f"{told(right, 0.7, 100, '%')} found of a document each, {state.users} users, {tokens(state.pool)} tokens; "
    words += "70 %, 16 users and at most 12K are asked for."
    met = load.kind.name == "documents" and state.users == 16 and state.pool <= 12288 and right >= 0.7
    return Progress(met, words, _what_documents_need(state))


def _what_documents_need(state: State) -> str:
    load = state.load
    if load.kind.name != "documents":
        return "Each user has a document of their own here: set back who shares what."
    if state.users != 16:
        return f"{state.users} users are not 16."
    if state.pool > 12288:
        return f"The pool may hold at most 12K tokens, not {tokens(state.pool)}."
    share = (load.turns - 1) / load.turns * load.prefix / (load.prefix + load.kind.question)
    if state.kept >= state.pool:
        return (
            f"16 documents of {load.prefix:,} are {tokens(state.kept)} tokens, and whoever runs needs room too: the "
            f"pool of {tokens(state.pool)} is too small, or the prefix too long."
        )
    if share < 0.7:
        return (
            f"All fit, and yet: the first of {load.turns} turns finds nothing, the others {load.prefix} of "
            f"{load.prefix + load.kind.question} tokens each. More turns, or a longer prefix."
        )
    return "The documents fit, and yet some leave too early: whoever comes back at random may come back late."


CHALLENGES = (
    Challenge(
        "The target is missed. Meet it again with the smallest pool that does, and touch nothing else.",
        _smallest_pool,
        "At 8K the heads of the documents stay, since a request's last blocks leave first; at 6K nothing does. A cliff "
        "is crossed in one step, in both directions.",
    ),
    Challenge(
        "Prefix caching is said to skip 95 % of the prefill. Find sessions where it does.",
        _nearly_all_is_found,
        "95 % is a property of the load, not of the cache: a long beginning that all share, short questions, and many "
        "of them. With prefix p, question q and n requests, (n − 1) p of n (p + q) tokens are found.",
    ),
    Challenge(
        "16 users with a document each, in a pool of at most 12K tokens: find at least 70 %.",
        _documents_that_stay,
        "With t turns, (t − 1) / t · p / (p + q) is found, as long as users × p and whoever runs fit in the pool: one "
        "condition pulls the prefix up, the other down.",
    ),
)

GUESS = Guess(
    "The pool holds six of the eight documents, whose users come in turn. How much is found?",
    ("65 %, as if endless", "48 %: six of eight", "16 %", "nothing"),
    3,
    "What was used longest ago is evicted first, and that is always the document whose user comes next.",
)

SPEC = Spec(
    name="prefix_caching",
    title="What a prefix cache finds",
    lead="Full blocks stay in the pool until somebody needs the room; those unused for longest leave first. Drag the "
    "pool, and play what happens below.",
    knobs={
        "The sessions": {
            "kind": choice("They share", [(label, name) for name, label in LABELS.items()], START["kind"]),
            "users": steps("Users", USERS, START["users"], "sessions at the same time"),
            "turns": steps("Turns", TURNS, START["turns"], "requests of each session"),
            "prefix": steps("Prefix", [(tokens(n), n) for n in PREFIXES], START["prefix"], "tokens of the beginning"),
            "order": choice("They return", ORDERS, START["order"], "agents do not pause: they return at once"),
        },
        "The pool": {
            "pool": steps("KV cache", [(tokens(n), n) for n in POOLS], START["pool"], "tokens, in blocks of 16"),
        },
        "The service level": {
            "target": steps(
                "p95 TTFT",
                [(f"{n} ms", n) for n in TARGETS],
                START["target"],
                "time to first token of a user's later turns, Llama-3.1-8B on an H100, modelled",
            ),
        },
    },
    presets={
        "In any order": {"order": "at random", "target": 20},
        "One prompt for all": {"kind": "system", "users": 16, "pool": 2048},
        "Agents in a small pool": {"kind": "agent", "users": 16, "turns": 4, "pool": 2048},
    },
    sweep=sweep,
    figure=figure,
    verdict=verdict,
    command=command,
    challenges=CHALLENGES,
    guess=GUESS,
    own={"hash_block_tokens": "names a full block: (parent, token_ids, extra_keys) -> bytes"},
)


def show(**knobs: Any) -> LessonWidget:
    """The widget: `show(kind="chat")` sets a knob, `show(hash_block_tokens=mine.hash_block_tokens)` runs your names.

    Raises:
        MinivllmError: there is no such knob, or it takes no such value.
    """
    return LessonWidget(SPEC, **knobs)
