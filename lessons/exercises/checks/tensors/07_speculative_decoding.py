"""Check exercise 07 and the script that solves it, and run the engine with the learner's drafts."""

import random
from itertools import accumulate

import numpy as np
import torch

from minivllm.config import Parts, SpeculativeConfig
from minivllm_lab.speculative_decoding.learner_policy import proposer_of, rejection_of
from minivllm_lab.engines.inside import core_of
from minivllm_lab.checks.kernel_trace import trace_kernel
from minivllm_lab.checks.plugged import Plugged
from minivllm.worker.spec_decode.ngram_proposer import NgramProposer


def named(answer, mistakes, cases):
    """Return the first of the `mistakes`, each a function and words, that gives all of the learner's answers."""
    try:
        found = [answer(*case) for case in cases]
    except Exception:
        return ""
    answers = list(zip(cases, found))
    return next((f": {words}" for wrong, words in mistakes if all(wrong(*case) == one for case, one in answers)), "")


# ---- drafts ----------------------------------------------------------------------------------------------------------


def looked_up(tokens, lengths, k, *, last=False, shift=0, itself=False):
    """Return drafts by the book, or with one mistake: suffixes of these `lengths` in turn."""
    for n in lengths:
        suffix = tokens[-n:]
        places = [at for at in range(len(tokens) - n + itself) if tokens[at : at + n] == suffix]
        if n <= len(tokens) and places:
            start = places[-1 if last else 0] + n + shift
            return tokens[start : start + k]
    return []


def right_drafts(tokens, min_n, max_n, k):
    """Look up the longest suffix first, at its first occurrence; the suffix is not its own occurrence."""
    return looked_up(tokens, range(min(max_n, len(tokens) - 1), min_n - 1, -1), k)


TOKENS = (1, 11, 111, 65_537)
"""Ids that look alike where they are joined as text, and one that is 1 where it is cut to a byte or to two."""


def texts(count):
    """Make random texts over four tokens, with lengths of suffixes and numbers of drafts; in some all are long."""
    draw = random.Random(0)
    for index in range(count):
        size, longest, most = (400, 9, 16) if index % 8 == 7 else (24, 4, 5)
        tokens = draw.choices(TOKENS, (3, 1, 1, 3), k=draw.randint(1, size))
        yield tokens, *sorted(draw.choices(range(1, longest + 1), k=2)), draw.randint(1, most)


def with_mistake(lengths=lambda longest, text, least: longest, more=0, **changes):
    """Return `looked_up` with one mistake: other `lengths`, `more` drafts, or its own `changes`."""

    def drafts(tokens, min_n, max_n, k):
        longest = range(min(max_n, len(tokens) - 1), min_n - 1, -1)
        return looked_up(tokens, lengths(longest, tokens, min_n), max(k + more, 0), **changes)

    return drafts


WRONG_DRAFTS = (
    (with_mistake(last=True), "that is what follows the last earlier occurrence, not the first"),
    (
        with_mistake(itself=True),
        "shorter suffixes are not tried; is the end of the text taken for an occurrence of itself?",
    ),
    (with_mistake(lambda longest, *_: longest[::-1]), "the shortest suffix is looked up first"),
    (with_mistake(lambda longest, *_: longest[:-1]), "suffixes of min_n, the shortest, are not tried"),
    (
        with_mistake(lambda _, text, least: range(len(text) - 1, least - 1, -1)),
        "suffixes of more than max_n are looked up",
    ),
    (with_mistake(lambda longest, *_: range(longest.start, 0, -1)), "suffixes of less than min_n are looked up"),
    (with_mistake(shift=-1), "they begin one token early, with the end of the suffix"),
    (with_mistake(shift=1), "they begin one token late"),
    (with_mistake(more=999), "those are all that follow; return at most k"),
    (with_mistake(more=1), "one more than k"),
    (with_mistake(more=-1), "one fewer than k"),
)


