"""When drafting pays: a rule that compares steps with and without drafts, by what they have cost and brought so far.

Drafts are cheap while a step's time is that of reading the weights, and dear when it is that of computing. Where the
one turns into the other depends on the machine, the number of requests and how many drafts are accepted, and all of it
changes. So the rule measures: seconds for each token of a request, in either mode, for each range of batch sizes. It
takes the cheaper mode, and tries the other one from time to time.

Trying costs time, so it has a budget: `TRY_SHARE` of the time that has passed. What a trial loses against the cheaper
mode is taken from it, what one gains is put in, and while nothing is left nothing is tried. A mode that is far worse is
therefore tried rarely, and needs few trials to be seen through. One that is nearly as good is tried often, which costs
nearly nothing. So is one that gains much on a few requests and loses a little on the others: few trials tell nothing
of it.

Where answers are short, most steps of a full batch have a prompt in them, whose time is not that of drafting. A
straight line through the steps tells what a prompt's token costs, and that much is taken off.

Machines are not even: for a second, all takes half as long again. A mode is tried for a few steps and the other one
runs all the time, so what was measured of them is of different seconds. Each step therefore counts as a part of what
steps of its mode should take at the machine's present pace, which follows the last steps of either mode.

vLLM has no such rule: there a schedule says how many drafts to make for which batch size, as
`num_speculative_tokens_per_batch_size` does here (`vllm/v1/spec_decode/dynamic/utils.py`).
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

FIRST_STEPS = 8
"""Steps in one mode before the other is tried for the first time at this batch size."""
TRY_STEPS = 6
"""Steps of a trial. The first one is not counted: it drafts, but has no drafts to verify, or the other way round."""
TRY_EVERY = 16
"""The least number of steps between trials."""
TRY_SHARE = 0.01
"""The part of all time that trials may lose."""
MOST_SAVED = 32
"""How many average steps of time the budget can hold."""
MEMORY = 160
"""In how many steps what has been measured loses 63 % of its weight."""
PACE_STEPS = 12
"""In how many steps the pace follows a change of the machine's by 63 %."""
LONGEST = 2.0
"""A step counts for at most so many times what was expected of it: if interrupted, it tells nothing of its mode."""


def scheduled_drafts(schedule: Sequence[tuple[int, int, int]], num_requests: int, most: int) -> int:
    """Drafts for each of `num_requests`, by (first, last, drafts) for rising ranges from 1 on; `most` at most."""
    return min(most, [drafts for first, _, drafts in schedule if first <= num_requests][-1])


@dataclass(slots=True)
class Cost:
    """What steps in one mode have taken and brought: sums over them, in which later steps count for more.

    `tokens` are those of one request; `prompt` the prompt tokens of all, which cost time and bring nothing yet. The
    time of a step with long prompts varies by more than drafts cost, so it has less weight. Its tokens have not: where
    prompts are, fewer requests have drafts.
    """

    count: float = 0.0
    tokens: float = 0.0
    weight: float = 0.0
    seconds: float = 0.0
    prompt: float = 0.0
    prompt_squared: float = 0.0
    prompt_seconds: float = 0.0

    def add(self, seconds: float, tokens: float, prompt: float, weight: float = 1.0) -> None:
        """Takes in a step, and lets it count for more than those before."""
        kept = 1 - 1 / MEMORY
        self.count = kept * self.count + 1.0
        self.tokens = kept * self.tokens + tokens
        self.weight = kept * self.weight + weight
        self.seconds = kept * self.seconds + weight * seconds
        self.prompt = kept * self.prompt + weight * prompt
        self.prompt_squared = kept * self.prompt_squared + weight * prompt * prompt
        self.prompt_seconds = kept * self.prompt_seconds + weight * prompt * seconds

    def spread(self) -> tuple[float, float]:
        """How prompt tokens vary with the seconds, and by themselves: covariance and variance, times the weight."""
        if not self.weight:
            return 0.0, 0.0
        mean = self.prompt / self.weight
        return self.prompt_seconds - mean * self.seconds, self.prompt_squared - mean * self.prompt


