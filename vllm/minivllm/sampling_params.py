"""The sampling parameters of one request: how its tokens are drawn, and when it stops. No torch.

In vLLM v0.33.0: `vllm/sampling_params.py` (`SamplingParams`, `RequestOutputKind`). Fields have
vLLM's names and defaults.
"""

from collections.abc import Mapping, Sequence, Set
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from enum import Enum
from typing import Annotated, Any

from minivllm.config import StructuredOutputsParams
from minivllm.config.checks import (
    CountOrZero,
    Rule,
    at_least,
    check_fields,
    checked_arguments,
    encodable,
    is_count,
    is_number,
    require,
)

MIN_TEMPERATURE = 1e-2
"""Temperatures between 0 and this are raised to it, because dividing logits by smaller ones can
overflow.
"""
MAX_TEMPERATURE = 2.0
MAX_N = 16384
"""Completions per prompt. Each is a separate request, so a mistyped, huge `n` would never get
started.
"""
MAX_LOGIT_BIAS = 100.0


class RequestOutputKind(Enum):
    """The contents of a stream's outputs: everything so far, only what is new, or a single output
    at the end.
    """

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


def _are_token_ids(value: object) -> bool:
    return isinstance(value, Sequence | Set | Mapping) and all(is_count(token, 0) for token in value)


def _are_words(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(w, str) and w for w in value)


def _is_transfer(item: tuple[str, Any]) -> bool:
    return item[0] == "kv_transfer_params" and isinstance(item[1], Mapping | None)


def _between(least: float, most: float, meaning: str, reported: bool = False) -> Rule:
    return Rule(lambda value: is_number(value) and least <= value <= most, meaning, reported)


TOKEN_IDS = Rule(_are_token_ids, "token ids: whole numbers, 0 or more", reported=True)
WORDS = Rule(_are_words, "a list of strings, none of them empty")
LOGPROBS = Rule(
    lambda value: is_count(value, -1),
    "0 or more, -1 for the whole vocabulary, or None",
    reported=True,
)
N = Rule(lambda value: is_count(value, 1) and value <= MAX_N, f"a whole number from 1 to {MAX_N}")
MAX_TOKENS = at_least(1)._replace(meaning="at least 1, or None for all that fit", reported=True)
SEED = Rule(lambda value: isinstance(value, int) and not isinstance(value, bool), "a whole number, or None")
TEMPERATURE = _between(0.0, MAX_TEMPERATURE, "from 0 (greedy) to 2", reported=True)
TOP_P = Rule(
    lambda value: is_number(value) and 0.0 < value <= 1.0,
    "above 0 and at most 1 (1: off)",
    reported=True,
)
TOP_K = at_least(0)._replace(meaning="at least 1, or 0 or -1 for off")
REPETITION_PENALTY = _between(1e-6, 1e6, "above 0 (1: off), from 1e-06 to 1000000")
STOP = Rule(
    lambda value: _are_words([value] if isinstance(value, str) else value),
    "a string or a list of strings, none of them empty",
)
KIND = Rule(lambda value: isinstance(value, RequestOutputKind), "a RequestOutputKind")
LOGIT_BIAS = Rule(
    lambda value: isinstance(value, Mapping) and all(map(is_number, value.values())),
    "a mapping of token ids to numbers",
)
CONSTRAINT = Rule(lambda value: isinstance(value, StructuredOutputsParams), "StructuredOutputsParams(…)")
EXTRA_ARGS = Rule(
    lambda value: isinstance(value, Mapping) and all(map(_is_transfer, value.items())),
    'a dictionary with the only supported key, {"kv_transfer_params": {…}}',
    reported=True,
)
Penalty = Annotated[float, _between(-2.0, 2.0, "between -2 and 2 (0: off)")]
TokenIds = Annotated[Sequence[int], TOKEN_IDS]
NOT_EMPTY = Rule(lambda value: len(value) > 0, "one token id or more", reported=True)


