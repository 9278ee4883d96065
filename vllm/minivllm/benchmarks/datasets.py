"""The requests of a load: random ones, conversations, or one's own.

In vLLM v0.33.0: `vllm/benchmarks/datasets/`.
"""

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from minivllm.benchmarks.client import SampleRequest
from minivllm.errors import MinivllmError

TRIES = 10
SHAREGPT_LEAST, SHAREGPT_LONGEST_PROMPT, SHAREGPT_LONGEST = 4, 1024, 2048
"""Tokens. Conversations outside these bounds are left out, as they are in vLLM's comparisons."""


def random_requests(
    tokenizer: Tokenizer,
    number: int,
    *,
    input_len: int = 1024,
    output_len: int = 128,
    range_ratio: float | dict[str, float] = 0.0,
    prefix_len: int = 0,
    seed: int = 0,
) -> list[SampleRequest]:
    """Return prompts of random tokens as texts. Both lengths are uniform within `range_ratio` of what is given.

    All prompts begin with the same `prefix_len` tokens. A text of random tokens is not always tokenized into the same
    number again; it is mended a few times, and `prompt_len` is what it really has.
    """
    rng = random.Random(seed)
    vocabulary = _ordinary_tokens(tokenizer)
    prefix = _text_of(tokenizer, [rng.choice(vocabulary) for _ in range(prefix_len)], prefix_len, rng, vocabulary)
    ratios = range_ratio if isinstance(range_ratio, dict) else {"input": range_ratio, "output": range_ratio}
    lengths = [
        (_length(rng, input_len, ratios.get("input", 0.0), 0), _length(rng, output_len, ratios.get("output", 0.0), 1))
        for _ in range(number)
    ]
    if min(length for length, _ in lengths) + prefix_len < 1:
        raise MinivllmError("random prompts would be empty: raise --random-input-len or --random-prefix-len")
    requests = []
    for length, wanted in lengths:
        tokens = tokenizer.encode(prefix, add_special_tokens=False).ids
        tokens += [rng.choice(vocabulary) for _ in range(length)]
        text = _text_of(tokenizer, tokens, prefix_len + length, rng, vocabulary)
        requests.append(SampleRequest(text, len(tokenizer.encode(text).ids), wanted))
    return requests


def sharegpt_requests(
    tokenizer: Tokenizer, path: str | Path, number: int, *, output_len: int | None = None, seed: int = 0
) -> list[SampleRequest]:
    """Return the first turn of conversations in ShareGPT's JSON, in random order; answers give the output lengths."""
    turns = [entry["conversations"][:2] for entry in _read_json(path) if len(entry.get("conversations", ())) >= 2]
    found = []
    for prompt, answer in turns:
        length = len(tokenizer.encode(prompt["value"]).ids)
        wanted = len(tokenizer.encode(answer["value"]).ids) if output_len is None else output_len
        fits = length <= SHAREGPT_LONGEST_PROMPT and length + wanted <= SHAREGPT_LONGEST
        if length >= SHAREGPT_LEAST and fits and (wanted >= SHAREGPT_LEAST or output_len is not None):
            found.append(SampleRequest(prompt["value"], length, wanted))
    return _drawn(found, number, path, seed)


def custom_requests(
    tokenizer: Tokenizer, path: str | Path, number: int, *, output_len: int = 256, seed: int = 0
) -> list[SampleRequest]:
    """Return one's own prompts, from JSON lines `{"prompt": …, "output_tokens": …}`.

    An `output_len` of −1 takes each line's `output_tokens`.
    """
    found = []
    for line in _lines(path):
        prompt, wanted = line.get("prompt"), line.get("output_tokens") if output_len == -1 else output_len
        if not isinstance(prompt, str) or not isinstance(wanted, int):
            raise MinivllmError(f"{path}: each line needs a prompt, and output_tokens if --custom-output-len is -1")
        found.append(SampleRequest(prompt, len(tokenizer.encode(prompt).ids), wanted))
    return _drawn(found, number, path, seed)


def _length(rng: random.Random, wanted: int, ratio: float, least: int) -> int:
    if not 0.0 <= ratio < 1.0:
        raise MinivllmError(f"the range ratio is {ratio}; it must be at least 0 and below 1")
    return rng.randint(max(least, math.floor(wanted * (1 - ratio))), max(least, math.ceil(wanted * (1 + ratio))))


def _ordinary_tokens(tokenizer: Tokenizer) -> list[int]:
    """Tokens that are neither special nor a part of a character."""
    special = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
    number = tokenizer.get_vocab_size()
    texts = tokenizer.decode_batch([[token] for token in range(number)])
    return [token for token in range(number) if token not in special and texts[token] and "\ufffd" not in texts[token]]


def _text_of(
    tokenizer: Tokenizer, tokens: list[int], length: int, rng: random.Random, vocabulary: Sequence[int]
) -> str:
    text = ""
    for _ in range(TRIES):
        text = tokenizer.decode(tokens)
        again = tokenizer.encode(text, add_special_tokens=False).ids
        if len(again) == length:
            break
        tokens = again[:length] + [rng.choice(vocabulary) for _ in range(length - len(again))]
    return text


def _drawn(found: list[SampleRequest], number: int, path: str | Path, seed: int) -> list[SampleRequest]:
    """So many of them in random order; again and again if there are fewer."""
    if not found:
        raise MinivllmError(f"{path} has no request that can be used")
    rng = random.Random(seed)
    rng.shuffle(found)
    return [*found, *rng.choices(found, k=max(0, number - len(found)))][:number]


def _read_json(path: str | Path) -> list[Any]:
    try:
        return json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise MinivllmError(f"{path} cannot be read: {error}") from None


def _lines(path: str | Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in Path(path).read_text().splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise MinivllmError(f"{path} cannot be read as JSON lines: {error}") from None
