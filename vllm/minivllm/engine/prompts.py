"""The forms in which a prompt may come. In vLLM v0.33.0: `vllm/inputs/` (`TextPrompt`, `TokensPrompt`)."""

from collections.abc import Mapping, Sequence
from typing import TypedDict

from minivllm.errors import MinivllmError


class TextPrompt(TypedDict, total=False):
    """A text, and a salt that keeps its cached prefix from others."""

    prompt: str
    cache_salt: str


class TokensPrompt(TypedDict, total=False):
    """Token ids, and a salt that keeps its cached prefix from others."""

    prompt_token_ids: list[int]
    cache_salt: str


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt

EXPECTED = 'a prompt is a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": token ids}'


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list. A flat list of numbers is one prompt.

    Raises:
        MinivllmError: it is neither.
    """
    if isinstance(prompts, str | Mapping):
        return [prompts]  # type: ignore[list-item]
    if not isinstance(prompts, Sequence):
        raise MinivllmError(f"prompts are {type(prompts).__name__}; {EXPECTED}, or a list of such")
    if prompts and all(isinstance(item, int) for item in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def parse_prompt(prompt: Prompt) -> tuple[str | None, list[int] | None, str | None]:
    """Text or token ids of one prompt, whichever it has, and its cache salt.

    Raises:
        MinivllmError: it has neither, or both.
    """
    if isinstance(prompt, str):
        return prompt, None, None
    if not isinstance(prompt, Mapping):
        return None, _token_ids(prompt), None
    text, ids, salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt")
    if (text is None) == (ids is None):
        raise MinivllmError(f"the prompt has the keys {', '.join(map(repr, prompt)) or 'none'}; {EXPECTED}")
    if text is not None and not isinstance(text, str):
        raise MinivllmError(f'"prompt" is {type(text).__name__}; it must be a text')
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise MinivllmError(f'"cache_salt" is {salt!r}; it must be a text that is not empty')
    return text, None if ids is None else _token_ids(ids), salt


def _token_ids(ids: object) -> list[int]:
    if not isinstance(ids, Sequence) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise MinivllmError(f"the prompt is {_shortened(ids)}; {EXPECTED}")
    return list(ids)


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
