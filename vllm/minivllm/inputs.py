"""The forms a prompt can take. In vLLM v0.33.0: `vllm/inputs/` (`TextPrompt`, `TokensPrompt`,
`PromptType`).
"""

from collections.abc import Mapping, Sequence
from typing import Required, TypedDict

from minivllm.config.checks import encodable, refuse_unknown
from minivllm.errors import MinivllmError


class TextPrompt(TypedDict, total=False):
    """A text prompt, with an optional salt: its cached prefix is shared only with prompts that have
    the same salt.
    """

    prompt: Required[str]
    cache_salt: str


class TokensPrompt(TypedDict, total=False):
    """A prompt of token ids, and a salt: its cached prefix is shared only with prompts that have
    the same salt.

    `prompt`, the text of the token ids, is only repeated in the output.
    """

    prompt_token_ids: Required[list[int]]
    prompt: str
    cache_salt: str


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt
PromptType = Prompt
"""vLLM's name."""

KEYS = ("prompt", "prompt_token_ids", "cache_salt")
EXPECTED = 'a prompt is a string, a list of token ids, {"prompt": text} or {"prompt_token_ids": token ids}'


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one prompt or several as a list. A flat list of token ids is one prompt.

    Raises:
        MinivllmError: `prompts` is neither a prompt nor a sequence.
    """
    if isinstance(prompts, str | Mapping):
        return [prompts]  # type: ignore[list-item]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes | bytearray):
        raise MinivllmError(f"prompts are {type(prompts).__name__}; {EXPECTED}, or a list of these")
    if prompts and all(isinstance(item, int) for item in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def parse_prompt(prompt: Prompt) -> tuple[str | None, list[int] | None, str | None]:
    """Return `(text, token_ids, cache_salt)` of one prompt. If there are no token ids, the caller
    must tokenize the text.

    Raises:
        MinivllmError: the prompt has neither text nor token ids, or a value of the wrong type.
    """
    if isinstance(prompt, str):
        return encodable(prompt, "the prompt"), None, None
    if not isinstance(prompt, Mapping):
        return None, _token_ids(prompt), None
    refuse_unknown("a prompt has no key", prompt, KEYS)
    text, ids, salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt")
    if text is None and ids is None:
        raise MinivllmError(f"the prompt has the keys {', '.join(map(repr, prompt)) or 'none'}; {EXPECTED}")
    if text is not None and not isinstance(text, str):
        raise MinivllmError(f'"prompt" is {type(text).__name__}; it must be a string')
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise MinivllmError(f'"cache_salt" is {salt!r}; it must be a string that is not empty')
    token_ids = None if ids is None else _token_ids(ids)
    return text and encodable(text, '"prompt"'), token_ids, salt and encodable(salt, '"cache_salt"')


def _token_ids(ids: object) -> list[int]:
    if isinstance(ids, Sequence) and not isinstance(ids, bytes | bytearray):
        numbers = list(ids)
        if all(isinstance(number, int) and not isinstance(number, bool) for number in numbers):
            return numbers
    raise MinivllmError(f"the prompt is {_shortened(ids)}; {EXPECTED}")


def _shortened(value: object) -> str:
    text = " ".join(repr(value).split())  # arrays have several lines
    return text if len(text) <= 60 else f"{text[:57]}..."
