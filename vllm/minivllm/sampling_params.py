"""The sampling parameters of one request: how its tokens are drawn, and when it stops. No torch.

In vLLM v0.33.0: `vllm/sampling_params.py` (`SamplingParams`, `BeamSearchParams`,
`RequestOutputKind`). Fields have vLLM's names and defaults.
"""

from collections.abc import Mapping, Sequence, Set
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from minivllm.config import StructuredOutputsParams
from minivllm.config.checks import (
    checked_arguments,
    encodable,
    is_count,
    is_number,
    require,
    require_counts,
    require_flags,
)

MIN_TEMPERATURE = 1e-2
"""Temperatures between 0 and this are raised to it, because dividing logits by smaller ones can
overflow.
"""
MAX_TEMPERATURE = 2.0
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-6, 1e6
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

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    skip_reading_prefix_cache: bool | None = None
    extra_args: Mapping[str, Any] | None = None
    all_stop_token_ids: frozenset[int] = frozenset()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        self._normalize()
        self._check_counts()
        self._check_distribution()
        self._check_stops()
        self._check_token_ids()
        self._check_extra_args()
        require(
            self.structured_outputs is None or isinstance(self.structured_outputs, StructuredOutputsParams),
            f"structured_outputs is {self.structured_outputs!r}; it must be StructuredOutputsParams(…)",
        )

    @classmethod
    def from_optional(cls, **params: Any) -> "SamplingParams":
        """Create parameters where None means the default, and the keys of `logit_bias` may be
        numeric strings.

        Raises:
            MinivllmError: a value is invalid.
        """
        bias = params.get("logit_bias")
        if isinstance(bias, Mapping):
            params["logit_bias"] = {_as_token_id(token): value for token, value in bias.items()}
        given: dict[str, Any] = {n: value for n, value in params.items() if value is not None or n == "max_tokens"}
        return cls(**given)

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

    def _check_extra_args(self) -> None:
        if self.extra_args is None:
            return
        require(
            isinstance(self.extra_args, Mapping) and set(self.extra_args) <= {"kv_transfer_params"},
            f'extra_args is {self.extra_args!r}; the only supported key is {{"kv_transfer_params": {{…}}}}',
            "extra_args",
        )
        told = self.extra_args.get("kv_transfer_params")
        require(
            told is None or isinstance(told, Mapping),
            f"kv_transfer_params is {told!r}; it must be a dictionary",
            "kv_transfer_params",
        )

    def _check_counts(self) -> None:
        require(
            is_count(self.n, 1) and self.n <= MAX_N, f"n is {self.n!r}; it must be a whole number from 1 to {MAX_N}"
        )
        require(
            self.max_tokens is None or is_count(self.max_tokens, 1),
            f"max_tokens is {self.max_tokens!r}; it must be at least 1, or None for all that the model allows",
            "max_tokens",
        )
        require(is_count(self.min_tokens, 0), f"min_tokens is {self.min_tokens!r}; it must be 0 or more")
        require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens})",
        )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            require(
                value is None or is_count(value, -1),
                f"{name} is {value!r}; it must be 0 or more, -1 for the whole vocabulary, or None",
                name,
            )
        require(
            self.seed is None or (isinstance(self.seed, int) and not isinstance(self.seed, bool)),
            f"seed is {self.seed!r}; it must be a whole number, or None",
        )

    def _check_range(self, name: str, least: float, most: float, meaning: str, parameter: str | None = None) -> None:
        value = getattr(self, name)
        fits = is_number(value) and least <= value <= most
        require(fits, f"{name} is {value!r}; it must be {meaning}", parameter)

    def _check_distribution(self) -> None:
        self._check_range("temperature", 0.0, MAX_TEMPERATURE, "from 0 (greedy) to 2", "temperature")
        require(
            is_number(self.top_p) and 0.0 < self.top_p <= 1.0,
            f"top_p is {self.top_p!r}; it must be above 0 and at most 1 (1: off)",
            "top_p",
        )
        require(is_count(self.top_k, 0), f"top_k is {self.top_k!r}; it must be at least 1, or 0 or -1 for off")
        self._check_range("min_p", 0.0, 1.0, "between 0 (off) and 1")
        self._check_range("presence_penalty", -2.0, 2.0, "between -2 and 2 (0: off)")
        self._check_range("frequency_penalty", -2.0, 2.0, "between -2 and 2 (0: off)")
        bounds = MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY
        self._check_range("repetition_penalty", *bounds, "above 0 (1: off), from 1e-06 to 1000000")
        require(
            not self.is_greedy or self.n == 1,
            f"n is {self.n} with temperature 0: greedy completions are all the same. Use n=1, or a temperature above 0",
        )

    def _check_stops(self) -> None:
        require_flags(self, "ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output")
        skips = self.skip_reading_prefix_cache
        require(
            skips is None or isinstance(skips, bool),
            f"skip_reading_prefix_cache is {skips!r}; it must be True, False or None",
        )
        words = (self.stop,) if isinstance(self.stop, str) else self.stop
        require(_are_words(words), f"stop is {self.stop!r}; it must be a string or list of strings, none of them empty")
        require(_are_words(self.bad_words), f"bad_words is {self.bad_words!r}; it must be strings, none of them empty")
        for name, texts in (("a stop string", words), ("a bad word", self.bad_words)):
            for text in texts or ():
                encodable(text, name)
        require(
            self.detokenize or not self.stop_strings,
            "stop strings are looked for in the text, so they need detokenize=True; use stop_token_ids without it",
        )
        require(
            isinstance(self.output_kind, RequestOutputKind),
            f"output_kind is {self.output_kind!r}; it must be a RequestOutputKind",
        )

    def _check_token_ids(self) -> None:
        require(
            self.logit_bias is None
            or (isinstance(self.logit_bias, Mapping) and all(map(is_number, self.logit_bias.values()))),
            f"logit_bias is {self.logit_bias!r}; it must map token ids to numbers",
        )
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            ids = getattr(self, name)
            require(
                ids is None or _are_token_ids(ids),
                f"{name} is {ids!r}; it must hold token ids: whole numbers, 0 or more",
                name,
            )
        require(
            self.allowed_token_ids is None or len(self.allowed_token_ids) > 0,
            "allowed_token_ids is empty, so no token could be generated; leave it out, or name some",
            "allowed_token_ids",
        )


