"""A learner who works a round out by hand, from what it shows alone, and may have one habit that is
wrong and that is none of the game's own mistakes. Nothing here comes from the scheduler, so it says
whether a round can be solved, and whether the game recognizes a mistake that it did not make itself.
"""

from dataclasses import dataclass, field
from math import ceil, inf

from minivllm_lab.predict.rounds import Decision, Round, Row

HABITS = {
    "counts no tokens while walking": {"budget"},
    "rounds blocks down": {"blocks", "admission", "preemption"},
    "subtracts no blocks": {"blocks", "admission", "preemption"},
    "hits save no blocks": {"hits"},
}
"""A wrong habit -> the rules of which at least one should be told."""

STEP = Round(
    source="by hand",
    policy="fcfs",
    budget=12,
    threshold=8,
    seats=3,
    chunked=True,
    block_size=4,
    free=9,
    running=(
        Row("A", known=20, computed=10, blocks=3, priority=0),
        Row("B", known=5, computed=4, blocks=2, priority=0),
    ),
    waiting=(Row("C", known=9, computed=0, blocks=0, priority=0),),
    decision=Decision({"A": 8, "B": 1, "C": 3}),
    mistakes={"decodes first": Decision({"B": 1, "A": 8, "C": 2})},
)
"""A step with all kinds of mistakes."""


@dataclass
class Learner:
    """A pencil and paper: what is left, who has what, who is preempted."""

    puzzle: Round
    habit: str = ""
    tokens: dict[str, int] = field(default_factory=dict)
    preempted: list[Row] = field(default_factory=list)

    def decide(self) -> Decision:
        self.left, self.free = self.puzzle.budget, self.puzzle.free
        self.run()
        if not self.preempted:
            self.admit()
        return Decision(self.tokens, frozenset(row.name for row in self.preempted))

    def count(self, row: Row, waits: bool) -> int:
        limit = self.puzzle.limit if self.puzzle.limit < self.puzzle.budget else inf
        chunk = int(min(row.lacks, limit))
        return 0 if chunk > self.left and waits and not self.puzzle.chunked else min(chunk, self.left)

    def blocks(self, tokens: int) -> int:
        size = self.puzzle.block_size
        return tokens // size if self.habit == "rounds blocks down" else ceil(tokens / size)

    def spend(self, row: Row, count: int, blocks: int) -> None:
        self.tokens[row.name] = count
        if self.habit != "counts no tokens while walking":
            self.left -= count
        if self.habit != "subtracts no blocks":
            self.free -= blocks

    def run(self) -> None:
        self.alive, self.taken = list(self.puzzle.running), dict.fromkeys(self.puzzle.requests, 0)
        for row in self.puzzle.running:
            count = self.count(row, waits=False) if row in self.alive else 0
            if count <= 0:
                continue
            needed = max(0, self.blocks(row.computed + count) - row.blocks)
            while needed > self.free and row in self.alive:
                self.preempt(self.victim())
            if row in self.alive:
                self.taken[row.name] = needed
                self.spend(row, count, needed)

    def preempt(self, victim: Row) -> None:
        self.alive.remove(victim)
        self.preempted.append(victim)
        self.free += victim.blocks + self.taken[victim.name]
        self.left += self.tokens.pop(victim.name, 0)

    def victim(self) -> Row:
        if self.puzzle.policy == "priority":
            return max(self.alive, key=lambda row: (row.priority, row.name))
        return self.alive[-1]

    def admit(self) -> None:
        runs = len(self.puzzle.running)
        for row in self.puzzle.waiting:
            count = self.count(row, waits=True) if self.left > 0 and runs < self.puzzle.seats else 0
            hit = 0 if self.habit == "hits save no blocks" else row.hit
            new = self.blocks(hit + count) - hit // self.puzzle.block_size
            whole = self.blocks(row.known) - hit // self.puzzle.block_size
            revived = row.hit_free if hit else 0
            if not count or max(new, whole) + revived > self.free:
                return
            runs += 1
            self.spend(row, count, new + revived)
