"""A learner who works a round out by hand, from what it shows alone, and may have one habit that is
wrong. Nothing here comes from the scheduler, so it says whether a round can be solved, and whether
the game recognizes a mistake that it did not make itself.
"""

from dataclasses import dataclass, field
from math import ceil, inf

from minivllm_lab.predict.rounds import Decision, Round, Row

HABITS = {
    "forgets the budget": {"budget"},
    "gives the last prompt whole": {"budget"},
    "does not count decodes": {"budget"},
    "counts no tokens while walking": {"budget"},
    "forgets the threshold": {"chunk limit"},
    "limits only those that run": {"chunk limit"},
    "limits only those that wait": {"chunk limit"},
    "limits one that is alone": {"alone"},
    "never cuts a prompt": {"all it lacks", "budget"},
    "one token for all that run": {"all it lacks", "drafts"},
    "decodes first": {"order"},
    "waiting first": {"running first"},
    "admits nobody while others run": {"running first"},
    "admits one": {"queue"},
    "forgets the seats": {"seats"},
    "overtakes": {"queue"},
    "forgets memory": {"blocks", "admission", "preemption"},
    "rounds blocks down": {"blocks", "admission", "preemption"},
    "subtracts no blocks": {"blocks", "admission", "preemption"},
    "only the chunk must fit": {"admission"},
    "waits for a block": {"preemption"},
    "preempts the one that lacks a block": {"preemption"},
    "stops after one victim": {"preemption"},
    "preempts the first": {"victim"},
    "preempts the largest": {"victim"},
    "preempts the latest": {"victim"},
    "ignores priority": {"victim"},
    "larger is more urgent": {"victim"},
    "admits after a preemption": {"no admission"},
    "computes hits": {"hits", "all it lacks"},
    "hits save no blocks": {"hits"},
    "hits to the last token": {"last token"},
    "hits take no free block": {"hits in the free queue"},
    "ignores drafts": {"drafts"},
    "counts drafts alone": {"drafts"},
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
        puzzle = self.puzzle
        self.left = inf if self.habit == "forgets the budget" else puzzle.budget
        self.free = inf if self.habit == "forgets memory" else puzzle.free
        if self.habit == "waiting first":
            self.admit()
            self.run()
        else:
            self.run()
            if not self.preempted or self.habit == "admits after a preemption":
                self.admit()
        return Decision(self.tokens, frozenset(row.name for row in self.preempted))

    def lacks(self, row: Row) -> int:
        if self.habit == "computes hits" and row.hit:
            return row.known
        aligned = row.known % self.puzzle.block_size == 0 and row.known - row.hit == self.puzzle.block_size
        if self.habit == "hits to the last token" and row.hit and aligned:
            return 1
        if self.habit == "ignores drafts":
            return row.lacks - row.drafts
        return row.lacks - (self.habit == "counts drafts alone" and row.drafts > 0)

    def count(self, row: Row, waits: bool) -> int:
        puzzle, habit, lacks = self.puzzle, self.habit, self.lacks(row)
        limited = habit not in ("forgets the threshold", f"limits only those that {'run' if waits else 'wait'}")
        limit = puzzle.limit if limited and puzzle.limit < puzzle.budget else inf
        if habit == "limits one that is alone":
            limit = puzzle.threshold or inf
        if habit == "one token for all that run" and not waits:
            lacks = 1
        chunk = min(lacks, limit)
        whole = (waits and not puzzle.chunked) or habit == "never cuts a prompt"
        if chunk > self.left and whole:
            return 0
        return int(chunk if habit == "gives the last prompt whole" and self.left > 0 else min(chunk, self.left))

    def blocks(self, tokens: int) -> int:
        size = self.puzzle.block_size
        return tokens // size if self.habit == "rounds blocks down" else ceil(tokens / size)

    def spend(self, row: Row, count: int, blocks: int) -> None:
        self.tokens[row.name] = count
        if self.habit != "counts no tokens while walking" and not (
            self.habit == "does not count decodes" and count == 1
        ):
            self.left -= count
        if self.habit != "subtracts no blocks":
            self.free -= blocks

    def run(self) -> None:
        order = list(self.puzzle.running)
        if self.habit == "decodes first":
            order.sort(key=lambda row: row.lacks - row.drafts > 1)
        self.alive, self.taken = list(order), dict.fromkeys(self.puzzle.requests, 0)
        for row in order:
            count = self.count(row, waits=False) if row in self.alive else 0
            if count <= 0:
                continue
            needed = max(0, self.blocks(row.computed + count) - row.blocks)
            while needed > self.free and row in self.alive:
                if self.habit == "waits for a block":
                    break
                self.preempt(row if self.habit == "preempts the one that lacks a block" else self.victim())
                if self.habit == "stops after one victim":
                    needed = 0
            if row in self.alive and needed <= self.free:
                self.taken[row.name] = needed
                self.spend(row, count, needed)

    def preempt(self, victim: Row) -> None:
        self.alive.remove(victim)
        self.preempted.append(victim)
        self.free += victim.blocks + self.taken[victim.name]
        self.left += self.tokens.pop(victim.name, 0)

    def victim(self) -> Row:
        by_priority = self.puzzle.policy == "priority"
        match self.habit:
            case "preempts the first":
                return self.alive[0]
            case "preempts the largest":
                return max(self.alive, key=lambda row: row.blocks)
            case "preempts the latest":
                return max(self.alive, key=lambda row: row.name)
            case "larger is more urgent" if by_priority:
                return min(self.alive, key=lambda row: (row.priority, -ord(row.name)))
        if by_priority and self.habit != "ignores priority":
            return max(self.alive, key=lambda row: (row.priority, row.name))
        return self.alive[-1]

    def admit(self) -> None:
        puzzle, habit = self.puzzle, self.habit
        seats = inf if habit == "forgets the seats" else puzzle.seats
        runs = len(puzzle.running) - len(self.preempted)
        if habit == "admits nobody while others run" and runs:
            return
        for row in puzzle.waiting:
            count = self.count(row, waits=True) if self.left > 0 and runs < seats else 0
            hit = 0 if habit in ("computes hits", "hits save no blocks") else row.hit
            new = self.blocks(hit + count) - hit // puzzle.block_size
            whole = self.blocks(row.known) - hit // puzzle.block_size
            revived = row.hit_free if hit and habit != "hits take no free block" else 0
            needed = new if habit == "only the chunk must fit" else max(new, whole)
            if not count or needed + revived > self.free:
                if habit == "overtakes":
                    continue
                return
            runs += 1
            self.spend(row, count, new + revived)
            if habit == "admits one":
                return