@checked_arguments
@dataclass(kw_only=True, slots=True)
class SamplingParams:
    """Settings for sampling one request. An invalid value raises a `MinivllmError` that says which
    values are valid.

    Fields may be assigned. They are checked when the object is created, and again when a request
    uses it. The engine works on its own copy, so a later assignment affects only later requests.

    - `n`: number of completions of the prompt.
    - `temperature`: divides the logits; at most 2, and 0 is greedy sampling. `top_k`: sample from
      the k most likely tokens (0 or -1: all). `top_p`: sample from the smallest set of most likely
      tokens whose probabilities sum to at least this. `min_p`: drop tokens whose probability is
      below this fraction of the most likely token's.
    - `presence_penalty`, `frequency_penalty`: subtracted from the logit of each token already
      generated, once or once per occurrence. `repetition_penalty`: divides positive logits and
      multiplies negative ones, for every token of the prompt and the output.
    - `logit_bias`: added to the logits of these token ids, clamped to ±100. `allowed_token_ids`: no
      other token can be sampled. `bad_words`: never generated, with or without a leading space.
    - `seed`: the same seed gives the same tokens, whatever else is in the batch; -1 or None picks a
      random one. Completion i of n uses `seed + i`. (Logits may be rounded differently in another
      batch shape or on another device; that changes a token only where two candidates were nearly
      tied.)
    - `max_tokens`: maximum tokens to generate (None: up to the model's length). `min_tokens`:
      until this many are generated, neither stop tokens nor the end-of-sequence token are sampled,
      even with `ignore_eos`.
    - `stop`: strings to look for in the generated text, which is cut before them
      (`include_stop_str_in_output`: after them). `stop_token_ids` end the request like the
      end-of-sequence token, which `ignore_eos` turns off.
    - `logprobs`: how many of the most likely tokens to return log probabilities for at each
      position, besides the chosen token; -1 for the whole vocabulary; True counts as 1.
      `prompt_logprobs`: the same for the prompt. They are the model's raw log probabilities, before
      temperature, penalties and bias. With `structured_outputs`, those of the output come after the
      grammar's mask, as in vLLM: a token that does not fit has minus infinity (-9999 over HTTP),
      and the others share its probability.
    - `structured_outputs`: what the text must conform to (`StructuredOutputsParams`). Tokens that
      do not fit are not sampled; the request ends where its grammar does.
    - `detokenize`: if False, no text is produced. `skip_special_tokens`: leave special tokens out
      of the text.
    - `output_kind`: applies to streams; `LLM.generate` returns final outputs.
    - `skip_reading_prefix_cache`: compute the whole prompt, though some of it may be cached.
    - `extra_args`: {"kv_transfer_params": {…}} is what the KV connector is told about the request.

    The engine, which knows the model and the tokenizer, fills in `all_stop_token_ids` and
    `bad_words_token_ids`.
    """

    n: Annotated[int, N] = 1
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, REPETITION_PENALTY] = 1.0
    temperature: Annotated[float, TEMPERATURE] = 1.0
    top_p: Annotated[float, TOP_P] = 1.0
    top_k: Annotated[int, TOP_K] = 0
    min_p: Annotated[float, _between(0.0, 1.0, "between 0 (off) and 1")] = 0.0
    seed: Annotated[int, SEED] | None = None
    stop: Annotated[str | Sequence[str], STOP] | None = None
    stop_token_ids: TokenIds | None = None
    bad_words: Annotated[Sequence[str], WORDS] | None = None
    ignore_eos: bool = False
    max_tokens: Annotated[int, MAX_TOKENS] | None = 16
    min_tokens: CountOrZero = 0
    logprobs: Annotated[int, LOGPROBS] | None = None
    prompt_logprobs: Annotated[int, LOGPROBS] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: Annotated[RequestOutputKind, KIND] = RequestOutputKind.CUMULATIVE
    logit_bias: Annotated[Mapping[int, float], LOGIT_BIAS, TOKEN_IDS] | None = None
    allowed_token_ids: Annotated[TokenIds, NOT_EMPTY] | None = None
    structured_outputs: Annotated[StructuredOutputsParams, CONSTRAINT] | None = None
    skip_reading_prefix_cache: bool | None = None
    extra_args: Annotated[Mapping[str, Any], EXTRA_ARGS] | None = None
    all_stop_token_ids: frozenset[int] = frozenset()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        self._normalize()
        check_fields(self)
        for name, texts in (("a stop string", self.stop_strings), ("a bad word", self.bad_words)):
            for text in texts or ():
                encodable(text, name)
        self._check_combinations()

    @property
    def is_greedy(self) -> bool:
        """Return whether the most likely token is always taken, without randomness."""
        return self.temperature == 0.0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple; empty if there are no stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def clone(self) -> "SamplingParams":
        """Return a copy that shares no containers with this one; its values are checked again."""
        containers = ("stop", "stop_token_ids", "bad_words", "logit_bias", "allowed_token_ids")
        copies = {name: copy(getattr(self, name)) for name in containers}
        return replace(
            self, **copies, structured_outputs=deepcopy(self.structured_outputs), extra_args=deepcopy(self.extra_args)
        )

    def child(self, index: int) -> "SamplingParams":
        """Return the parameters of completion `index` of `n`: `n=1` and its own seed."""
        return replace(self, n=1, seed=None if self.seed is None else self.seed + index)

    def _normalize(self) -> None:
        if is_number(self.top_k) and self.top_k == -1:
            self.top_k = 0
        if is_number(self.seed) and self.seed == -1:
            self.seed = None
        self.logprobs = 1 if self.logprobs is True else self.logprobs
        self.prompt_logprobs = 1 if self.prompt_logprobs is True else self.prompt_logprobs
        if is_number(self.temperature) and self.temperature > 0.0:
            self.temperature = max(self.temperature, MIN_TEMPERATURE)
        if isinstance(self.logit_bias, Mapping) and all(map(is_number, self.logit_bias.values())):
            self.logit_bias = {
                token: max(-MAX_LOGIT_BIAS, min(MAX_LOGIT_BIAS, bias)) for token, bias in self.logit_bias.items()
            }

    def _check_combinations(self) -> None:
        require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens})",
        )
        require(
            not self.is_greedy or self.n == 1,
            f"n is {self.n} with temperature 0: greedy completions are all the same. Use n=1, or a temperature above 0",
        )
        require(
            self.detokenize or not self.stop_strings,
            "stop strings are looked for in the text, so they need detokenize=True; use stop_token_ids without it",
        )
