"""Lesson 07's measurements, its tables, its figure and its command line.

A function `measure_*` or `count_*` measures, prints its table and returns its figures; what it takes as a callable is
code of the lesson.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minivllm.config import EMBEDDED_DRAFT, EMBEDDED_MODEL
from minivllm.errors import MinivllmError
from minivllm.models.decoder import Decoder
from minivllm.models.loader import load_model
from minivllm.models.tokenizer import load_tokenizer
from minivllm_lab import palette
from minivllm_lab.cli import lesson_parser, whole_number
from minivllm_lab.corpus import first_passages, held_out_texts
from minivllm_lab.figures import curves, panels
from minivllm_lab.progress import track
from minivllm_lab.speculative_decoding.cached_model import CachedModel
from minivllm_lab.speculative_decoding.given_drafts import answers_with_errors, drafted_engine, serve_with_drafts
from minivllm_lab.tables import Timed, closing, console, table
from minivllm_lab.timing import in_turns

PROMPT_TOKENS, OUTPUT_TOKENS, MAX_MODEL_LEN = 128, 64, 256
POSITIONS = (1, 2, 4, 8)
"""Positions of one request in a step: a token and its drafts."""
ACCEPTANCE = 0.7
"""Of the drafts whose acceptance is given."""
TEMPERATURES = (0.0, 0.5, 1.0, 1.5)
Verify = Callable[[np.ndarray, np.ndarray, list[int], np.ndarray, np.ndarray], list[int]]
"""(p, q, drafts, uniforms, noise) -> tokens, as the lesson's `verify`."""


def load_models(target: str, draft: str, device: torch.device) -> tuple[Decoder, Decoder]:
    """Both models in float32.

    Raises:
        MinivllmError: one cannot be loaded, or their vocabularies differ.
    """
    models = [load_model(path, device, torch.float32)[0] for path in (target, draft)]
    sizes = [model.config.vocab_size for model in models]
    if sizes[0] != sizes[1]:
        raise MinivllmError(f"--draft-model has {sizes[1]:,} tokens and --model {sizes[0]:,}: they must be the same")
    return models[0], models[1]


