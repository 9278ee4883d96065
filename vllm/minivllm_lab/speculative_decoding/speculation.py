"""The cost model of drafts: a step's tokens, its seconds, and the batch size at which drafts stop
paying. *Modelled*.

    model, gpu = known_model("Llama-3.1-8B"), get_hardware("H100")
    one = Speculation.of(model, gpu, eagle_head(model, gpu), (0.7,), context=1024)
    one.speedup(batch=8, k=3), one.break_even(k=3)

A step with k drafts is one forward pass over batch × (k + 1) positions, and the drafter's own
passes. Its cost is that of `levers`: weights and the contexts' keys and values are read once,
whatever k is, while operations grow with it. So the pass costs about as much as one without drafts
for as long as reading is the limit.

Requests decode all the time, each with the same context; prompts are left out. All steps are taken
to be captured as CUDA graphs, large ones too. The search of an n-gram proposer, on the host, is
taken to cost nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from operator import mul
from types import MappingProxyType
from typing import Literal, NamedTuple

from minivllm.config import ModelConfig
from minivllm_simulate.cost_model import StepShape
from minivllm_simulate.hardware import Hardware
from minivllm_simulate.layouts import BLOCK_SIZE
from minivllm_simulate.levers import SERVING, LeverCost
from minivllm_simulate.memory import memory_ledger, rotary_table_bytes, weight_bytes

PASS_OVERHEAD, VERIFY_OVERHEAD = 2.2e-4, 6.5e-4
"""Seconds beyond reading and arithmetic: of each of the drafter's passes (launch, sampling, the
next inputs), and of a step with drafts over one without (rejection sampling).
vllm-project/vllm#20780: Llama-3.1-8B with an EAGLE-1 head, one request, MT-bench: acceptance length
times TPOT is 7.72 ms + 0.73 ms a draft, for 2 to 7 drafts; and 7.07 ms without any, which is an
H100's. `minivllm_lab.speculative_decoding.model_checks` says how far the model is off on others.
"""
HEAD_VOCABULARY = 32_000
"""Tokens that an EAGLE-3 head drafts from: published heads know the most frequent ones only."""
MOST_BATCH = 1024
"""The largest batch that is looked at."""

Cause = Literal["draft", "compute", "wrong"]


class Recorded(NamedTuple):
    """Accepted drafts by position, counted in a run of `drafts` drafting steps with three drafts
    each.
    """

    drafts: int
    accepted: tuple[int, ...]

    @property
    def rates(self) -> tuple[float, ...]:
        """The share accepted at each position, among drafts whose predecessors were all accepted."""
        return tuple(kept / tried for tried, kept in pairwise((self.drafts, *self.accepted)))


RECORDED: Mapping[str, Recorded] = MappingProxyType(
    {
        "ngram": Recorded(372, (219, 186, 165)),
        "draft_model": Recorded(484, (273, 163, 99)),
        "eagle3": Recorded(198, (128, 101, 85)),
    }
)
"""Counts by vLLM's name of the method, from vLLM 0.32 with the embedded model, greedy answers of 64
tokens to 16 prompts, for EAGLE-3 to the first 8 of them. On these 8 the engine here counts the
same. Steps for which no n-gram matched have no drafts, and are not counted.
"""


def conditional_rates(rates: Sequence[float], k: int) -> tuple[float, ...]:
    """Return the acceptance of each of k drafts given that those before it were accepted; the last
    rate repeats.
    """
    return tuple(rates[min(index, len(rates) - 1)] for index in range(k))


def expected_tokens(rates: Sequence[float], k: int) -> float:
    """Return the mean number of tokens per step: the accepted drafts and one token of the model's
    own.

    For a constant acceptance α it is (1 - α^(k + 1)) / (1 - α), as in Leviathan et al. (arXiv
    2211.17192).
    """
    return 1.0 + sum(accumulate(conditional_rates(rates, k), mul))


class Drafter(NamedTuple):
    """The cost of drafts on the GPU; `cost` is None where they cost nothing."""

    method: str
    """vLLM's name: ngram, draft_model or eagle3."""
    cost: LeverCost | None = None
    parallel: bool = False
    """All k drafts come from one pass (vLLM's `parallel_drafting`), in place of one pass for
    each.
    """

    @property
    def weight_bytes(self) -> int:
        """Bytes of the drafter's weights, in addition to the target's."""
        return self.cost.roofline.weight_bytes if self.cost else 0

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the drafter's own cache per token of context."""
        return self.cost.roofline.kv_bytes_per_token if self.cost else 0

    def seconds(self, batch: int, k: int, context: int) -> float:
        """Return the seconds of k drafts for each request.

        The first pass takes in what the last step may have added, k + 1 positions per request; each
        further pass takes one draft.
        """
        if self.cost is None:
            return 0.0
        if self.parallel:
            return self.cost.seconds(_shape(batch, 2 * k, context))
        return self.cost.seconds(_shape(batch, k + 1, context)) + (k - 1) * self.cost.seconds(_shape(batch, 1, context))


