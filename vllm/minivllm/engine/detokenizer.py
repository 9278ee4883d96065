"""Incremental detokenization: the text never ends in the middle of a character, and a stream never
ends in the middle of a stop string.

A token may end in the middle of a character, and a character may be spread over four tokens. So
tokens become bytes, and the bytes become text: an incremental UTF-8 decoder keeps the bytes of an
unfinished character until the next token. No window of earlier tokens is decoded again, so there is
none that could begin inside a character.

In vLLM v0.33.0: `vllm/v1/engine/detokenizer.py` (`IncrementalDetokenizer`, `check_stop_strings`),
which decodes the tokens after the last complete character again in each step.
"""

import codecs
import re
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary, proxy

from tokenizers import Tokenizer

from minivllm.config import Parts
from minivllm.sampling_params import SamplingParams

BROKEN = "\ufffd"
"""The replacement character, which decoders put in place of invalid or incomplete UTF-8."""
MAX_CHARACTER_BYTES = 4
_byte_piece = re.compile("<0x([0-9A-F]{2})>")


class TokenBytes(dict[int, bytes]):
    """The bytes that each token adds in the middle of a text, computed on first use.

    Byte-level vocabularies (GPT-2, Llama-3, Qwen) spell each byte as a printable character;
    SentencePiece vocabularies (Llama-2, Mistral) have words, and tokens like `<0xE2>` for bytes of
    characters that have no token. Decoders that put a space after a token, such as `BPEDecoder`
    with its `</w>`, are not handled.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens

    def __missing__(self, token_id: int) -> bytes:
        # The second of two equal tokens, because a decoder may strip the space that begins a text.
        once, twice = self._decode([token_id]), self._decode([token_id, token_id])
        text = twice[len(once) :]
        self[token_id] = self._raw(token_id, text) if BROKEN in twice else text.encode()
        return self[token_id]

    def at_the_start(self, token_id: int) -> bytes:
        """Return the bytes that the token adds as the first token of a text."""
        text = self._decode([token_id])
        return self[token_id] if BROKEN in text else text.encode()

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)

    def _raw(self, token_id: int, text: str) -> bytes:
        """Return the bytes of a token that holds part of a character, or U+FFFD itself."""
        piece = self._tokenizer.id_to_token(token_id) or ""
        if fallback := _byte_piece.fullmatch(piece):
            return bytes([int(fallback[1], 16)])
        if piece and all(character in BYTE_OF for character in piece):
            return bytes(BYTE_OF[character] for character in piece)
        return text.encode()


def _bytes_by_character() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for.

    A printable byte stands for itself; the other bytes take the characters after 255, in order.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _bytes_by_character()


_tables: WeakKeyDictionary[Tokenizer, dict[bool, TokenBytes]] = WeakKeyDictionary()


def token_bytes(tokenizer: Tokenizer, skip_special_tokens: bool) -> TokenBytes:
    """Return the tokenizer's table, which all its requests share and which lives as long as the
    tokenizer.
    """
    tables = _tables.setdefault(tokenizer, {})
    if skip_special_tokens not in tables:
        tables[skip_special_tokens] = TokenBytes(proxy(tokenizer), skip_special_tokens)
    return tables[skip_special_tokens]


class IncrementalDetokenizer:
    """The text of one request, which only grows until a stop string truncates it.

    `text` is always safe to show: it never ends inside a character. It was decoded from
    `num_tokens` tokens.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        self._tokenizer = tokenizer  # which its table does not keep alive
        self._params = params
        self._stop_strings = params.stop_strings
        self._bytes_of = token_bytes(tokenizer, params.skip_special_tokens)
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.num_tokens = 0
        self.text = ""
        # The prompt may end inside a character that the first output tokens complete.
        end = self._last_bytes(prompt_token_ids)
        self._at_the_start = not end
        self._utf8.decode(end)  # keeps the bytes of a character that the prompt has begun

    def update(self, new_token_ids: Sequence[int], stopped_by_token: bool = False) -> str | None:
        """Add tokens to the text. Return the stop string found, if any; the text is truncated
        there.

        The token that completes the stop string is the last one decoded (`num_tokens`).
        `stopped_by_token`: the last new token is a stop token, which is left out of the text unless
        `include_stop_str_in_output` is set.
        """
        if stopped_by_token and not self._params.include_stop_str_in_output:
            new_token_ids = new_token_ids[:-1]
        # Without stop strings, all tokens can be decoded at once.
        if not self._stop_strings:
            self._append(new_token_ids)
            return None
        for token_id in new_token_ids:
            num_before = len(self.text)
            self._append([token_id])
            # A stop string within the first `min_tokens` tokens does not count.
            if self.num_tokens <= self._params.min_tokens:
                continue
            stop = self._cut_at_stop_string(num_before)
            if stop is not None:
                return stop
        return None

    def finish(self) -> None:
        """Add the text that was held back, since no more tokens will come: none here, for a character
        that is not complete is left out.
        """

    def streamable_length(self) -> int:
        """Return how much of `text` an unfinished stream may send: all but a possible start of a
        stop string.
        """
        if self._params.include_stop_str_in_output or not self._stop_strings:
            return len(self.text)
        # What may be the start of a stop string must not be sent: it would have to be taken back.
        return len(self.text) - max(_overlap(self.text, stop) for stop in self._stop_strings)

    def _last_bytes(self, token_ids: Sequence[int]) -> bytes:
        """Return the last bytes of a prompt, enough to tell whether it ends inside a character."""
        end = b""
        for token_id in reversed(token_ids):
            if len(end) >= MAX_CHARACTER_BYTES:
                break
            end = self._bytes_of[token_id] + end
        return end

    def _append(self, token_ids: Sequence[int]) -> None:
        self.num_tokens += len(token_ids)
        added = [self._bytes_of[token_id] for token_id in token_ids]
        if self._at_the_start and any(added):
            self._at_the_start = False
            # Special tokens that are skipped have no bytes.
            first = next(index for index, data in enumerate(added) if data)
            added[first] = self._bytes_of.at_the_start(token_ids[first])
        self.text += self._utf8.decode(b"".join(added))

    def _cut_at_stop_string(self, num_before: int) -> str | None:
        match = find_stop_string(self.text, self._stop_strings, num_before) if self._stop_strings else None
        if match is None:
            return None
        stop, end = match
        self.text = self.text[: end if self._params.include_stop_str_in_output else end - len(stop)]
        return stop