def assert_drafts(module, tokens, min_n, max_n, k):
    """Check the drafts after these tokens, and that the tokens are unchanged."""
    given, expected = list(tokens), right_drafts(tokens, min_n, max_n, k)
    found = module.propose_ngram(given, min_n, max_n, k)
    shown = f"{tokens[:4]} … {tokens[-8:]}, {len(tokens)} tokens" if len(tokens) > 40 else f"{tokens}"
    where = f"{shown}, lengths {min_n} to {max_n}, k = {k}"
    assert isinstance(found, list), f"{where}: it returns {type(found).__name__}, not a list"
    assert given == tokens, f"{where}: the list that it was given is now {given if len(given) < 40 else 'another'}"
    hint = named(module.propose_ngram, WRONG_DRAFTS, list(texts(80))) if found != expected else ""
    assert found == expected, f"{where}: {found}, and {expected} is right{hint}"


def check_what_followed_is_proposed(module):
    """Drafts are the tokens that followed the last ones earlier, at most k, and fewer where the text ends."""
    for k in (1, 2, 3, 9):
        assert_drafts(module, [3, 1, 4, 1, 5, 9, 2, 6, 1, 4], 2, 2, k)
    assert_drafts(module, [8, 8, 8], 1, 3, 4)
    assert_drafts(module, [1, 2, 1, 2, 1, 2], 1, 3, 5)


def check_the_longest_suffix_goes_first(module):
    """The longest suffix that occurs earlier is used; a shorter one only if no longer one occurs."""
    assert_drafts(module, [2, 7, 1, 2, 3, 9, 1, 2], 1, 2, 2)
    assert_drafts(module, [2, 7, 1, 2, 3, 9, 1, 2], 1, 4, 2)
    assert_drafts(module, [5, 6, 7, 6], 1, 3, 4)
    assert_drafts(module, [1, 2, 3, 8, 4, 1, 2, 3, 9, 4, 1, 2, 3], 1, 3, 3)  # four would match elsewhere


def check_a_long_text_is_searched_to_its_beginning(module):
    """The occurrence may be thousands of tokens back."""
    assert_drafts(module, [7, 8, 9, 4, *([1, 2] * 1_500), 7, 8], 2, 3, 2)


def check_the_first_occurrence_counts(module):
    """The first of several occurrences counts, as in the engine."""
    assert_drafts(module, [1, 2, 3, 1, 2, 4, 1, 2], 1, 2, 2)
    assert_drafts(module, [6, 1, 6, 2, 6, 3, 6], 1, 1, 1)


def check_there_may_be_nothing_to_propose(module):
    """No earlier occurrence, too short suffixes or a text of one token give no drafts."""
    for tokens, min_n, max_n in (([1, 2, 3], 1, 3), ([5, 6, 7, 6], 2, 3), ([4], 1, 4), ([4, 4], 2, 3), ([1, 2], 1, 5)):
        assert_drafts(module, tokens, min_n, max_n, 3)


def check_the_engine_proposes_the_same(module):
    """On 300 random texts, the drafts are those of the engine's proposer."""
    for tokens, min_n, max_n, k in texts(300):
        config = SpeculativeConfig(num_speculative_tokens=k, prompt_lookup_max=max_n, prompt_lookup_min=min_n)
        engines = NgramProposer(config, max_model_len=1000).drafts_after(np.array(tokens, np.int32))
        assert right_drafts(tokens, min_n, max_n, k) == engines, "the check itself is wrong"
        assert_drafts(module, tokens, min_n, max_n, k)


# ---- accepting -------------------------------------------------------------------------------------------------------


def distributions(draw, rows, vocab):
    """Make random rows of probabilities [rows, vocab], with some impossible tokens."""
    weights = draw.exponential(size=(rows, vocab)) * (draw.random((rows, vocab)) < 0.8)
    weights[:, 0] += 0.01
    return weights / weights.sum(-1, keepdims=True)


def a_step(draw, k, vocab=6):
    """Make random p, q, drafts drawn from q, uniforms and noise."""
    p, q = distributions(draw, k + 1, vocab), distributions(draw, k, vocab)
    drafts = [int(draw.choice(vocab, p=row)) for row in q]
    return p, q, drafts, draw.random(k), draw.exponential(size=(k + 1, vocab))


