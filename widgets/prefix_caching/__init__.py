"""Show a prefix cache's hit rate by users and pool size, with its cliff and the reason for it.

Draw the lesson's figure with `uv run python -P -m widgets prefix_caching
lessons/figures/05_prefix_cache.svg`.
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
from widgets.shell.advice import at_least, at_most, choose, progress
from widgets.shell.knobs import choice, steps
from widgets.shell.live import Live
from widgets.shell.notebook import notebook_widget
from widgets.shell.plot import percent, tokens
from widgets.shell.spec import Challenge, Guess, Progress, Spec, Verdict

LABELS = {
    "system": "one system prompt",
    "documents": "a document each",
    "chat": "conversations",
    "agent": "agents",
    "none": "nothing",
}
START: dict[str, Any] = {
    "kind": "documents", "users": 8, "turns": 3, "prefix": 1024, "order": "in turn", "pool": 6144, "target": 15,
}  # fmt: skip
SESSIONS = ("kind", "users", "turns", "prefix", "order", "target")


def verdict(state: State) -> Verdict:
    """Say in one or two sentences what share of the prompt tokens hits the cache, and whether that
    is fast enough.
    """
    hits = f"{percent(state.hit_rate, 1)} of the prompt tokens hit the cache"
    if state.wrong_rate:
        return Verdict(
            f"Your hashes lead to wrong blocks: {percent(state.wrong_rate, 1)} of the prompt tokens use another text's "
            "keys. So the output is wrong, without any error.",
            "broken",
        )
    ttft = f"p95 TTFT is {milliseconds(state.ttft(state.here), state.target)} (modelled)"
    times = f"{ttft}; the limit is {state.target * 1e3:g} ms."
    if state.missed(state.here):
        return Verdict(f"{_why_missed(state, hits)} {times}", "broken")
    if state.findable == 0:
        return Verdict(f"{hits}: no prompt shares anything, so there is nothing to hit. {times}", "fine")
    if state.lost:
        could = told(state.endless_rate, state.hit_rate, 100, "%")
        return Verdict(f"{hits}; a cache that never evicts would reach {could}. {times}", "tight")
    return Verdict(f"{hits}, all that a cache that never evicts would hit. {times}", "fine")


def _why_missed(state: State, hits: str) -> str:
    if state.findable == 0:
        return f"{hits}: no prompt shares anything, so no pool helps."
    if state.endless is not None and state.missed(state.endless):
        return f"{hits}, but even a cache that never evicts ({percent(state.endless_rate, 1)}) is too slow."
    lost = f"{hits}, but a cache that never evicts would reach {percent(state.endless_rate, 1)}"
    if state.kind.pause == 0:
        return f"{lost}. The pool holds too few users at once, so the others wait for room."
    return f"{'The cache thrashes: ' * (state.lost > state.findable / 2)}{lost}."


def command(state: State) -> str:
    """Write the server's command; its number of blocks includes the null block, which no request
    gets.
    """
    line = (
        f"vllm serve meta-llama/{MODEL} --enable-prefix-caching --block-size {BLOCK_SIZE} "
        f"--num-gpu-blocks-override {state.pool // BLOCK_SIZE + 1} --max-model-len {CONFIG.max_model_len} "
        f"--max-num-batched-tokens {CONFIG.max_num_batched_tokens}"
    )
    own = "\n# no flag takes your own hash function; --prefix-caching-hash-algo picks one of vLLM's"
    return line + own * (state.load.hash_block_tokens is not None)


# ---- challenges


def _moved_knobs(state: State) -> list[str]:
    """List the labels of session knobs that differ from their starting values."""
    load = state.load
    now = (load.kind.name, load.users, load.turns, load.prefix, ORDERS[load.at_random], round(state.target * 1e3, 9))
    return [f'"{SPEC.flat()[name].label}"' for name, value in zip(SESSIONS, now, strict=True) if value != START[name]]


def _room(state: State) -> str:
    documents = f"{state.users} documents are {tokens(state.kept)} tokens"
    return f"(now {tokens(state.pool)}): {documents}, and running requests need room too."


def _smallest_pool(state: State) -> Progress:
    words = f"p95 time to first token is {milliseconds(state.ttft(state.here), state.target)} with {tokens(state.pool)}"
    words += f" tokens; the limit is {state.target * 1e3:g} ms."
    moved = ", ".join(_moved_knobs(state))
    missed = state.missed(state.here)
    smaller = POOLS[max(0, POOLS.index(state.pool) - 1)]
    cell = state.cells.get((state.users, smaller))
    meets_too = state.pool != POOLS[0] and (cell is None or not state.missed(cell))
    return progress(
        words,
        (bool(moved), f"Change only the pool: put {moved} back, or start again."),
        (missed, f"Raise the pool {_room(state)}"),
        (cell is None, "Wait until the map is complete."),
        (meets_too, f"Lower the pool to {tokens(smaller)}: it meets the limit too."),
    )


def _nearly_all_hits(state: State) -> Progress:
    right = state.hit_rate - state.wrong_rate
    words = f"{told(right, 0.95, 100, '%')} of the prompt tokens hit the cache; the goal is 95 %."
    load = state.load
    requests = state.users * load.turns
    if load.kind.prefix_of != "all":
        advice = "Change who shares the prefix: each user's own is computed at least once, which is too much."
    elif load.kind.grows:
        advice = "Choose sessions that add fewer new tokens: here every turn's tokens are new once."
    elif load.prefix < max(PREFIXES):
        new = f"a question's {load.kind.question} new tokens"
        advice = f"Raise the prefix: {new} are too many for {load.prefix} shared ones."
    else:
        advice = f"Raise the users or the turns: the prefix is computed once, too much for {requests} requests."
    return Progress(right >= 0.95, words, advice)


def _documents_that_stay(state: State) -> Progress:
    load = state.load
    right = state.hit_rate - state.wrong_rate
    question = load.kind.question
    share = (load.turns - 1) / load.turns * load.prefix / (load.prefix + question)
    return progress(
        f"{told(right, 0.7, 100, '%')} hits with {state.users} users in {tokens(state.pool)} tokens; the goal is 70 %.",
        choose(LABELS["documents"], "They share", load.kind.name == "documents"),
        at_least("the users", state.users, 16),
        at_most("the pool", state.pool, 12288, tokens),
        (right < 0.7 and state.kept >= state.pool, f"Shorten the prefix or raise the pool {_room(state)}"),
        (
            right < 0.7 and share < 0.7,
            f"Raise the turns or the prefix: all documents fit, but the first of {load.turns} turns hits nothing, and "
            f"the others hit only {load.prefix} of {load.prefix + question} tokens.",
        ),
        (right < 0.7, "Let the users return in turn: the documents fit, but users at random may return too late."),
    )


CHALLENGES = (
    Challenge(
        "The TTFT limit is missed. Meet it with the smallest pool that does, and change nothing else.",
        _smallest_pool,
        "At 8K the heads of the documents stay, because a request's last blocks are evicted first; at 6K nothing does. "
        "A cliff is crossed in one step, in both directions.",
    ),
    Challenge(
        "Prefix caching is often said to skip 95 % of the prefill. Find sessions where it does.",
        _nearly_all_hits,
        "95 % is a property of the load, not of the cache: it takes a long shared prefix, short questions and many "
        "requests. With prefix p, question q and n requests, (n − 1) p of n (p + q) tokens hit the cache.",
    ),
    Challenge(
        "16 users with a document each, in a pool of at most 12K tokens: reach at least 70 % hits.",
        _documents_that_stay,
        "With t turns, (t − 1) / t · p / (p + q) of the tokens hit, as long as users × p and the running requests fit "
        "into the pool. One condition pulls the prefix up, the other pulls it down.",
    ),
)

GUESS = Guess(
    "The pool holds almost six of the eight documents, whose users come in turn. What share of the prompt tokens hits?",
    ("65 %, as if endless", "48 %: six of eight", "16 %", "nothing"),
    3,
    "LRU evicts the least recently used document, and that is always the one whose user comes next.",
)

SPEC = Spec(
    name="prefix_caching",
    title="What a prefix cache saves",
    lead="Full blocks stay in the pool until a request needs the room; the least recently used are evicted first. Drag "
    "the pool, and play what happens below.",
    knobs={
        "The sessions": {
            "kind": choice("They share", [(label, name) for name, label in LABELS.items()], START["kind"]),
            "users": steps("Users", USERS, START["users"], "sessions at the same time"),
            "turns": steps("Turns", TURNS, START["turns"], "requests of each session"),
            "prefix": steps(
                "Prefix", [(tokens(n), n) for n in PREFIXES], START["prefix"], "tokens in the shared prefix"
            ),
            "order": choice("They return", ORDERS, START["order"], "agents do not pause: they return at once"),
        },
        "The pool": {
            "pool": steps("KV cache", [(tokens(n), n) for n in POOLS], START["pool"], "tokens, in blocks of 16")
        },
        "The service level": {
            "target": steps(
                "TTFT limit",
                [(f"{n} ms", n) for n in TARGETS],
                START["target"],
                "p95 time to first token of a user's later turns, Llama-3.1-8B on an H100, modelled",
            )
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
    own={"hash_block_tokens": "hashes a full block: (parent, token_ids, extra_keys) -> bytes"},
)


def show(**knobs: Any) -> Live:
    """Show the widget: `show(kind="chat")` sets a knob, `show(hash_block_tokens=...)` runs your
    function.

    Raises:
        MinivllmError: No knob has this name, or it does not take this value.
    """
    return notebook_widget(SPEC, **knobs)