class DetokenizerOfParts(IncrementalDetokenizer):
    """A detokenizer that sends its text through the part `stop_strings`, which holds back what may
    begin a stop string.

    The text of the first `min_tokens` tokens bypasses the part.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams, stop_strings: Any
    ) -> None:
        super().__init__(tokenizer, prompt_token_ids, params)
        self._part = stop_strings

    def finish(self) -> None:
        self.text += self._part.flush()

    def streamable_length(self) -> int:
        """Return the length of the whole text: the part has already held back what must wait."""
        return len(self.text)

    def _cut_at_stop_string(self, num_before: int) -> str | None:
        shown, stop = self._part.push(self.text[num_before:])
        # The part cuts a stop string off in any case.
        included = stop if stop and self._params.include_stop_str_in_output else ""
        self.text = self.text[:num_before] + shown + included
        return stop


def make_detokenizer(
    tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams, parts: Parts
) -> IncrementalDetokenizer:
    """Return the detokenizer of a request; it uses the part `stop_strings` if there is one and the
    request has stop strings.
    """
    if parts.stop_strings is None or not params.stop_strings:
        return IncrementalDetokenizer(tokenizer, prompt_token_ids, params)
    stop_strings = parts.stop_strings(list(params.stop_strings))
    return DetokenizerOfParts(tokenizer, prompt_token_ids, params, stop_strings)


def find_stop_string(text: str, stop_strings: Sequence[str], num_before: int) -> tuple[str, int] | None:
    """Return the stop string that is completed first after the first `num_before` characters, and
    where it ends.

    It is the one that would be found if the text arrived character by character. If two end at the
    same position, the first in the list wins.
    """
    # By where they end, not by where they begin: as if the text came character by character.
    ends = [(_first_end(text, stop, num_before), stop) for stop in stop_strings]
    end, stop = min(ends, key=lambda pair: pair[0], default=(len(text) + 1, ""))
    return (stop, end) if end <= len(text) else None


def _first_end(text: str, stop: str, num_before: int) -> int:
    # A stop string may have begun in the text before.
    start = text.find(stop, max(0, num_before - len(stop) + 1))
    return len(text) + 1 if start < 0 else start + len(stop)


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    longest = min(len(text), len(stop) - 1)
    last = text[-1:]
    sizes = (size for size in range(longest, 0, -1) if stop[size - 1] == last)  # most are told by one character
    return next((size for size in sizes if text.endswith(stop[:size])), 0)