@dataclass(slots=True)
class Sizes:
    """What is known of a range of batch sizes: costs without and with drafts, and steps since the last trial.

    Seconds are those of a machine at its usual pace. `per_prompt_token`: those that a prompt token adds to a step.
    """

    costs: tuple[Cost, Cost] = field(default_factory=lambda: (Cost(), Cost()))
    since_trial: int = 0
    per_prompt_token: float = 0.0

    def add(self, drafting: bool, seconds: float, tokens: float, prompt: float, weight: float = 1.0) -> None:
        """Takes in a step. What a prompt token adds is the slope of a straight line through the steps of both modes."""
        self.costs[drafting].add(seconds, tokens, prompt, weight)
        (together, alone), (more_together, more_alone) = self.costs[0].spread(), self.costs[1].spread()
        together, alone = together + more_together, alone + more_alone
        self.per_prompt_token = max(0.0, together / alone) if alone > 0.0 else 0.0

    def per_token(self, drafting: bool) -> float | None:
        """Seconds for each token of a request, those of prompts left out; None if nothing has been measured."""
        cost = self.costs[drafting]
        if not cost.tokens:
            return None
        of_a_step = max(0.0, cost.seconds - self.per_prompt_token * cost.prompt) / cost.weight
        return of_a_step * cost.count / cost.tokens

    def expected(self, drafting: bool, num_prompt_tokens: int) -> float | None:
        """Seconds of a step with so many tokens of prompts; None if too few have been measured."""
        cost = self.costs[drafting]
        if cost.count < FIRST_STEPS or not cost.seconds:
            return None
        mean, more = cost.seconds / cost.weight, num_prompt_tokens - cost.prompt / cost.weight
        return max(mean + self.per_prompt_token * more, mean / LONGEST)  # the line may lie

    def cheaper(self, now: bool) -> bool:
        """Whether drafting is the cheaper mode; `now`, the present one, if either is unknown."""
        without, with_drafts = self.per_token(False), self.per_token(True)
        return now if without is None or with_drafts is None else with_drafts < without


class DraftIfFaster:
    """The rule. `wants_drafts` is asked once for each step, in order; `observe` is told of each, in the same order.

    Several steps may be in flight between the two. Drafts that a step makes are verified by the next, so a step's time
    belongs to a mode only if the one before it was in that mode too.
    """

    def __init__(self) -> None:
        self.drafting = True
        self._by_size: defaultdict[int, Sizes] = defaultdict(Sizes)
        self._trial_left = 0
        self._budget = 0.0
        self._before: bool | None = None
        self._pace = 1.0  # what a step takes now, against the average

    def wants_drafts(self, num_requests: int) -> bool:
        """Whether the step about to be scheduled, of `num_requests` requests, shall end with drafting."""
        sizes = self._sizes(num_requests)
        if self._trial_left:
            self._trial_left -= 1
            return not self.drafting
        self.drafting = sizes.cheaper(self.drafting)
        if not self._is_time_to_try(sizes):
            return self.drafting
        sizes.since_trial = 0
        self._trial_left = TRY_STEPS - 1
        return not self.drafting

    def observe(
        self, num_requests: int, drafted: bool, seconds: float, tokens_per_request: float, num_prompt_tokens: int = 0
    ) -> None:
        """Takes in a finished step for which `wants_drafts` said `drafted`, with so many tokens of prompts in it."""
        before, self._before = self._before, drafted
        sizes = self._sizes(num_requests)
        best, usual = sizes.per_token(self.drafting), sizes.expected(drafted, num_prompt_tokens)
        if drafted == before:
            weight = num_requests / (num_requests + num_prompt_tokens)
            seconds = self._at_usual_pace(seconds, usual, weight)
            sizes.add(drafted, seconds, tokens_per_request, num_prompt_tokens, weight)
        else:
            seconds /= self._pace
        self._budget = min(self._budget + TRY_SHARE * seconds, MOST_SAVED * seconds)
        if best is not None and (drafted != self.drafting or drafted != before):
            # The first steps with drafts may compile, or ask for memory: nothing is known of them, and it comes once.
            most = LONGEST * (usual or sizes.expected(self.drafting, num_prompt_tokens) or seconds)
            prompts = sizes.per_prompt_token * num_prompt_tokens
            self._budget += best * tokens_per_request + prompts - min(seconds, most)
        else:
            sizes.since_trial += 1

    def _at_usual_pace(self, seconds: float, expected: float | None, weight: float) -> float:
        """What a step would have taken at the usual pace. The pace follows it."""
        steady = seconds / self._pace
        if expected is None:
            return steady
        steady = min(steady, LONGEST * expected)
        self._pace *= (steady / expected) ** (weight / PACE_STEPS)
        return steady

    def _is_time_to_try(self, sizes: Sizes) -> bool:
        if sizes.per_token(not self.drafting) is None:
            return sizes.since_trial >= FIRST_STEPS
        return sizes.since_trial >= TRY_EVERY and self._budget > 0.0

    def _sizes(self, num_requests: int) -> Sizes:
        return self._by_size[num_requests.bit_length()]