def with_near_misses(draw, step):
    """Set random numbers just below and above p / q, to catch a rule that is a little too kind or too strict."""
    p, q, drafts, _, noise = step
    places = range(len(drafts))
    near = p[places, drafts] / q[places, drafts] + draw.choice([-2e-6, 2e-6], len(drafts), p=[0.8, 0.2])
    return p, q, drafts, near.clip(0, 0.999), noise


def passing(p, q, drafts, uniforms, rule):
    """Return which drafts `rule(p(x), q(x), u)` accepts, each by itself."""
    return [draft >= 0 and rule(p[i, draft], q[i, draft], uniforms[i]) for i, draft in enumerate(drafts)]


def leading(passed):
    """Count the drafts that pass before the first that does not."""
    return next((i for i, one in enumerate(passed) if not one), len(passed))


def count_by(rule):
    """Count the accepted drafts if each must pass `rule(p(x), q(x), u)`."""
    return lambda p, q, drafts, uniforms: leading(passing(p, q, drafts, uniforms, rule))


def right_count(p, q, drafts, uniforms):
    """Count the accepted drafts by the book."""
    return count_by(below)(p, q, drafts, uniforms)


def below(p, q, u):
    """Return the rule of acceptance."""
    return u * q < p


def on_another_row(p, q, drafts, uniforms):
    """Take row i + 1 of p where it should be row i."""
    return right_count(p[1:], q, drafts, uniforms)


def with_the_last_token(p, q, drafts, uniforms):
    """Take -1 as an index."""
    return leading([below(p[i, x], q[i, x], uniforms[i]) for i, x in enumerate(drafts)])


WRONG_RULES = (
    (lambda p, q, u: u < p, "u < p forgets q: a draft that was drawn often must be rejected more often"),
    (lambda p, q, u: u * p < q, "that is u < q / p: the model's probability stands above"),
    (lambda p, q, u: u < q, "u is compared with q"),
    (lambda p, q, u: u * q >= p, "that rejects what should be accepted, and accepts what should be rejected"),
    (lambda p, q, u: p >= q, "the random number is not used"),
    (lambda p, q, u: u * q <= p, "a token with p = 0 is accepted where u is 0: u < p / q, not u <= p / q"),
)
WRONG_COUNTS = (
    *((count_by(rule), words) for rule, words in WRONG_RULES),
    (
        lambda *step: sum(passing(*step, below)),
        "you go on after the first rejection: what follows it stands in a text that will not be",
    ),
    (with_the_last_token, "p[i, -1] is the last token; -1 stands for no draft, and ends it"),
    (on_another_row, "row i of p is where draft i stands; row i + 1 is what comes after it"),
    (lambda *step: min(right_count(*step) + 1, len(step[2])), "one more: the draft that is rejected is not counted"),
)


def some_steps():
    """Make random steps, some with a draft of -1, or with an impossible one and a random number of 0."""
    draw = np.random.default_rng(4)
    for k in (1, 2, 3, 4) * 20:
        p, q, drafts, uniforms, _ = a_step(draw, k)
        if k == 3:
            drafts[1], q[1] = -1, 0
        if k == 2:
            p[0, drafts[0]], uniforms[0] = 0, 0
        yield p, q, drafts, uniforms


SOME_STEPS = list(some_steps())


def assert_untouched(before, after):
    """Check that p and q are unchanged; another position, or the sampler, may still read them."""
    for name, was, now in zip("pq", before, after, strict=True):
        assert np.array_equal(was, now), f"{name} has been changed: its rows are still read by others"


def assert_accepted(module, p, q, drafts, uniforms):
    """Check the count of accepted drafts."""
    p, q, uniforms = np.asarray(p, float), np.asarray(q, float), np.asarray(uniforms, float)
    expected, given = right_count(p, q, drafts, uniforms), (p.copy(), q.copy())
    found = module.accept(p, q, list(drafts), uniforms)
    assert_untouched(given, (p, q))
    said = f"drafts {list(drafts)}, random numbers {[round(float(u), 7) for u in uniforms]}"
    assert isinstance(found, int | np.integer) and not isinstance(found, bool), f"{said}: it returns {found!r}"
    where = ", ".join(
        f"{p[i, x]:.7g} / {q[i, x]:.7g}" if x >= 0 else "no draft" for i, x in enumerate(drafts)
    )  # p(x) / q(x)
    hint = named(module.accept, WRONG_COUNTS, SOME_STEPS) if found != expected else ""
    assert found == expected, f"{said}, p / q {where}: {found} accepted, and {expected} is right{hint}"


