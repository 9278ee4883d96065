"""Compute the state of lesson 07's widget: the speed-up from drafts, the batch sizes at which they
lose, and one step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from minivllm_lab.speculative_decoding.model_checks import speculation_error
from minivllm_lab.speculative_decoding.speculation import (
    NGRAM,
    RECORDED,
    Drafter,
    Speculation,
    conditional_rates,
    draft_model,
    eagle_head,
)
from minivllm_simulate.hardware import get_hardware
from minivllm_simulate.known_models import known_model
from widgets.speculative_decoding.step import Accept, Measured, VerifyStep, measured, verify_step

SIBLINGS = {
    "Llama-3.1-8B": ("Llama-3.2-1B", "Llama-3.2-3B"),
    "Meta-Llama-3-70B": ("Llama-3.2-1B", "Llama-3.1-8B"),
    "Qwen3-14B": ("Qwen3-0.6B", "Qwen3-8B"),
    "Qwen3-32B": ("Qwen3-0.6B", "Qwen3-8B"),
}
"""Models, each with two smaller ones of the same vocabulary that can draft for it."""
GPUS = ("L4", "RTX 4090", "A100-80", "H100", "H200", "B200", "MI300X")
BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
MOST_BATCH, MOST_K = BATCHES[-1], 8
CONTEXTS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
STEPS, SEED = 12, 21019
"""The steps that can be played, and what is added for their seeds, so that the first one shown reads as code."""
START = {
    "batch": 128, "k": 4, "alpha": 0.6, "recorded": "none", "drafter": "head", "context": 256, "model": "Llama-3.1-8B",
    "gpu": "H100", "step": 2,
}  # fmt: skip


@dataclass(frozen=True)
class State:
    """The results of a batch with k drafts per request, and without drafts."""

    batch: int
    k: int
    recorded: str
    """The method whose recorded acceptance is used, of RECORDED; "none" for a constant one."""
    drafter: str
    """ngram, head, parallel, small or large."""
    model: str
    gpu: str
    one: Speculation
    step: VerifyStep
    """One request's drafts and what became of them."""
    own: Measured | None
    """How the reader's `accept` behaves, if there is one."""
    error: float
    """The model's median error on published measurements."""

    @cached_property
    def speedup(self) -> float:
        """Return the speed-up over decoding without drafts."""
        return self.one.speedup(self.batch, self.k)

    @cached_property
    def tokens(self) -> float:
        """Return the mean number of tokens that a request gets per step."""
        return self.one.tokens(self.k)

    @cached_property
    def longer(self) -> float:
        """Return the time of a step with drafts divided by that of a plain step."""
        return self.one.step(self.batch, self.k).seconds / self.one.plain(self.batch).seconds

    @cached_property
    def most_batch(self) -> int:
        """Return how many requests fit into memory, which may exceed the axis."""
        return self.one.most_batch(self.k)

    @property
    def fits(self) -> bool:
        """Return whether all requests fit."""
        return self.batch <= self.most_batch

    @cached_property
    def losing(self) -> list[tuple[int, int]]:
        """Return the ranges of batch sizes at which drafts lose, within memory and the axis."""
        most = min(self.most_batch, MOST_BATCH)
        return self.one.losing(self.k, most) if most else []

    @property
    def best_k(self) -> int:
        """Return the best number of drafts at this batch size; 0 if none pays."""
        return self.one.best_k(self.batch, MOST_K)

    def best_speedup(self, batch: int) -> float:
        """Return the speed-up with the best number of drafts at a batch size; 1 if none pays."""
        return max(1.0, *(self.one.speedup(batch, k) for k in range(1, MOST_K + 1)))


def sweep(
    batch: int = START["batch"],
    k: int = START["k"],
    alpha: float = START["alpha"],
    recorded: str = START["recorded"],
    drafter: str = START["drafter"],
    context: int = START["context"],
    model: str = START["model"],
    gpu: str = START["gpu"],
    step: int = START["step"],
    accept: Accept | None = None,
) -> State:
    """Model a batch that decodes with drafts, and one step of one request.

    Args:
        batch: Requests that decode together, at the handle.
        k: Drafts for each request in a step.
        alpha: The chance that a draft is accepted if all before it were.
        recorded: A method of `RECORDED`, whose acceptances replace `alpha`.
        drafter: ngram, head, parallel, small or large.
        context: Tokens in each request.
        model, gpu: Names in `known_models` and `hardware`.
        step: The number of the animated step.
        accept: The reader's function of exercise 07.

    Raises:
        MinivllmError: The weights do not fit, or the reader's function returns no number of drafts.
    """
    rates = (alpha,) if recorded == "none" else RECORDED[recorded].rates
    setting = conditional_rates(rates, k), drafter == "ngram", SEED + step
    one, step_played = _speculation(model, gpu, drafter, rates, context), verify_step(*setting, accept)
    own = measured(*setting, accept) if accept else None
    return State(batch, k, recorded, drafter, model, gpu, one, step_played, own, speculation_error())


@lru_cache(maxsize=256)
def _speculation(model: str, gpu: str, drafter: str, rates: tuple[float, ...], context: int) -> Speculation:
    return Speculation.of(known_model(model), get_hardware(gpu), _drafter(model, gpu, drafter), rates, context)


@lru_cache(maxsize=256)
def _drafter(model: str, gpu: str, name: str) -> Drafter:
    hardware = get_hardware(gpu)
    if name == "ngram":
        return NGRAM
    if name in ("head", "parallel"):
        return eagle_head(known_model(model), hardware, parallel=name == "parallel")
    return draft_model(known_model(sibling(model, name)), hardware)


def sibling(model: str, drafter: str) -> str:
    """Return the model that drafts for `model`."""
    return SIBLINGS[model][drafter == "large"]