@checked_arguments
@dataclass(kw_only=True, slots=True)
class BeamSearchParams:
    """Settings of `LLM.beam_search`. An invalid value raises a `MinivllmError`.

    - `beam_width`: sequences kept at each step, and returned at the end. `max_tokens`: the longest
      continuation.
    - `ignore_eos`: the end-of-sequence token is one like any other. Otherwise a sequence that
      reaches it is complete.
    - `length_penalty`: sequences are compared by their log probability divided by (generated
      tokens) ** this.
    - `temperature`, `include_stop_str_in_output`: accepted, and change nothing: candidates are
      compared by the model's own log probabilities, and tokens always include the end-of-sequence
      token.
    - `allowed_token_ids`: no other token is a candidate.
    - `skip_special_tokens`: leave special tokens out of the text.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    allowed_token_ids: Sequence[int] | None = None

    def __post_init__(self) -> None:
        require_counts(self, 1, "beam_width", "max_tokens")
        require_flags(self, "ignore_eos", "include_stop_str_in_output", "skip_special_tokens")
        for name in ("temperature", "length_penalty"):
            value = getattr(self, name)
            require(is_number(value), f"{name} is {value!r}; it must be a number")
        ids = self.allowed_token_ids
        require(
            ids is None or (_are_token_ids(ids) and len(ids) > 0),
            f"allowed_token_ids is {ids!r}; it must hold token ids: whole numbers, 0 or more",
        )


def _as_token_id(token: object) -> object:
    return int(token) if isinstance(token, str) and token.isdecimal() else token


def _are_token_ids(value: object) -> bool:
    return isinstance(value, Sequence | Set | Mapping) and all(is_count(token, 0) for token in value)


def _are_words(value: object) -> bool:
    if value is None:
        return True
    return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(w, str) and w for w in value)
