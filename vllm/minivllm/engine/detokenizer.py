"""Incremental detokenization: the text never ends in half a character, nor a stream in half a stop string.

A token may end in the middle of a character (byte-level tokens do), and the text of a token may depend on the token
before it (SentencePiece drops the space at the start of a text). So new tokens are decoded together with a few earlier
ones, and text that ends in a broken character is held back until the next token.

In vLLM v0.33.0: `vllm/v1/engine/detokenizer.py` (`IncrementalDetokenizer`, `check_stop_strings`).
"""

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

from minivllm.config import Parts
from minivllm.sampling_params import SamplingParams

BROKEN = "\ufffd"
"""The replacement character, which decoders put in place of invalid or incomplete UTF-8."""
MAX_BROKEN = 3
"""Of a long run of broken characters, only this many can still be completed: a UTF-8 character has at most 4 bytes."""
NUM_CONTEXT_TOKENS = 12
"""Number of earlier tokens to decode with the new ones: enough for a decoder's special cases at the start of a text."""
MAX_WINDOW_TOKENS = 48


class IncrementalDetokenizer:
    """The text of one request, which only grows until a stop string truncates it.

    `text` can be shown: it does not end in a broken character that the next token could complete. It was decoded from
    `num_tokens` tokens.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._params = params
        self._stop_strings = params.stop_strings
        self.num_tokens = 0
        self.text = ""
        # The last tokens, and how many characters of their text are already in `text` (or belong to the prompt).
        self._window = list(prompt_token_ids[-NUM_CONTEXT_TOKENS:])
        self._num_shown = len(self._whole(self._decode()))

    def update(self, new_token_ids: Sequence[int], stopped_by_token: bool = False) -> str | None:
        """Adds tokens to the text. Returns the stop string found, if any; the text is truncated there.

        The token that completes the stop string is the last one decoded (`num_tokens`). `stopped_by_token`: the last
        new token is a stop token, which is left out of the text unless `include_stop_str_in_output` is set.
        """
        if stopped_by_token and not self._params.include_stop_str_in_output:
            new_token_ids = new_token_ids[:-1]
        if not self._stop_strings:
            self._append(new_token_ids)
            return None
        for token_id in new_token_ids:
            num_before = len(self.text)
            self._append([token_id])
            if self.num_tokens <= self._params.min_tokens:
                continue
            stop = self._cut_at_stop_string(num_before)
            if stop is not None:
                return stop
        return None

    def finish(self) -> str | None:
        """Adds the text that was held back, since no more tokens will come. Returns a stop string, as `update` does."""
        num_before = len(self.text)
        decoded = self._decode()
        self.text += decoded[self._num_shown :]
        self._num_shown = len(decoded)
        return self._cut_at_stop_string(num_before)

    def streamable_length(self) -> int:
        """Returns how much of `text` an unfinished stream may send: all but a possible start of a stop string."""
        if self._params.include_stop_str_in_output or not self._stop_strings:
            return len(self.text)
        return len(self.text) - max(_overlap(self.text, stop) for stop in self._stop_strings)

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=self._params.skip_special_tokens)

    def _append(self, token_ids: Sequence[int]) -> None:
        if not token_ids:
            return
        self.num_tokens += len(token_ids)
        self._window += token_ids
        decoded = self._decode()
        whole = self._whole(decoded)
        self.text += whole[self._num_shown :]
        self._num_shown = max(self._num_shown, len(whole))
        num_held = len(decoded) - self._num_shown
        if len(self._window) > 2 * NUM_CONTEXT_TOKENS and (num_held == 0 or len(self._window) >= MAX_WINDOW_TOKENS):
            self._window = self._window[-NUM_CONTEXT_TOKENS:]
            self._num_shown = len(self._decode()) - num_held

    def _whole(self, decoded: str) -> str:
        """Returns the text without trailing broken characters that more bytes might complete.

        All of them are cut: a SentencePiece decoder breaks a whole run of bytes if its last character is incomplete.
        """
        whole = decoded.rstrip(BROKEN)
        if len(self._window) >= MAX_WINDOW_TOKENS:
            return decoded[: max(len(whole), len(decoded) - MAX_BROKEN)]
        return whole

    def _cut_at_stop_string(self, num_before: int) -> str | None:
        found = find_stop_string(self.text, self._stop_strings, num_before) if self._stop_strings else None
        if found is None:
            return None
        stop, end = found
        self.text = self.text[: end if self._params.include_stop_str_in_output else end - len(stop)]
        return stop


class DetokenizerOfParts(IncrementalDetokenizer):
    """Its text has gone through the part `stop_strings`, which holds back what may begin one of them.

    Text of the first `min_tokens` tokens does not go through it.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams, stop_strings: Any
    ) -> None:
        super().__init__(tokenizer, prompt_token_ids, params)
        self._part = stop_strings

    def finish(self) -> str | None:
        """See `IncrementalDetokenizer`."""
        stop = super().finish()
        if stop is None:
            self.text += self._part.flush()
        return stop

    def streamable_length(self) -> int:
        """All of the text: the part has what must wait."""
        return len(self.text)

    def _cut_at_stop_string(self, num_before: int) -> str | None:
        shown, stop = self._part.push(self.text[num_before:])
        included = stop if stop and self._params.include_stop_str_in_output else ""
        self.text = self.text[:num_before] + shown + included
        return stop


def make_detokenizer(
    tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams, parts: Parts
) -> IncrementalDetokenizer:
    """The detokenizer of a request, with the part `stop_strings` if there is one and the request has any."""
    if parts.stop_strings is None or not params.stop_strings:
        return IncrementalDetokenizer(tokenizer, prompt_token_ids, params)
    stop_strings = parts.stop_strings(list(params.stop_strings))
    return DetokenizerOfParts(tokenizer, prompt_token_ids, params, stop_strings)


def find_stop_string(text: str, stop_strings: Sequence[str], num_before: int) -> tuple[str, int] | None:
    """Returns the stop string that is completed first after the first `num_before` characters, and where it ends.

    It is the one that would be found if the text arrived character by character. Of two that end at the same place,
    the first in the list wins.
    """
    ends = [(_first_end(text, stop, num_before), stop) for stop in stop_strings]
    end, stop = min(ends, key=lambda pair: pair[0], default=(len(text) + 1, ""))
    return (stop, end) if end <= len(text) else None


def _first_end(text: str, stop: str, num_before: int) -> int:
    start = text.find(stop, max(0, num_before - len(stop) + 1))
    return len(text) + 1 if start < 0 else start + len(stop)


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
