"""Lesson 07's measurements, its figure and its command line; the proofs of its
kernels and of the rule are in `exactness`.

Each `measure_*` or `count_*` function measures, prints its table and returns its figures; the
callables that it takes are the lesson's own code.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise, zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minivllm.config import EMBEDDED_DRAFT
from minivllm.core.stats import SpecDecodingStats
from minivllm.errors import MinivllmError
from minivllm.models.decoder import Decoder
from minivllm.models.loader import load_model
from minivllm.models.tokenizer import load_tokenizer
from minivllm_lab.cli import lesson_parser, whole_number
from minivllm_lab.corpus import first_passages, held_out_texts
from minivllm_lab.pictures import palette
from minivllm_lab.pictures.figures import SMALL_TEXT, panels
from minivllm_lab.progress import track
from minivllm_lab.speculative_decoding.cached_model import CachedModel
from minivllm_lab.speculative_decoding.drafted_engine import answers_with_errors, drafted_engine, serve_with_drafts
from minivllm_lab.tables import Timed, closing, console, heading, record_table
from minivllm_lab.timing import in_turns

PROMPT_TOKENS, OUTPUT_TOKENS, MAX_MODEL_LEN = 128, 64, 256
ACCEPTANCE = 0.7
"""Share of right drafts where it is given."""
TEMPERATURES = (0.0, 0.5, 1.0, 1.5)


def load_models(target: str, draft: str, device: torch.device) -> tuple[Decoder, Decoder]:
    """Load both models in float32.

    Raises:
        MinivllmError: one cannot be loaded, or their vocabularies differ.
    """
    models = [load_model(path, device, torch.float32)[0] for path in (target, draft)]
    sizes = [model.config.vocab_size for model in models]
    if sizes[0] != sizes[1]:
        raise MinivllmError(f"--draft-model has {sizes[1]:,} tokens and --model {sizes[0]:,}: they must be the same")
    return models[0], models[1]


def held_out_prompts(model: str, count: int, length: int = PROMPT_TOKENS) -> list[list[int]]:
    """Take `length` tokens from the middle of each of `count` texts that the embedded models were
    not trained on.

    Raises:
        MinivllmError: there are too few texts; see `first_passages`.
    """
    tokenizer = load_tokenizer(model)
    texts = [tokenizer.encode(text[:20_000]).ids for text in held_out_texts()]
    return first_passages([ids[len(ids) // 2 :] for ids in texts if len(ids) // 2 >= 2 * length], count, length)


# ---- 1. what a draft costs ------------------------------------------------------------------------


def measure_draft_cost(models: Sequence[Decoder], device: torch.device) -> float:
    """Time a token of the draft model in units of a target pass, for one request with 128 tokens of
    context.
    """
    heading("1. What a draft costs")

    def act(model: CachedModel) -> None:
        model.length = PROMPT_TOKENS
        model.forward([1])

    cached = [CachedModel(model, MAX_MODEL_LEN) for model in models]
    passes = {str(index): partial(act, model) for index, model in enumerate(cached)}
    target, draft = (statistics.median(times) for times in in_turns(passes, 100, device).values())
    console.print(f"A pass of the draft model takes {draft / target:.2f} of one of the target.")
    return draft / target


# ---- 2. guess, verify, keep ----------------------------------------------------------------------


def count_family(
    methods: Mapping[str, Callable[[CachedModel, list[int], int], Any]], target: Decoder, prompts: Sequence[list[int]],
    expected_tokens: Callable[[float, int], float], arguments: argparse.Namespace,
) -> dict:  # fmt: skip
    """Count passes and accepted drafts of each method on the same greedy prompts; the first method
    has no drafts.

    Raises:
        AssertionError: a method changes a token.
    """
    heading("2. Guess, verify, keep")
    results, answers, tokens = {}, [], 16 if arguments.quick else OUTPUT_TOKENS
    for name, method in track(methods.items(), "guessing"):
        runs = [method(CachedModel(target, MAX_MODEL_LEN), prompt, tokens) for prompt in prompts]
        answers = answers or [run.tokens for run in runs]
        assert [run.tokens for run in runs] == answers, f"{name}: the text differs from that without drafts"
        results[name] = counted([run.stats for run in runs])
        results[name]["tokens_per_pass"] = len(prompts) * tokens / sum(run.passes for run in runs)
        if results[name]["drafts"]:
            results[name]["formula"] = expected_tokens(results[name]["alpha"], len(results[name]["rates"]))
    record_table(
        f"{len(prompts)} held-out texts, {tokens} tokens of each, greedy: the same tokens each time",
        results,
        "method {name} | tokens a pass {tokens_per_pass:.2f} | guesses {drafts} | first draft {alpha:.2f} | "
        "length {length:.2f} | by formula {formula:.2f}",
        "First draft: how often it was accepted. Length: tokens of a pass that had drafts.",
    )
    return results


def counted(stats: Sequence[SpecDecodingStats]) -> dict:
    """Add up drafts and accepted drafts by position; return them with conditional rates and the
    mean acceptance length.
    """
    drafts = sum(each.num_drafts for each in stats)
    by_position = zip_longest(*(each.num_accepted_tokens_per_pos for each in stats), fillvalue=0)
    accepted = [sum(counts) for counts in by_position]
    rates = [after / before if before else 0.0 for before, after in pairwise([drafts, *accepted])]
    length = 1 + sum(accepted) / max(1, drafts)
    return {"drafts": drafts, "accepted": accepted, "rates": rates, "alpha": [*rates, 0.0][0], "length": length}


# ---- 5. when it pays -----------------------------------------------------------------------------


def wrong_drafts(vocab_size: int, count: int, seed: int) -> Callable[[str, int], list[int]]:
    """Return a function that drafts random tokens, which are hardly ever right."""
    draw = random.Random(seed)
    return lambda _name, _num_output_tokens: [draw.randrange(vocab_size) for _ in range(count)]


def random_prompts(count: int, vocab_size: int, seed: int, length: int = 32) -> list[list[int]]:
    """Draw the token ids of prompts that share no prefix."""
    draw = random.Random(seed)
    return [[draw.randrange(vocab_size) for _ in range(length)] for _ in range(count)]


def measure_batches(arguments: argparse.Namespace, device: torch.device, speed_up: Callable[..., float]) -> dict:
    """Verify drafts with a known acceptance rate; by batch size, compare the formulas' prediction
    with the engine's tokens per second.
    """
    heading("5. When it pays")
    k, tokens, turns = arguments.drafts, *((16, 1) if arguments.quick else (40, 3))
    results: dict[str, dict] = {}
    for batch in track((1, 4) if arguments.quick else (1, 2, 4, 8, 16, 32, 64, 128), "verifying"):
        core = drafted_engine(arguments.model, device, num_speculative_tokens=k, max_num_seqs=batch)
        prompts = random_prompts(batch, core.model_config.vocab_size, arguments.seed)
        wrong = wrong_drafts(core.model_config.vocab_size, k, arguments.seed)
        serve_with_drafts(core, prompts, 8, wrong)  # to warm up
        alone = serve_with_drafts(core, prompts, tokens + k).outputs
        ways = {"plain": None, "wrong": wrong, "given": answers_with_errors(alone, ACCEPTANCE, k, arguments.seed)}
        runs = [
            {name: serve_with_drafts(core, prompts, tokens, way) for name, way in ways.items()} for _ in range(turns)
        ]
        cost = statistics.median(run["wrong"].step_seconds / run["plain"].step_seconds for run in runs)
        outputs = runs[0]["given"].outputs
        results[str(batch)] = {
            "cost": cost,
            "free": speed_up(ACCEPTANCE, k),
            "predicted": speed_up(ACCEPTANCE, k, verify_cost=cost),
            "measured": statistics.median(run["given"].throughput / run["plain"].throughput for run in runs),
            "wrong": 1 / cost,
            "length": runs[0]["given"].acceptance_length,
            "same": statistics.mean(outputs[name] == answer[:tokens] for name, answer in alone.items()),
        }
    edges = {
        name: break_even({int(b): each[name] for b, each in results.items()}) for name in ("predicted", "measured")
    }
    record_table(
        f"{k} drafts of which {ACCEPTANCE:.0%} are right, with free drafting",
        results,
        "requests {name} | a step costs {cost:.2f} | speed-up if it cost 1 {free:.2f} × | "
        "with that cost {predicted:.2f} × | measured {measured:.2f} × | all drafts wrong {wrong:.2f} × | "
        "same texts {same:.0%}",
        f"Break-even: predicted {shown_edge(edges['predicted'])}, measured {shown_edge(edges['measured'])}.",
    )
    return {"batches": results, "break_even": edges}


def break_even(speed_ups: Mapping[int, float]) -> float | None:
    """Return the batch at which the speed-up falls below 1, interpolated between measured ones, or
    None if it never does.
    """
    for (small, above), (large, below) in pairwise(sorted(speed_ups.items())):
        if above >= 1 > below:
            return small * (large / small) ** ((above - 1) / (above - below))
    return None


def shown_edge(batch: float | None) -> str:
    """Describe a break-even batch in words."""
    return "at none of these" if batch is None else f"at {batch:.0f} requests"


# ---- 6. break it ---------------------------------------------------------------------------------


def measure_temperature(
    target: Decoder, draft: Decoder, prompts: Sequence[list[int]], distribution: Callable[[Tensor, float], np.ndarray]
) -> dict:
    """Measure the draft's acceptance along held-out texts, by temperature: drawn from q, and its
    most likely token.
    """
    heading("6. Break it")
    rates: dict[str, dict[str, list[float]]] = {
        kind: {str(t): [] for t in TEMPERATURES} for kind in ("kept", "likeliest")
    }
    for prompt in track(prompts, "reading"):
        logits = [CachedModel(model, MAX_MODEL_LEN).forward(prompt) for model in (target, draft)]
        likeliest = logits[1].argmax(-1).cpu().numpy()
        for t in TEMPERATURES:
            p, q = (distribution(rows, t) for rows in logits)
            rates["kept"][str(t)] += np.minimum(p, q).sum(-1).tolist()
            rates["likeliest"][str(t)] += p[np.arange(len(p)), likeliest].tolist()
    means = {kind: {t: statistics.mean(each) for t, each in by_t.items()} for kind, by_t in rates.items()}
    record_table(
        "Acceptance of the draft model's first draft",
        {"drawn from q, q kept": {"t": means["kept"]}, "its likeliest token": {"t": means["likeliest"]}},
        {"drafts": "{name}", **{f"T = {t:g}": f"{{t[{t}]:.2f}}" for t in TEMPERATURES}},
    )
    return means


# ---- the whole lesson ----------------------------------------------------------------------------


def close(results: dict, disturbance: str) -> None:
    """Print the conclusions; `disturbance` says what else kept the machine busy, if anything."""
    family, rules, pays = results["family"], results["exact"]["rules"], results["batches"]
    ngram, draft = family["n-gram"], family["draft model"]
    few, many = (end(pays["batches"], key=int) for end in (min, max))
    wrong = [name for name, record in rules.items() if record["p"] < 1e-3]
    closing(
        f"The same text in fewer passes: {ngram['tokens_per_pass']:.2f} tokens a pass with n-grams, "
        f"{draft['tokens_per_pass']:.2f} with a draft model. An n-gram guess yields {ngram['length']:.2f} "
        f"tokens, and the formula gives {ngram['formula']:.2f}.",
        f"{results['exact']['rounds']:,} rounds tell the exact rule from {len(wrong)} wrong ones: {', '.join(wrong)}.",
        Timed(
            f"Drafts of which {ACCEPTANCE:.0%} are right: {pays['batches'][few]['measured']:.2f} × as fast for one "
            f"request, {pays['batches'][many]['measured']:.2f} × for {many}. Break-even was predicted "
            f"{shown_edge(pays['break_even']['predicted'])}, and measured {shown_edge(pays['break_even']['measured'])}."
        ),
        disturbance=disturbance,
    )


def draw(results: dict, path: str) -> None:
    """Plot what a step with drafts costs and yields, and the speed-up that follows, both over the
    batch and of the same measurement.
    """
    batches = results["batches"]["batches"]
    requests = [int(batch) for batch in batches]
    curves_of = (
        (("free", "tokens that it yields", ":", palette.INK), ("cost", "time that it takes", "o-", palette.BLUE)),
        (("predicted", "yield over time", "s--", palette.PURPLE), ("measured", "measured", "o-", palette.VERMILLION)),
    )
    with panels(path, 2) as both:
        for axes, drawn in zip(both, curves_of, strict=True):
            for name, title, style, colour in drawn:
                axes.plot(requests, [each[name] for each in batches.values()], style, color=colour, label=title)
            axes.axhline(1.0, color=palette.GREY, linewidth=1)
            axes.set_xscale("log", base=2)
            axes.set_xticks(requests, list(batches), fontsize=SMALL_TEXT)
            axes.set(xlabel="requests in the batch", ylim=(0, 2.9))
            axes.legend(fontsize=SMALL_TEXT, loc="lower right" if axes is both[0] else "lower left")
        both[0].set(title="A step with three drafts", ylabel="times a step without drafts")
        both[1].set(title="Speed-up by three drafts", ylabel="times as fast as without drafts")


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Add the lesson's own flags to the common ones; --help shows `doc`."""
    flags = lesson_parser(doc)
    flags.add_argument("--draft-model", default=str(EMBEDDED_DRAFT), help="folder or name of a smaller model")
    flags.add_argument("--drafts", type=whole_number(1, 16), default=3, help="tokens to guess, 1 to 16 (default: 3)")
    return flags