def held_out_prompts(model: str, count: int, length: int = PROMPT_TOKENS) -> list[list[int]]:
    """`length` tokens from the middle of so many texts that the embedded models were not trained on.

    Raises:
        MinivllmError: there are not so many; see `first_passages`.
    """
    tokenizer = load_tokenizer(model)
    texts = [tokenizer.encode(text[:20_000]).ids for text in held_out_texts()]
    return first_passages([ids[len(ids) // 2 :] for ids in texts if len(ids) // 2 >= 2 * length], count, length)


# ---- 1. what a step with drafts costs --------------------------------------------------------------------------------


def wrong_drafts(vocab_size: int, count: int, seed: int) -> Callable[[str, int], list[int]]:
    """So many random tokens after any: hardly one is ever right."""
    draw = random.Random(seed)
    return lambda _name, _num_output_tokens: [draw.randrange(vocab_size) for _ in range(count)]


def measure_steps(arguments: argparse.Namespace, device: torch.device) -> dict:
    """Seconds of the engine's steps by requests and positions of each; drafts are random, so that none is accepted."""
    batches, steps, rounds = ((1, 4), 6, 1) if arguments.quick else ((1, 8, 64), 12, 3)
    found, rows = {}, []
    for batch in track(batches, "timing steps"):
        core = drafted_engine(
            arguments.model, device, num_speculative_tokens=max(POSITIONS) - 1, max_num_seqs=batch
        )  # fmt: skip
        prompts = random_prompts(batch, core.model_config.vocab_size, arguments.seed)
        seconds: dict[int, list[float]] = {positions: [] for positions in POSITIONS}
        for turn in range(rounds + 1):
            for positions in POSITIONS:
                drafts = wrong_drafts(core.model_config.vocab_size, positions - 1, arguments.seed)
                run = serve_with_drafts(core, prompts, steps, drafts)
                seconds[positions] += [run.step_seconds] if turn else []  # the first turn warms up
        medians = {positions: statistics.median(ones) for positions, ones in seconds.items()}
        ratios = {str(positions): one / medians[1] for positions, one in medians.items()}
        found[str(batch)] = {"ms": 1e3 * medians[1], "ratio": ratios}
        rows.append((batch, f"{1e3 * medians[1]:.2f}", *(f"{ratios[str(n)]:.2f} ×" for n in POSITIONS[1:])))
    columns = ("requests", "a token each, ms", *(f"{positions} positions each" for positions in POSITIONS[1:]))
    table("A step of the engine", columns, rows)
    return found


def random_prompts(count: int, vocab_size: int, seed: int, length: int = 32) -> list[list[int]]:
    """Token ids of so many prompts that share no prefix."""
    draw = random.Random(seed)
    return [[draw.randrange(vocab_size) for _ in range(length)] for _ in range(count)]


# ---- 2. guess, verify, keep ------------------------------------------------------------------------------------------


def count_family(
    methods: Mapping[str, Callable[[CachedModel, list[int], int], Any]],
    target: Decoder,
    prompts: Sequence[list[int]],
    expected_tokens: Callable[[float, int], float],
    arguments: argparse.Namespace,
) -> dict:
    """Passes and accepted drafts of each method on the same prompts, greedy; the first one has no drafts.

    Raises:
        AssertionError: a method changes a token.
    """
    found, rows, answers = {}, [], []
    tokens = 16 if arguments.quick else OUTPUT_TOKENS
    for name, method in track(methods.items(), "guessing"):
        runs = [method(CachedModel(target, MAX_MODEL_LEN), prompt, tokens) for prompt in prompts]
        answers = answers or [run.tokens for run in runs]
        assert [run.tokens for run in runs] == answers, f"{name}: another text than without drafts"
        found[name] = one = counted([run.stats for run in runs])
        one["tokens_per_pass"] = len(prompts) * tokens / sum(run.passes for run in runs)
        if one["drafts"]:
            one["formula"] = expected_tokens(one["alpha"], len(one["rates"]))
        shown = (f"{rate:.2f}" for rate in one["rates"])
        lengths = (f"{one['length']:.2f}", f"{one['formula']:.2f}") if one["drafts"] else ()
        rows.append((name, f"{one['tokens_per_pass']:.2f}", one["drafts"] or "", *shown, *lengths))
    places = [f"draft\n{place}" for place in range(1, arguments.drafts + 1)]  # a terminal has 80 columns
    columns = ("method", "tokens\na pass", "guesses", *places, "length", "by\nformula")
    width = len(columns)
    caption = (
        "The same tokens each time. Draft i: the share that stood if all before it did. Length: tokens of a pass that "
        "had drafts; by the formula, if all drafts had the first one's rate."
    )
    rows = [(*row, *[""] * (width - len(row))) for row in rows]
    table(f"{len(prompts)} held-out texts, {tokens} tokens of each, greedy", columns, rows, caption)
    return found


def counted(stats: Sequence[Any]) -> dict:
    """Sums over `SpecDecodingStats`: drafts, accepted by position, rates given all before, mean acceptance length."""
    drafts = sum(one.num_drafts for one in stats)
    places = max(len(one.num_accepted_tokens_per_pos) for one in stats)
    accepted = [
        sum(one.num_accepted_tokens_per_pos[place] for one in stats if place < len(one.num_accepted_tokens_per_pos))
        for place in range(places)
    ]
    rates = [after / before if before else 0.0 for before, after in pairwise([drafts, *accepted])]
    length = 1 + sum(accepted) / max(1, drafts)
    return {"drafts": drafts, "accepted": accepted, "rates": rates, "alpha": [*rates, 0.0][0], "length": length}


# ---- 3. the kernel ---------------------------------------------------------------------------------------------------


def draft_batch(counts: Sequence[int], vocab_size: int) -> tuple[Tensor, ...]:
    """Random arguments of the lesson's `rejection_launch`, for requests with so many drafts each.

    p [drafts + requests, vocab], q [drafts, vocab] near it, drafts int32 drawn from q, draft_start, uniforms, noise.
    """
    starts = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)
    p = torch.randn(sum(counts) + len(counts), vocab_size).softmax(-1)
    has_draft = torch.cat([torch.arange(count + 1) < count for count in counts])
    q = (p[has_draft].log() + torch.randn(sum(counts), vocab_size) / 2).softmax(-1)
    drafts = q.multinomial(1)[:, 0].int() if len(q) else torch.empty(0, dtype=torch.int32)
    return p, q, drafts, starts, torch.rand(len(q)), torch.empty_like(p).exponential_()


def verified_one_by_one(verify: Verify, batch: Sequence[Tensor]) -> list[list[int]]:
    """The rule on each request of a `draft_batch`: rows of tokens, −1 behind the last."""
    p, q, drafts, starts, uniforms, noise = (one.numpy() for one in batch)
    width, rows = int(np.diff(starts).max()) + 1, []
    for i, (start, end) in enumerate(pairwise(starts.tolist())):
        mine, its = slice(start, end), slice(start + i, end + i + 1)
        tokens = verify(p[its], q[mine], drafts[mine].tolist(), uniforms[mine], noise[its])
        rows.append(tokens + [-1] * (width - len(tokens)))
    return rows


def verify_kernel(launch: Callable[..., Tensor], verify: Verify, device: torch.device) -> dict:
    """The kernels against the rule, token for token, in vocabularies that no block divides; and the bytes they read.

    Raises:
        AssertionError: they differ.
    """
    counts, found, rows = [3, 0, 1, 3, 2], {}, []
    for vocab_size in (31, 1000, 1025, 4096):
        batch = draft_batch(counts, vocab_size)
        tokens = launch(*(one.to(device) for one in batch))
        assert tokens.tolist() == verified_one_by_one(verify, batch), f"wrong with a vocabulary of {vocab_size}"
        drafts, requests = sum(counts), len(counts)
        race = (12 * drafts + 8 * requests) * vocab_size
        found[str(vocab_size)] = {"race": race, "rejection": 16 * drafts + 12 * requests}
        rows.append((f"{vocab_size:,}", f"{race:,}", f"{16 * drafts + 12 * requests:,}"))
    columns = ("vocabulary", "bytes that the race reads", "the rejection")
    table(f"{len(counts)} requests with {counts} drafts: right, token for token", columns, rows)
    return found


# ---- 4. exact, or nearly ---------------------------------------------------------------------------------------------

STATES = 5


def tiny_models(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Target and draft with five tokens, of which each depends on the one before: two matrices [token, next token]."""
    draw = np.random.default_rng(seed)
    target = draw.dirichlet(np.full(STATES, 2.0), STATES) * 0.9 + 0.1 / STATES
    draft = target * np.exp(draw.normal(size=target.shape))
    return target, draft / draft.sum(-1, keepdims=True)


def two_tokens(rule: Verify, models: tuple[np.ndarray, np.ndarray], draw: np.random.Generator) -> tuple[int, int, int]:
    """Two tokens after token 0, with two drafts a step; and how many of the first step's drafts stood."""
    (target, draft), tokens, accepted = models, [0], 0
    while len(tokens) < 3:
        known = list(tokens[-1:])
        for _ in range(2):
            known.append(int(np.searchsorted(draft[known[-1]].cumsum(), draw.random())))
        new = rule(target[known], draft[known[:-1]], known[1:], draw.random(2), draw.exponential(size=(3, STATES)))
        accepted = accepted if len(tokens) > 1 else len(new) - 1
        tokens += new
    return tokens[1], tokens[2], accepted


def try_rules(rules: Mapping[str, Verify], rounds: int, seed: int) -> dict:
    """Each rule on the tiny models: two tokens, so many times, against what the target alone would say."""
    models, found, rows = tiny_models(seed=5), {}, []
    target, draft = models
    exact = target[0][:, None] * target
    first = float(np.minimum(target[0], draft[0]).sum())
    for name, rule in track(rules.items(), "testing rules"):
        draw, counts, accepted = np.random.default_rng(seed), np.zeros_like(exact), 0
        for _ in range(rounds):
            one, two, stood = two_tokens(rule, models, draw)
            counts[one, two] += 1
            accepted += stood > 0
        chi = float(((counts - rounds * exact) ** 2 / (rounds * exact)).sum())
        freedom = exact.size - 1
        chance = float(torch.special.gammaincc(torch.tensor(freedom / 2.0), torch.tensor(chi / 2.0)))
        distance = float(np.abs(counts / rounds - exact).sum() / 2)
        found[name] = {"chi": chi, "p": chance, "distance": distance, "accepted": accepted / rounds}
        shown = f"{chance:.2f}" if chance > 0.01 else "< 0.001" if chance < 1e-3 else f"{chance:.3f}"
        rows.append((name, f"{accepted / rounds:.3f}", f"{distance:.3f}", f"{chi:,.0f}", shown))
    caption = f"Σ min(p, q) is {first:.3f}. Chance: of an exact rule to be as far off ({freedom} degrees of freedom)."
    columns = ("rule", "first drafts that stood", "distance", "chi-square", "chance")
    table(f"Two tokens of five kinds, {rounds:,} times", columns, rows, caption)
    return {"rules": found, "freedom": freedom, "sum_min": first, "rounds": rounds}


# ---- 5. when it pays -------------------------------------------------------------------------------------------------


def measure_batches(
    arguments: argparse.Namespace, device: torch.device, speed_up: Callable[..., float], models: Sequence[Decoder]
) -> dict:
    """Drafts of a given acceptance, by batch: what the formulas promise, and the engine's tokens a second."""
    k, tokens = arguments.drafts, 16 if arguments.quick else 40
    batches, found, rows = (1, 4) if arguments.quick else (1, 2, 4, 8, 16, 32, 64, 128), {}, []
    for batch in track(batches, "verifying"):
        core = drafted_engine(arguments.model, device, num_speculative_tokens=k, max_num_seqs=batch)
        prompts = random_prompts(batch, core.model_config.vocab_size, arguments.seed)
        wrong = wrong_drafts(core.model_config.vocab_size, k, arguments.seed)
        serve_with_drafts(core, prompts, 8, wrong)  # warms up
        plain = serve_with_drafts(core, prompts, tokens + k)
        drafts = answers_with_errors(plain.outputs, ACCEPTANCE, k, arguments.seed)
        ways = {"plain": None, "wrong": wrong, "given": drafts}
        turns = [
            {name: serve_with_drafts(core, prompts, tokens, way) for name, way in ways.items()}
            for _ in range(1 if arguments.quick else 3)
        ]
        cost = statistics.median(one["wrong"].step_seconds / one["plain"].step_seconds for one in turns)
        given = turns[0]["given"]
        found[str(batch)] = one = {
            "cost": cost,
            "free": speed_up(ACCEPTANCE, k),
            "predicted": speed_up(ACCEPTANCE, k, verify_cost=cost),
            "measured": statistics.median(one["given"].throughput / one["plain"].throughput for one in turns),
            "wrong": 1 / cost,
            "length": given.acceptance_length,
            "same": statistics.mean(given.outputs[name] == theirs[:tokens] for name, theirs in plain.outputs.items()),
        }
        rows.append((batch, f"{cost:.2f}", *(f"{one[name]:.2f} ×" for name in SPEED_UPS), f"{one['same']:.0%}"))
    columns = ("requests", "a step costs", *SPEED_UPS.values(), "same texts")
    title = f"{k} drafts of which {ACCEPTANCE:.0%} are right, at no cost of drafting"
    edges = {name: break_even({int(b): one[name] for b, one in found.items()}) for name in ("predicted", "measured")}
    caption = f"Break-even: predicted {shown_edge(edges['predicted'])}, measured {shown_edge(edges['measured'])}."
    table(title, columns, rows, caption)
    return {"batches": found, "break_even": edges, "draft_cost": measure_draft_cost(models, device)}


SPEED_UPS = {
    "free": "speed-up if it cost 1",
    "predicted": "with that cost",
    "measured": "measured",
    "wrong": "all drafts wrong",
}


def break_even(speed_ups: Mapping[int, float]) -> float | None:
    """The batch at which a speed-up falls below 1, between two that were measured; None if it does not."""
    for (small, above), (large, below) in pairwise(sorted(speed_ups.items())):
        if above >= 1 > below:
            return small * (large / small) ** ((above - 1) / (above - below))
    return None


def shown_edge(batch: float | None) -> str:
    """A break-even batch in words."""
    return "at none of these" if batch is None else f"at {batch:.0f} requests"


def measure_draft_cost(models: Sequence[Decoder], device: torch.device) -> float:
    """One token through the draft, in passes of the target; for one request with 128 tokens of context."""
    cached = {str(index): CachedModel(model, MAX_MODEL_LEN) for index, model in enumerate(models)}

    def one_token(model: CachedModel) -> Callable[[], object]:
        def act() -> None:
            model.length = PROMPT_TOKENS
            model.forward([1])

        return act

    seconds = in_turns({name: one_token(model) for name, model in cached.items()}, 100, device)
    target, draft = (statistics.median(one) for one in seconds.values())
    console.print(f"A pass of the draft model takes {draft / target:.2f} of one of the target.")
    return draft / target


# ---- 6. break it -----------------------------------------------------------------------------------------------------


def measure_temperature(
    target: Decoder, draft: Decoder, prompts: Sequence[list[int]], distribution: Callable[[Tensor, float], np.ndarray]
) -> dict:
    """The acceptance of the draft model along held-out texts, by temperature: E Σ min(p, q), and of its likeliest."""
    kept: dict[str, list[float]] = {str(t): [] for t in TEMPERATURES}
    likeliest: dict[str, list[float]] = {str(t): [] for t in TEMPERATURES}
    for prompt in track(prompts, "reading"):
        logits = [CachedModel(model, MAX_MODEL_LEN).forward(prompt) for model in (target, draft)]
        best = logits[1].argmax(-1).cpu().numpy()
        for t in TEMPERATURES:
            p, q = (distribution(one, t) for one in logits)
            kept[str(t)] += np.minimum(p, q).sum(-1).tolist()
            likeliest[str(t)] += p[np.arange(len(p)), best].tolist()
    found = {
        "kept": {t: statistics.mean(ones) for t, ones in kept.items()},
        "likeliest": {t: statistics.mean(ones) for t, ones in likeliest.items()},
    }
    names = {"kept": "drawn from q, q kept", "likeliest": "its likeliest token"}
    rows = [(names[name], *(f"{rate:.2f}" for rate in rates.values())) for name, rates in found.items()]
    table("Acceptance of the draft model's first draft", ("drafts", *(f"T = {t:g}" for t in TEMPERATURES)), rows)
    return found


# ---- the whole lesson ------------------------------------------------------------------------------------------------


def close(found: dict, disturbance: str) -> None:
    """Print the conclusions; `disturbance` says what else kept the machine busy, if anything."""
    family, exact, pays = found["family"], found["exact"]["rules"], found["batches"]
    ngram, draft = family["n-gram"], family["draft model"]
    few, many = (pays["batches"][batch] for batch in (min(pays["batches"], key=int), max(pays["batches"], key=int)))
    wrong = [name for name, one in exact.items() if one["p"] < 1e-3]
    closing(
        f"The same text in fewer passes: {ngram['tokens_per_pass']:.2f} tokens a pass with n-grams, "
        f"{draft['tokens_per_pass']:.2f} with a draft model. A guess of the former yields {ngram['length']:.2f} "
        f"tokens, and the formula says {ngram['formula']:.2f}.",
        f"{found['exact']['rounds']:,} rounds tell the exact rule from {len(wrong)} that are not: {', '.join(wrong)}.",
        Timed(
            f"Drafts of which {ACCEPTANCE:.0%} are right: {few['measured']:.2f} × as fast for one request, "
            f"{many['measured']:.2f} × for {max(pays['batches'], key=int)}. Break-even was predicted "
            f"{shown_edge(pays['break_even']['predicted'])}, and measured {shown_edge(pays['break_even']['measured'])}."
        ),
        disturbance=disturbance,
    )


def draw(found: dict, path: str) -> None:
    """The cost of a step over its positions; accepted drafts by position; speed-up over the batch."""
    with panels(path, 3) as (left, middle, right):
        steps = {f"{batch} request{'s' * (int(batch) > 1)}": one["ratio"] for batch, one in found["steps"].items()}
        curves(left, steps, octaves=True)
        left.set(title="A step costs", xlabel="positions of each request", ylabel="× a token each", ylim=(0, None))
        rates = {name: one["rates"] for name, one in found["family"].items() if one["drafts"]}
        curves(middle, {name: dict(enumerate(ones, start=1)) for name, ones in rates.items()})
        middle.set(title="Drafts that stand", xlabel="place", ylabel="if all before it did", ylim=(0, 1))
        middle.set_xticks(range(1, 1 + max(map(len, rates.values()))))
        names = {"free": "if a step cost the same", "predicted": "predicted", "measured": "measured"}
        batches = found["batches"]["batches"]
        lines = {title: {batch: one[name] for batch, one in batches.items()} for name, title in names.items()}
        curves(right, lines, octaves=True)
        right.axhline(1.0, color=palette.GREY, linewidth=1)
        right.set(title="Times as fast", xlabel="requests", ylim=(0, None))


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The lesson's own flags, besides the common ones; `doc` is shown by --help."""
    flags = lesson_parser(doc or "", EMBEDDED_MODEL)
    flags.add_argument("--draft-model", default=str(EMBEDDED_DRAFT), help="folder or name of a smaller model")
    flags.add_argument("--drafts", type=whole_number(1, 16), default=3, help="tokens to guess, 1 to 16 (default: 3)")
    return flags