NGRAM = Drafter("ngram")


def draft_model(model: ModelConfig, gpu: Hardware) -> Drafter:
    """Make a drafter from a second model with the same vocabulary, which runs k times."""
    return Drafter("draft_model", _drafting(_captured(model, gpu)))


def eagle_head(target: ModelConfig, gpu: Hardware, *, parallel: bool = False) -> Drafter:
    """Make an EAGLE-3 head: a layer as wide as the target's, whose attention takes two vectors, and
    an output layer.

    Its weights are the projection of three of the target's hidden states, the layer, and
    `HEAD_VOCABULARY` outputs; the embedding is the target's. In vLLM v0.33.0, it is
    `vllm/model_executor/models/llama_eagle3.py`.
    """
    hidden, mlp = target.hidden_size, target.intermediate_size
    queries, keys = (heads * target.head_dim for heads in (target.num_attention_heads, target.num_key_value_heads))
    parameters = hidden * (3 * hidden + 2 * (queries + 2 * keys) + queries + 3 * mlp + HEAD_VOCABULARY)
    return Drafter("eagle3", head_cost(target, gpu, parameters), parallel)


def head_cost(target: ModelConfig, gpu: Hardware, parameters: int) -> LeverCost:
    """Return the cost of a head with this many parameters in 16 bits and one layer of the target's
    attention.
    """
    whole, layers = _captured(target, gpu), target.num_hidden_layers
    roofline = replace(
        whole.roofline,
        weight_bytes=2 * parameters,
        vision_bytes=0.0,
        expert_bytes=0.0,
        kv_bytes_per_token=whole.roofline.kv_bytes_per_token // layers,
        flops_per_token=2.0 * parameters,
        flops_per_request=0.0,
        flops_per_pair=whole.roofline.flops_per_pair / layers,
    )
    return _drafting(replace(whole, roofline=roofline))


class StepParts(NamedTuple):
    """The seconds of a step by cause. `compute` is the time that operations take beyond reading the
    weights.
    """

    overhead: float
    weights: float
    compute: float
    attention: float
    draft: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return self.overhead + self.weights + self.compute + self.attention + self.draft


