"""Turn a user's prompt and parameters into a request for the core, or raise a clear error.

In vLLM v0.33.0: `vllm/v1/engine/input_processor.py` (`InputProcessor.process_inputs`,
`assign_request_id`).
"""

import functools
import itertools
import random
import sys
import time
from dataclasses import replace

from tokenizers import Tokenizer

from minivllm.config import ModelConfig
from minivllm.core.engine_messages import EngineCoreRequest
from minivllm.core.limits import RequestLimits
from minivllm.core.lora_request import LoRARequest
from minivllm.errors import MinivllmError
from minivllm.inputs import Prompt, parse_prompt
from minivllm.sampling_params import SamplingParams
from minivllm.structured_output.grammar_text import check_grammar

MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS = 128, 1024
BAD_WORD_LIMITS = f"at most {MAX_BAD_WORDS} of {MAX_BAD_WORD_TOKENS:,} tokens in all"


class InputProcessor:
    """Tokenizes prompts, and checks and resolves parameters.

    `eos_token_ids` are the model's end-of-sequence tokens. The core treats only the first as EOS,
    and the others as stop tokens like those of a request, so that `stop_reason` tells them apart.

    The core knows each request by an id that is never used twice: the user's id with a running
    number appended. A user may abort "a" and add another "a" at once; outputs of the first that are
    still on their way from the core's process must not be taken for the second's. vLLM appends
    random characters.
    """

    def __init__(
        self,
        config: ModelConfig,
        tokenizer: Tokenizer | None,
        limits: RequestLimits,
        eos_token_ids: tuple[int, ...],
        seed: int,
    ) -> None:
        self.vocab_size = config.vocab_size
        self.tokenizer = tokenizer
        self.limits = limits
        self.eos_token_ids = eos_token_ids
        self.enable_lora = False
        self._seeds = random.Random(seed)
        self._numbers = itertools.count()

    def process_inputs(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> tuple[str | None, EngineCoreRequest]:
        """Return the prompt's text, if any, and the request for the core, with a unique id.

        Raises:
            MinivllmError: the prompt or the parameters are invalid; the message says what would be
                valid.
        """
        # Python counts True as an int.
        if not isinstance(priority, int) or isinstance(priority, bool):
            raise MinivllmError(f"priority is {priority!r}; it must be a whole number, a lower one goes first")
        self.check_lora(lora_request)
        text, token_ids, cache_salt = parse_prompt(prompt)
        if token_ids is None:
            # Before tokenizing, which takes minutes for a text of gigabytes.
            self.check_length(text or "")
            token_ids = self.encode(text or "")
        self._check_prompt(token_ids)
        # Checked here, where the caller stands: an error in the core would reach it as an output.
        resolved = self._resolve(params, len(token_ids))
        self.limits.check("the request", len(token_ids), resolved.max_tokens or 1)
        request = EngineCoreRequest(
            f"{request_id}-{next(self._numbers)}",
            token_ids,
            resolved,
            self.eos_token_ids[:1],
            arrival_time=time.monotonic(),
            priority=priority,
            cache_salt=cache_salt,
            kv_transfer_params=(resolved.extra_args or {}).get("kv_transfer_params"),
            lora_request=lora_request,
        )
        return text, request

    @functools.cached_property
    def max_prompt_characters(self) -> int:
        """The maximum number of characters in `max_model_len` tokens. In vLLM:
        `vllm/renderers/params.py`.
        """
        return sys.maxsize if self.tokenizer is None else self.limits.max_model_len * self._longest_token

    @functools.cached_property
    def _longest_token(self) -> int:
        """The number of characters of the longest token."""
        assert self.tokenizer is not None
        return max(map(len, self.tokenizer.get_vocab()))

    def check_length(self, text: str) -> None:
        """Refuse a text that cannot fit, whatever its tokens are: tokenizing it could take minutes
        and gigabytes.

        Raises:
            MinivllmError: it has too many characters. Clients look for "maximum context length" in
                the message.
        """
        if len(text) > self.max_prompt_characters:
            raise MinivllmError(
                f"the prompt has {len(text):,} characters; the model's maximum context length is "
                f"{self.limits.max_model_len} tokens, which are {self.max_prompt_characters:,} characters at most",
                "input_text",
            )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a prompt's text.

        Raises:
            MinivllmError: there is no tokenizer.
        """
        if self.tokenizer is None:
            raise MinivllmError("the prompt is text, but skip_tokenizer_init is on; give token ids")
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def check_lora(self, lora_request: LoRARequest | None) -> None:
        """Refuse what is no adapter, and any adapter if the engine serves none."""
        if lora_request is None:
            return
        if not isinstance(lora_request, LoRARequest):
            raise MinivllmError(f"lora_request is {str(lora_request)[:60]!r}; it must be a LoRARequest(name, id, path)")
        if not self.enable_lora:
            raise MinivllmError(
                f"the adapter {lora_request.lora_name!r} needs an engine with adapters: set enable_lora=True "
                "(--enable-lora)"
            )

    def _check_prompt(self, token_ids: list[int]) -> None:
        if not token_ids:
            raise MinivllmError("the prompt is empty; it needs at least one token")
        outside = next((token for token in token_ids if not 0 <= token < self.vocab_size), None)
        if outside is not None:
            raise MinivllmError(f"the prompt has the token id {outside}; the vocabulary is 0 to {self.vocab_size - 1}")

    def _resolve(self, params: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        """Return a checked copy of the parameters with `seed`, `max_tokens` and all token ids
        filled in.
        """
        if not isinstance(params, SamplingParams):
            raise MinivllmError(f"sampling_params are {type(params).__name__}; they must be SamplingParams")
        # The caller may change its object while the request runs.
        params = params.clone()
        self._check_params(params)
        stops = tuple(params.stop_token_ids or ())
        # A prompt that is too long gets its error from `limits.check`, not from here.
        max_tokens = max(1, self.limits.max_model_len - num_prompt_tokens)
        return replace(
            params,
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
            max_tokens=max_tokens if params.max_tokens is None else params.max_tokens,
            stop_token_ids=stops if params.ignore_eos else (*stops, *self.eos_token_ids[1:]),
            all_stop_token_ids=frozenset((*stops, *self.eos_token_ids)),
            bad_words_token_ids=self._bad_words_token_ids(params),
        )

    def _check_params(self, params: SamplingParams) -> None:
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            outside = next((token for token in getattr(params, name) or () if token >= self.vocab_size), None)
            if outside is not None:
                message = f"{name} has the token id {outside}; the vocabulary is 0 to {self.vocab_size - 1}"
                raise MinivllmError(message, name)
        if params.structured_outputs is not None:
            if self.tokenizer is None:
                raise MinivllmError("structured_outputs constrains text, but skip_tokenizer_init is on")
            check_grammar(params.structured_outputs)
        if self.tokenizer is None and (params.stop_strings or params.bad_words):
            raise MinivllmError("stop and bad_words are text, but skip_tokenizer_init is on; use stop_token_ids")
        # With `min_tokens`, stop tokens are masked until then: nothing may be left to sample.
        allowed = frozenset(params.allowed_token_ids or ())
        if params.min_tokens and allowed and allowed <= {*self.eos_token_ids, *(params.stop_token_ids or ())}:
            raise MinivllmError(
                f"allowed_token_ids are all tokens that stop, and min_tokens is {params.min_tokens}: "
                "nothing could be generated"
            )

    def _bad_words_token_ids(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Return the tokens of each word at the start of a text and after a space; a word of
        nothing but spaces is encoded unchanged.

        vLLM skips the second variant if it has more tokens than the first; here it is forbidden
        too.
        """
        spellings = set()
        words = set(params.bad_words or ())
        if words and (len(words) > MAX_BAD_WORDS or sum(map(len, words)) > MAX_BAD_WORD_TOKENS * self._longest_token):
            raise MinivllmError(f"bad_words are too many or too long: {BAD_WORD_LIMITS}", "bad_words")
        for word in words:
            assert self.tokenizer is not None
            # Most vocabularies have a token for a word at the start of a text and another for it
            # after a space.
            bare = word.lstrip()
            for text in (bare, " " + bare) if bare else (word,):
                spellings.add(tuple(self.tokenizer.encode(text, add_special_tokens=False).ids))
        # Each word counts twice here, with and without a space.
        if sum(map(len, spellings)) > 2 * MAX_BAD_WORD_TOKENS:
            raise MinivllmError(f"bad_words are too long: {BAD_WORD_LIMITS}", "bad_words")
        return tuple(sorted(filter(None, spellings)))