def check_a_draft_is_accepted_with_p_over_q(module):
    """With p(x) = 0.3 and q(x) = 0.6 a draft is accepted if the random number is below 0.5; with p >= q always."""
    p, q = [[0.7, 0.3], [0.2, 0.8]], [[0.4, 0.6]]
    for uniform in (0.0, 0.29, 0.35, 0.45, 0.4999, 0.5001, 0.55, 0.65, 0.99):
        assert_accepted(module, p, q, [1], [uniform])
        assert_accepted(module, p, q, [0], [uniform])
    assert_accepted(module, [[0.75, 0.25]] * 2, [[0.5, 0.5]], [1], [0.5])  # as large as p / q is not below it


def check_a_certain_proposer(module):
    """If q is 1 at the draft, as for n-grams, it is accepted with probability p(x)."""
    p = [[0.5, 0.2, 0.3], [0.1, 0.6, 0.3], [0.9, 0.1, 0.0]]
    q = [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
    for uniforms in ([0.4, 0.2], [0.4, 0.4], [0.6, 0.2]):
        assert_accepted(module, p, q, [0, 2], uniforms)
    assert_accepted(module, p, [[0, 0, 1.0], [0, 1.0, 0]], [2, 1], [0.1, 0.1])


def check_the_first_rejection_ends_it(module):
    """Drafts after a rejected one are not looked at; a draft that the model never generates is never accepted."""
    sure, never = [0.0, 1.0], [1.0, 0.0]
    assert_accepted(module, [never, sure, sure, sure], [sure] * 3, [1, 1, 1], [0.5, 0.5, 0.5])
    assert_accepted(module, [sure, never, sure, sure], [sure] * 3, [1, 1, 1], [0.5, 0.5, 0.5])
    assert_accepted(module, [sure, never, sure], [sure] * 2, [1, 1], [0.0, 0.0])
    assert_accepted(module, [sure] * 4, [sure] * 3, [1, 1, 1], [0.99, 0.5, 0.0])
    assert_accepted(module, [sure], np.zeros((0, 2)), [], [])


def check_no_draft_is_no_token(module):
    """A draft of -1 is never accepted, whatever the last token's probability, and ends it."""
    likely = [0.1, 0.2, 0.7]
    assert_accepted(module, [likely] * 3, [[0.0, 0.5, 0.5], [0.0] * 3], [2, -1], [0.1, 0.1])
    assert_accepted(module, [likely] * 3, [[0.0] * 3] * 2, [-1, -1], [0.0, 0.0])
    assert_accepted(module, [likely] * 4, [[0.0] * 3, [0.0, 0.5, 0.5], [0.0] * 3], [-1, 2, -1], [0.1] * 3)


def check_any_drafts_in_any_order(module):
    """On 400 random steps, some with random numbers next to p / q, the count is that of the rule."""
    draw = np.random.default_rng(0)
    for _ in range(300):
        assert_accepted(module, *a_step(draw, int(draw.integers(0, 5)))[:4])
    for k in (1, 2, 4, 9) * 25:
        assert_accepted(module, *with_near_misses(draw, a_step(draw, k))[:4])


# ---- the token behind the drafts -------------------------------------------------------------------------------------


def drawn_by(scores):
    """Draw a token by other scores than max(p - q, 0) / noise."""
    return lambda p, q, noise: int(np.argmax(scores(p, q, noise)))


right_token = drawn_by(lambda p, q, noise: np.maximum(p - q, 0) / noise)
WRONG_TOKENS = (
    (drawn_by(lambda p, q, noise: p / noise), "it is drawn from p; take away what q has proposed already"),
    (drawn_by(lambda p, q, noise: p - q), "the likeliest one every time: divide by the noise"),
    (drawn_by(lambda p, q, noise: np.maximum(p - q, 0) * noise), "divide by the noise, do not multiply by it"),
    (drawn_by(lambda p, q, noise: np.abs(p - q) / noise), "where q has more than p, the weight is 0, not a distance"),
    (drawn_by(lambda p, q, noise: (q - p) / noise), "p and q are the wrong way round"),
    (drawn_by(lambda p, q, noise: -np.maximum(p - q, 0) / noise), "the largest w / noise wins, not the smallest"),
    (drawn_by(lambda p, q, noise: np.where(p > q, p, 0) / noise), "the weight is p - q, not p where that is larger"),
)


def some_rows():
    """Make random p, q and noise of one position."""
    draw = np.random.default_rng(5)
    return [(*distributions(draw, 2, 5), draw.exponential(size=5)) for _ in range(80)]


def assert_recovered(module, p, q, noise):
    """Check that it is the token with the largest max(p - q, 0) / noise."""
    p, q, noise = (np.asarray(x, float) for x in (p, q, noise))
    said = f"p {p.round(2).tolist()}, q {q.round(2).tolist()}, noise {noise.round(2).tolist()}"
    said = said if len(p) <= 8 else f"{len(p)} tokens"
    expected, given = right_token(p, q, noise), (p.copy(), q.copy())
    found = module.recovered(p, q, noise)
    assert_untouched(given, (p, q))
    assert isinstance(found, int | np.integer), f"{said}: it returns {found!r}, not a token id"
    hint = named(module.recovered, WRONG_TOKENS, some_rows()) if found != expected else ""
    assert found == expected, f"{said}: token {found}, and {expected} is right{hint}"


def check_what_was_not_proposed_is_recovered(module):
    """The recovered token is drawn with the probability by which p exceeds q."""
    assert_recovered(module, [0.5, 0.5], [0.8, 0.2], [1e-12, 3.0])
    assert_recovered(module, [0.6, 0.3, 0.1], [1.0, 0.0, 0.0], [0.1, 2.0, 0.5])
    assert_recovered(module, [0.2, 0.5, 0.3], [0.1, 0.2, 0.7], [0.2, 2.0, 0.01])
    assert_recovered(module, [0.2, 0.5, 0.3], [0.1, 0.2, 0.7], [1.0, 1.0, 1.0])
    draw = np.random.default_rng(1)
    for vocab in (5,) * 80 + (40,) * 10 + (5_000,) * 5:
        p, q = distributions(draw, 2, vocab)
        assert_recovered(module, p, q, draw.exponential(size=vocab))


def tokens_of(p, q, drafts, uniforms, noise, row=lambda n, k: n, take_away=True, upto=0, ends=(1, 1)):
    """Return the tokens of a step by the book, or with one mistake: drawn from another `row`, or other drafts kept."""
    n, k = right_count(p, q, drafts, uniforms), len(drafts)
    rejected = q[n] if n < k and take_away else 0
    last = [right_token(p[row(n, k)], rejected, noise[n])] if ends[n == k] else []
    return [*drafts[: max(n + upto, 0)], *last]


def steps_with(**mistake):
    """Return `tokens_of` with a mistake."""
    return lambda *step: tokens_of(*step, **mistake)


WRONG_STEPS = (
    (steps_with(ends=(0, 0)), "no token follows the drafts"),
    (steps_with(ends=(1, 0)), "if all drafts were accepted, the bonus token is forgotten"),
    (steps_with(ends=(0, 1)), "if a draft was rejected, the recovered token is forgotten"),
    (steps_with(upto=1), "the rejected draft is kept"),
    (steps_with(upto=99), "nothing is kept behind the first rejection"),
    (steps_with(upto=-1), "the last accepted draft is dropped"),
    (steps_with(take_away=False), "a rejected draft's q must be taken away from p"),
    (steps_with(row=lambda n, k: n - 1), "the last token is drawn from the row before its own"),
    (steps_with(row=lambda n, k: min(n, k - 1)), "the bonus has a row of its own, the last one of p"),
    (steps_with(row=lambda n, k: 0), "the last token is drawn from the first row of p, always"),
    (steps_with(row=lambda n, k: k), "the last token is drawn from the last row of p, always"),
)


def some_whole_steps():
    """Make random steps with at least one draft, and their noise."""
    draw = np.random.default_rng(6)
    return [a_step(draw, k) for k in (1, 2, 3, 4) * 20]


def assert_verified(module, p, q, drafts, uniforms, noise):
    """Check the tokens of this step."""
    expected, given = tokens_of(p, q, drafts, uniforms, noise), (p.copy(), q.copy())
    found = module.verify(p, q, list(drafts), uniforms, noise)
    assert_untouched(given, (p, q))
    assert isinstance(found, list), f"it returns {type(found).__name__}, not a list"
    no_id = [token for token in found if not isinstance(token, int | np.integer)]
    assert not no_id, f"{no_id[0]!r} is among the tokens that it returns, and is not an int"
    found = [int(token) for token in found]
    hint = named(module.verify, WRONG_STEPS, some_whole_steps()) if found != expected else ""
    accepted = f"{len(expected) - 1} of {len(drafts)} drafts are accepted"
    assert found == expected, f"drafts {drafts}, {accepted}: {found}, and {expected} is right{hint}"


def check_a_step_gives_the_drafts_and_one_token(module):
    """A step gives the accepted drafts and one more: the recovered token, or a bonus token if all were accepted."""
    draw = np.random.default_rng(2)
    for k in (1, 3, 0, 2, 17):
        for _ in range(40):
            p, *others = a_step(draw, k)
            p[:k] = (p[:k] + k * others[0]) / (k + 1)  # long runs of accepted drafts, too
            assert_verified(module, p, *others)
    for behind in ([], [1]):
        p, q, _, uniforms, noise = a_step(draw, 2 + len(behind))
        q[1] = 0
        assert_verified(module, p, q, [int(np.argmax(p[0])), -1, *behind], uniforms * 0, noise)


def check_the_tokens_are_the_models_own(module):
    """In 6,000 steps, tokens come as often as from the model alone, and drafts as often as p and q allow."""
    p = np.array([[0.25, 0.45, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]])
    q = np.array([[0.85, 0.05, 0.05, 0.05]])
    draw, steps, counts, both = np.random.default_rng(3), 6_000, np.zeros(4), np.zeros((4, 4))
    drafts, uniforms = draw.choice(4, steps, p=q[0]), draw.random((steps, 1))
    noise, num_accepted = draw.exponential(size=(steps, 2, 4)), 0
    for step in range(steps):
        first, *rest = module.verify(p, q, [int(drafts[step])], uniforms[step], noise[step])
        counts[first] += 1
        num_accepted += len(rest)
        if rest:
            both[first, rest[0]] += 1
    rate, allowed = num_accepted / steps, float(np.minimum(p[0], q[0]).sum())
    assert abs(rate - allowed) < 0.012, f"{rate:.3f} of the drafts are accepted; the sum of min(p, q) is {allowed:.3f}"
    for found, right, what in ((counts / steps, p[0], "first"), (both.sum(0) / max(both.sum(), 1), p[1], "bonus")):
        worst = int(np.abs(found - right).argmax())
        said = f"{found[worst]:.3f} of the {what} tokens are {worst}, and the model alone says it {right[worst]:.3f}"
        assert abs(found[worst] - right[worst]) < (0.015 if what == "first" else 0.03), f"{said}: it is biased"


# ---- the kernel, in steps --------------------------------------------------------------------------------------------

GREEDY = (
    ([4, 7, 9], [4, 8, 9, 5]), ([4, 7, 9], [4, 7, 9, 5]), ([0], [6, 1]), ([], [3]), ([1, 2, -1], [1, 2, 6, 4]),
    ([-1, -1], [0, 0, 0]), ([2, 2, 2, 2], [2, 2, 2, 5, 1]), ([0, 0], [0, 0, 0]), ([3] * 9, [3] * 9 + [4]),
)  # fmt: skip
RAGGED = (
    [([4, 7, 9], [4, 8, 9, 5]), ([], [3]), ([6], [6, 2])],
    [([], [8]), ([], [1])],
    [([1, 2, 3, 4], [1, 2, 3, 4, 5]), ([5, 6], [5, 7, 6]), ([3, -1, 4], [3, 9, 4, 9]), ([7], [8, 9])],
    [([6], [6, 2]), ([3] * 9, [3] * 9 + [4]), ([5], [7, 5])],
)


def block_for(width):
    """Return a power of two that holds a row, 8 or more."""
    return max(8, 1 << (width - 1).bit_length())


def ints(values):
    """Make an int32 tensor, which may be empty."""
    return torch.tensor(list(values), dtype=torch.int32)


def traced(kernel, grid, *arguments, **constants):
    """Trace the kernel; it must stay inside its arguments and have no races."""
    trace = trace_kernel(kernel, grid, *arguments, **constants)
    hint = "Has a place behind the last draft or behind a row, or one with -1, no mask?"
    assert not trace.out_of_bounds, f"{trace.out_of_bounds[0]}. {hint}"
    assert not trace.races, f"{trace.races[0]}. Is a row written beyond its end?"
    return trace


def greedy_row(drafts, target, width):
    """Return a row of output by the book: -1 after the last token."""
    n = leading([x == y and x >= 0 for x, y in zip(drafts, target, strict=False)])
    return [*target[: n + 1], *[-1] * (width - n - 1)]


def assert_row(found, expected, drafts, matches, where):
    """Check a request's row of output; `matches` says which drafts pass, each by itself."""
    if found == expected:
        return
    n = leading(matches)
    hint = ""
    if found[: n + 1] == expected[: n + 1] and any(token != -1 for token in found[n + 1 :]):
        hint = ": -1 must follow the last token; a right draft after a rejection comes too late"
    elif found[:n] == expected[:n] and all(token == -1 for token in found[n:]):
        hint = f": {'the bonus' if n == len(drafts) else 'the token in place of the rejected draft'} is forgotten"
    elif n < len(drafts) and found[:n] == expected[:n] and found[n] == drafts[n]:
        hint = (
            ": that is the rejected draft itself" if drafts[n] >= 0 else ": -1 is not a draft, so it cannot be accepted"
        )
    elif len(found) > n + 1 and found[: n + 1] == expected[: n + 1]:
        hint = ": the row is not written to its end"
    raise AssertionError(f"{where}, drafts {drafts}: {found}, and {expected} is right{hint}")


def assert_traffic(trace, **most):
    """Check that no argument is read more often than needed, and that the output is written once."""
    for name, numbers in most.items():
        read = trace.arguments[name].bytes_read
        assert read <= 4 * numbers, f"{read:,} bytes of {name} read, and {4 * numbers:,} are enough"
    written, output = trace.arguments["output"].bytes_written, trace.arguments["output"].bytes_written_once
    assert written == output, f"{written:,} bytes of output written, and it has {output:,}"


def check_kernel_step_1_greedy(module):
    """Stretch: drafts are kept up to the first that is not the likeliest token, and one token follows."""
    for drafts, target in GREEDY:
        output = torch.full((len(target),), -7, dtype=torch.int32)
        arguments = output, ints(drafts), ints(target), len(drafts)
        trace = traced(module.greedy_kernel, (1,), *arguments, BLOCK=block_for(len(target)))
        matches = [x == y and x >= 0 for x, y in zip(drafts, target, strict=False)]
        assert_row(output.tolist(), greedy_row(drafts, target, len(target)), drafts, matches, f"target {target}")
        assert_traffic(trace, drafts=len(drafts), target=len(target))


def starts_of(requests):
    """Return where each request's drafts begin, and where the last one's end."""
    return list(accumulate((len(drafts) for drafts, *_ in requests), initial=0))


def check_kernel_step_2_ragged(module):
    """Stretch: a program for each request, with drafts of any number; none writes into another's row."""
    for requests in RAGGED:
        starts, width = starts_of(requests), max(len(target) for _, target in requests) + 1
        drafts = [x for theirs, _ in requests for x in theirs]
        target = [x for _, theirs in requests for x in theirs]
        output = torch.full((len(requests), width), -7, dtype=torch.int32)
        arguments = output, ints(drafts), ints(target), ints(starts), width
        trace = traced(module.ragged_kernel, (len(requests),), *arguments, BLOCK=block_for(width))
        for index, (theirs, likeliest) in enumerate(requests):
            matches = [x == y and x >= 0 for x, y in zip(theirs, likeliest, strict=False)]
            found, where = output[index].tolist(), f"draft_start {starts}, request {index}, target {likeliest}"
            assert_row(found, greedy_row(theirs, likeliest, width), theirs, matches, where)
        assert_traffic(trace, drafts=len(drafts), target=len(target), draft_start=2 * len(requests))


def kernel_requests(seed, vocab):
    """Make random requests: drafts, p, q, uniforms, and the token for each position. A draft of -1 has a q of zeros."""
    draw, requests = np.random.default_rng(seed), []
    for index, k in enumerate((3, 0, 9, 1, 2, 4, 3, 1, 1)):
        p, q, drafts, uniforms, noise = a_step(draw, k, vocab)
        p[:k] = (p[:k] + 2 * q) / 3  # long runs of accepted drafts, too
        if index % 2:
            uniforms = with_near_misses(draw, (p, q, drafts, uniforms, noise))[3]
        if k == 3:
            drafts[-1], q[-1] = -1, 0
        requests.append((drafts, p, q, uniforms, draw.integers(0, vocab, k + 1).tolist()))
    requests[3][3][0], requests[3][1][0, requests[3][0][0]] = 0.0, 0.0  # impossible, and a random number of 0
    return requests


def row_by(rule, request, width):
    """Return a row of output if each draft must pass `rule`."""
    drafts, p, q, uniforms, instead = request
    n = count_by(rule)(p, q, drafts, uniforms)
    return [*drafts[:n], instead[n], *[-1] * (width - n - 1)]


def check_kernel_step_3_random(module):
    """Stretch: a draft is kept if its random number is below p / q; p and q are read at the drafts alone."""
    for seed, vocab in ((0, 6), (1, 11), (2, 5)):
        requests = kernel_requests(seed, vocab)
        starts, width = starts_of(requests), 10
        drafts, instead = ([x for one in requests for x in one[place]] for place in (0, 4))
        p, q = (torch.tensor(np.vstack([one[place] for one in requests]), dtype=torch.float32) for place in (1, 2))
        uniforms = torch.tensor(np.concatenate([one[3] for one in requests]), dtype=torch.float32)
        output = torch.full((len(requests), width), -7, dtype=torch.int32)
        arguments = output, ints(drafts), ints(instead), p, q, uniforms, ints(starts), width, vocab
        trace = traced(module.rejection_kernel, (len(requests),), *arguments, BLOCK=block_for(width))
        for wrong, words in WRONG_RULES:
            same = output.tolist() == [row_by(wrong, request, width) for request in requests]
            assert not same, f"of {len(requests)} requests not all rows are right: {words}"
        for index, request in enumerate(requests):
            drafts_of_it, mine, proposed, numbers, then = request
            matches = passing(mine, proposed, drafts_of_it, numbers, below)
            where = f"request {index}, instead {then}"
            assert_row(output[index].tolist(), row_by(below, request, width), drafts_of_it, matches, where)
        most = {name: sum(x >= 0 for x in drafts) for name in ("p", "q")}
        assert_traffic(trace, **most, uniforms=len(drafts), drafts=len(drafts), instead=len(instead))


# ---- in the engine ---------------------------------------------------------------------------------------------------

PROMPTS = (
    "def add(a, b):\n    return",
    "class Stack:\n    def push(self, item):\n        self.items.append(item)\n\n    def",
    "for index in range(10):\n    print(index)\nfor index in range(10):\n",
    "def first(self):\n    return self.items[0]\n\ndef second(self):\n    return self.items[1]\n\ndef third",
)


def plug(module) -> Plugged:
    """Run the engine with the learner's drafts and the learner's verification."""
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    return Plugged(
        parts=Parts(
            draft_proposer=proposer_of(module.propose_ngram),
            rejection_sample=rejection_of(module.verify),
        ),
        engine_args={"speculative_config": drafts},
        prompts=PROMPTS,
        max_tokens=48,
        says=acceptance,
    )


def acceptance(llm):
    """Count the drafts and those accepted."""
    stats = core_of(llm).scheduler.spec_decoding_stats
    length = 1 + stats.num_accepted_tokens / max(stats.num_drafts, 1)
    accepted = f"{stats.num_accepted_tokens} of {stats.num_draft_tokens}"
    return {"drafts accepted": accepted, "mean acceptance length": f"{length:.2f}"}