@dataclass(frozen=True)
class Speculation:
    """A target that verifies, a drafter, and the rates at which its drafts are accepted."""

    target: LeverCost
    drafter: Drafter
    rates: tuple[float, ...]
    """Conditional acceptance by position; the last one holds for all that follow."""
    context: int
    """Tokens that each request has when the step begins."""
    kv_bytes: int
    """Bytes that weights leave for the caches of both; without a drafter, there are
    `drafter.weight_bytes` more.
    """
    verify_overhead: float = VERIFY_OVERHEAD

    @classmethod
    def of(
        cls, model: ModelConfig, gpu: Hardware, drafter: Drafter, rates: Sequence[float], context: int
    ) -> Speculation:
        """Set up `model` as the target on one `gpu`, with this drafter.

        Raises:
            MinivllmError: both models' weights do not fit.
        """
        return cls(
            _captured(model, gpu), drafter, tuple(rates), context, _kv_bytes(model, gpu, drafter.weight_bytes, context)
        )

    # ---- tokens and seconds

    def tokens(self, k: int) -> float:
        """Return the mean number of tokens that a request gets from a step with k drafts."""
        return expected_tokens(self.rates, k)

    def plain(self, batch: int) -> StepParts:
        """Return the parts of a step without drafts."""
        return self._parts(batch, 1)

    def step(self, batch: int, k: int) -> StepParts:
        """Return the parts of a step with k drafts for each request: the drafter's passes, then
        the verification.
        """
        parts, draft = self._parts(batch, k + 1), self.drafter.seconds(batch, k, self.context)
        return parts._replace(overhead=parts.overhead + self.verify_overhead, draft=draft)

    def speedup(self, batch: int, k: int) -> float:
        """Return the speed relative to decoding without drafts at this batch size; below 1, drafts
        lose.
        """
        return self.tokens(k) * self.plain(batch).seconds / self.step(batch, k).seconds

    def best_k(self, batch: int, most: int = 8) -> int:
        """Return the number of drafts that is fastest at this batch size, up to `most`; 0 if none
        pays.
        """
        best = max(range(1, most + 1), key=lambda k: self.speedup(batch, k))
        return best if self.speedup(batch, best) > 1 else 0

    def cause(self, batch: int, k: int) -> Cause | None:
        """Return why drafts lose at this batch size, or None where they do not.

        "wrong" means that they would lose even if drafts and the verification's operations were
        free. Otherwise it is the larger of the time that drafting takes and the time that
        operations add to a plain step.
        """
        step, plain = self.step(batch, k), self.plain(batch)
        lost = step.seconds - self.tokens(k) * plain.seconds
        if lost <= 0:
            return None
        added = step.compute - plain.compute
        if lost > step.draft + added:
            return "wrong"
        return "draft" if step.draft > added else "compute"

    # ---- batches

    def most_batch(self, k: int) -> int:
        """Return how many requests of `context` tokens and k drafts fit beside the drafter, or 0 if
        none does.
        """
        per_token = self.target.roofline.kv_bytes_per_token + self.drafter.kv_bytes_per_token
        return _requests(self.kv_bytes, per_token, self.context + k + 1)

    @cached_property
    def most_plain_batch(self) -> int:
        """The largest batch that fits without a drafter."""
        return _requests(
            self.kv_bytes + self.drafter.weight_bytes, self.target.roofline.kv_bytes_per_token, self.context + 1
        )

    def losing(self, k: int, most: int = MOST_BATCH) -> list[tuple[int, int]]:
        """Return the ranges of batch sizes (first, last), up to `most`, at which drafts lose.

        Drafts may lose at small batches too, where a drafter's passes are long compared with the
        target's.
        """
        places = sorted({*_BATCHES, most})
        signs = [(batch, self.speedup(batch, k) < 1) for batch in places if batch <= most]
        ranges, start = [], 1 if signs[0][1] else 0
        for (low, before), (high, after) in pairwise(signs):
            if before == after:
                continue
            edge = self._edge(low, high, k)
            if after:
                start = edge
            else:
                ranges.append((start, edge - 1))
                start = 0
        return [*ranges, (start, most)] if start else ranges

    def break_even(self, k: int, most: int = MOST_BATCH) -> int | None:
        """Return the batch size, up to `most`, above which drafts always lose, or None if there is
        none.
        """
        lost = self.losing(k, most)
        return lost[-1][0] if lost and lost[-1][1] == most else None

    def _edge(self, low: int, high: int, k: int) -> int:
        """Find, by bisection, the first batch above `low` at which drafts win or lose as they do at
        `high`.
        """
        lost = self.speedup(high, k) < 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if (self.speedup(middle, k) < 1) == lost else (middle, high)
        return high

    def _parts(self, batch: int, positions: int) -> StepParts:
        cost, shape = self.target, _shape(batch, positions, self.context)
        verified = shape._replace(num_reqs=shape.num_tokens)  # the head computes logits at every position
        weights = cost.weight_seconds(shape.num_tokens)
        return StepParts(
            overhead=cost.roofline.step_overhead,
            weights=weights,
            compute=cost.linear_seconds(verified) - weights,
            attention=cost.attention_seconds(shape),
        )


_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


def _shape(batch: int, positions: int, context: int) -> StepShape:
    """Return the shape of a step in which each request computes `positions` tokens after
    `context`.
    """
    shape = StepShape.of([(positions, context)])
    return StepShape(batch, batch * shape.num_tokens, batch * shape.num_keys, batch * shape.num_pairs)


def _requests(kv_bytes: int, per_token: int, tokens: int) -> int:
    return kv_bytes // (-(-tokens // BLOCK_SIZE) * BLOCK_SIZE * per_token)


def _kv_bytes(model: ModelConfig, gpu: Hardware, drafter_bytes: int, context: int) -> int:
    weights = weight_bytes(model) + rotary_table_bytes(model) + drafter_bytes
    return memory_ledger(model, gpu, max_model_len=context, weights=weights, check=False).kv_bytes


def _captured(model: ModelConfig, gpu: Hardware) -> LeverCost:
    return replace(LeverCost.of(SERVING, model, gpu), host_seconds=0.0)


def _drafting(cost: LeverCost) -> LeverCost:
    return replace(cost, roofline=replace(cost.roofline, step_overhead=PASS_OVERHEAD))
