"""Workloads whose prompts share prefixes; prefix-cache hits depend on who shares what with whom,
and when.

A session is one user's turns, each sent some time after the previous answer. Token ids are made up:
prompts that share a prefix begin with the same ids. Everything else begins with a unique id and
continues with the same ids in every prompt. That is enough, since block hashes are chained; hashes
that are not chained find the wrong blocks.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from minivllm.errors import MinivllmError
from minivllm_simulate.simulated_engine import GENERATED
from minivllm_simulate.virtual_clock import SimulatedRequest

FILLER = 1
"""Filler tokens, the same in every prompt, have ids from here on, by position."""


class Sharing(NamedTuple):
    """A kind of prefix sharing, with lengths in tokens and times in seconds."""

    name: str
    title: str
    prefix_of: str
    """The scope of the shared prefix: "all" users, each "user", or each "request" alone."""
    grows: bool
    """Whether a turn repeats all earlier turns and answers."""
    question: int
    """New tokens of each turn."""
    answer: int = 8
    pause: float = 0.1
    """Seconds per user between an answer and the next turn, in which the other users take their
    turns.
    """

    def kept(self, users: int, turns: int, prefix: int) -> int:
        """Return the tokens that must stay cached so that every user's last turn finds all that it
        can.
        """
        if self.prefix_of == "request":
            return 0
        beginnings = prefix if self.prefix_of == "all" else users * prefix
        return beginnings + self.grows * users * (turns - 1) * (self.question + self.answer)

    def prompt_tokens(self, turn: int, prefix: int) -> int:
        """Return the length of a turn's prompt."""
        return prefix + self.question + self.grows * turn * (self.question + self.answer)

    def findable(self, users: int, turns: int, prefix: int, block_size: int = 16) -> list[int]:
        """Return, for each request in the order of `sessions`, the prompt tokens that an unlimited
        cache would hold.
        """
        tokens = []
        for user in range(users):
            for turn in range(turns):
                is_first = turn == 0 and (self.prefix_of != "all" or user == 0)
                # The last token of an answer is never computed.
                history = prefix + turn * (self.question + self.answer) - 1
                repeated = history if self.grows and turn else prefix
                none = is_first or self.prefix_of == "request"
                tokens.append(0 if none else repeated // block_size * block_size)
        return tokens


SHARING = {
    kind.name: kind
    for kind in (
        Sharing("system", "one system prompt for all, one question per visit", "all", False, 32),
        Sharing("documents", "a document for each user, one question per visit", "user", False, 32),
        Sharing("chat", "conversations with one system prompt", "all", True, 64),
        Sharing("agent", "agents: tool results appended at once", "all", True, 160, pause=0.0),
        Sharing("none", "nothing shared", "request", False, 32),
    )
}


def sharing(name: str) -> Sharing:
    """Return the kind with this name.

    Raises:
        MinivllmError: unknown name; the message lists the known ones.
    """
    if name not in SHARING:
        raise MinivllmError(f"unknown kind of sharing {name!r}: use one of {', '.join(SHARING)}")
    return SHARING[name]


def sessions(kind: Sharing, users: int, turns: int, prefix: int, *, at_random: bool = False) -> list[SimulatedRequest]:
    """Make the requests of all users; user `user`'s turn `turn` is request `user * turns + turn`.
    Users arrive a tenth of a second apart.

    Args:
        kind: who shares what.
        users: sessions.
        turns: requests of each session.
        prefix: tokens of the shared beginning.
        at_random: draw pauses from an exponential distribution (reproducible) of the same mean, so
            that users return in any order. Otherwise all pauses are equal, and users take turns.

    Raises:
        MinivllmError: fewer than one user, turn or token.
    """
    if min(users, turns, prefix) < 1:
        raise MinivllmError(f"users ({users}), turns ({turns}) and the prefix ({prefix}) must be at least 1")
    draw = random.Random("pauses").expovariate
    pauses = [draw(1.0) if at_random else 1.0 for _ in range(users * turns)]
    return [request for user in range(users) for request in _session(kind, user, users, prefix, pauses[user::users])]


def _session(kind: Sharing, user: int, users: int, prefix: int, pauses: list[float]) -> list[SimulatedRequest]:
    turns = len(pauses)
    history, requests = list(_beginning(kind, user, user * turns, prefix)), []
    for turn, pause in enumerate(pauses):
        index = user * turns + turn
        beginning = history if kind.grows else _beginning(kind, user, index, prefix)
        prompt = (*beginning, -1 - index, *range(FILLER, kind.question))
        arrival = kind.pause * users * pause if turn else 0.1 * user
        after = index - 1 if turn else None
        requests.append(SimulatedRequest(len(prompt), kind.answer, arrival, prompt_token_ids=prompt, after=after))
        history = [*prompt, *[GENERATED] * kind.answer]
    return requests


def _beginning(kind: Sharing, user: int, index: int, prefix: int) -> tuple[int, ...]:
    first_id = {"all": 2, "user": 3 + 2 * user, "request": 4 + 2 * index}[kind.prefix_of]
    return (first_id, *range(FILLER, prefix))
