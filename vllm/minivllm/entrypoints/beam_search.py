"""Beam search on top of ordinary requests: each step of the search is a request of one token for
each open sequence.

Nothing is forked. A sequence's request finds the full blocks of its parent in the prefix cache, so
it computes at most one block of tokens.

In vLLM v0.33.0: `vllm/entrypoints/generate/beam_search/offline.py`
(`BeamSearchOfflineMixin.beam_search`). The mechanism on block tables of its own is in lesson 02,
`minivllm_lab.paged_attention.beam_search`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from minivllm.core.lora_request import LoRARequest
from minivllm.engine.llm_engine import LLMEngine
from minivllm.inputs import TokensPrompt
from minivllm.outputs import BeamSearchOutput, BeamSearchSequence, Logprob, RequestOutput
from minivllm.sampling_params import BeamSearchParams, SamplingParams

Row = tuple[Any, SamplingParams, int, LoRARequest | None]
"""A prompt, its parameters, its priority and its adapter."""


@dataclass
class Search:
    """The sequences of one prompt, open and ended. `steps` is the number of steps left."""

    prompt: TokensPrompt
    priority: int
    steps: int
    lora_request: LoRARequest | None = None
    going_on: list[BeamSearchSequence] = field(default_factory=list)
    ended: list[BeamSearchSequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        # A search begins with one sequence: the prompt.
        self.going_on = [BeamSearchSequence(self.prompt, list(self.prompt["prompt_token_ids"]), [], self.lora_request)]

    def open(self) -> list[BeamSearchSequence]:
        """Return the sequences to extend."""
        return self.going_on if self.steps > 0 else []


class BeamSearcher:
    """A beam search over several prompts at once. The model's end-of-sequence tokens end a
    sequence, unless the parameters ignore them.
    """

    def __init__(
        self, params: BeamSearchParams, engine: LLMEngine, run: Callable[[list[Row]], list[RequestOutput]]
    ) -> None:
        """Take the engine, whose model has limits, and the function that completes prompts."""
        self._params = params
        self._ends = frozenset(() if params.ignore_eos else engine.generation_config.eos_token_ids)
        self._allowed = None if params.allowed_token_ids is None else frozenset(params.allowed_token_ids)
        # Twice the width: even if half of a sequence's candidates end, enough go on. All, if some
        # may not be taken.
        num_candidates = -1 if self._allowed is not None else min(2 * params.beam_width, engine.model_config.vocab_size)
        self._sampling_params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=num_candidates, detokenize=False)
        self._max_model_len = engine.input_processor.limits.max_model_len
        self._run = run

    def search(self, rows: Sequence[Row], after_step: Callable[[int], object]) -> list[BeamSearchOutput]:
        """Return the best sequences of each row's prompt, without text."""
        searches = [Search(prompt, priority, self._num_steps(prompt), adapter) for prompt, _, priority, adapter in rows]
        for _ in range(self._params.max_tokens):
            # Every sequence has ended, or there is no room for another token.
            if not any(search.open() for search in searches):
                break
            self._step(searches)
            after_step(1)
        return [self._best(search) for search in searches]

    def _num_steps(self, prompt: TokensPrompt) -> int:
        room = self._max_model_len - len(prompt["prompt_token_ids"])
        return min(self._params.max_tokens, max(1, room))  # without room, the engine refuses the prompt

    def _step(self, searches: Sequence[Search]) -> None:
        """Extend every open sequence by one token, and keep the best of each prompt's children."""
        rows: list[Row] = [
            (_prompt_of(sequence), self._sampling_params, search.priority, search.lora_request)
            for search in searches
            for sequence in search.open()
        ]
        # All open sequences of all prompts in one call, so that they share the steps of the engine.
        outputs = iter(self._run(rows))
        for search in searches:
            children = [
                child for sequence in search.open() for child in self._children(sequence, _logprobs_of(next(outputs)))
            ]
            if search.open():
                search.steps -= 1
                # An ended sequence keeps its score and takes no place in the beam.
                search.ended += [child for child in children if child.finish_reason == "stop"]
                unfinished = [child for child in children if child.finish_reason is None]
                search.going_on = sorted(unfinished, key=self._score, reverse=True)[: self._params.beam_width]

    def _children(self, parent: BeamSearchSequence, logprobs: dict[int, Logprob]) -> list[BeamSearchSequence]:
        return [
            BeamSearchSequence(
                parent.orig_prompt,
                [*parent.tokens, token],
                [*parent.logprobs, logprobs],
                parent.lora_request,
                cum_logprob=parent.cum_logprob + candidate.logprob,
                finish_reason="stop" if token in self._ends else None,
            )
            for token, candidate in logprobs.items()
            if self._allowed is None or token in self._allowed
        ]

    def _score(self, sequence: BeamSearchSequence) -> float:
        # Without the division short sequences would always win: each token lowers the sum.
        return sequence.cum_logprob / max(1, len(sequence.logprobs)) ** self._params.length_penalty

    def _best(self, search: Search) -> BeamSearchOutput:
        for sequence in search.going_on:
            sequence.finish_reason = "length"
        sequences = sorted([*search.ended, *search.going_on], key=self._score, reverse=True)
        return BeamSearchOutput(sequences[: self._params.beam_width])


def _prompt_of(sequence: BeamSearchSequence) -> TokensPrompt:
    assert isinstance(sequence.orig_prompt, dict)
    return {**sequence.orig_prompt, "prompt_token_ids": sequence.tokens}  # type: ignore[return-value]


def _logprobs_of(output: RequestOutput) -> dict[int, Logprob]:
    [logprobs] = output.outputs[0].logprobs or [None]
    assert logprobs is not None
    return logprobs
