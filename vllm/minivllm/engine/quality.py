"""How well an engine still predicts: loss on held-out text, and agreement with another engine, token by token.

The text goes through the engine as prompts whose log probabilities are asked for. So every prediction is made by
attention over the engine's own cache, in its blocks, in whatever they are stored as, and with its weights as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from minivllm.engine.llm import LLM
from minivllm.errors import MinivllmError
from minivllm.lab.corpus import held_out_texts
from minivllm.sampling_params import SamplingParams


@dataclass(frozen=True)
class Reading:
    """What an engine thought of a text: `loss` in nats per token, and at each position the token it held likeliest."""

    loss: float
    favourites: tuple[int, ...]

    def agreement(self, other: Reading) -> float:
        """The share of positions at which both, having read the same text so far, would say the same token next."""
        if len(self.favourites) != len(other.favourites):
            raise MinivllmError(f"readings of {len(self.favourites)} and {len(other.favourites)} tokens do not compare")
        pairs = zip(self.favourites, other.favourites, strict=True)
        return sum(one == another for one, another in pairs) / len(self.favourites)


def held_out_tokens(llm: LLM, texts: int = 16, tokens: int = 256) -> list[list[int]]:
    """The beginnings of that many texts that the embedded models never saw, in the engine's own tokens.

    Raises:
        MinivllmError: the engine has no tokenizer, or not so many texts of that length are there.
    """
    tokenizer = llm.get_tokenizer()
    if tokenizer is None:
        raise MinivllmError("reading texts needs a tokenizer: build the engine without skip_tokenizer_init")
    found = [tokenizer.encode(text).ids[:tokens] for text in held_out_texts()]
    found = [one for one in found if len(one) == tokens][:texts]
    if len(found) < texts:
        raise MinivllmError(f"there are {len(found)} held-out texts of {tokens} tokens and more, not {texts}")
    return found


def read(llm: LLM, texts: Sequence[list[int]]) -> Reading:
    """Have the engine read texts of two tokens or more; what it would have said is asked before each but the first."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    losses, favourites = [], []
    for tokens, output in zip(texts, llm.generate(list(texts), params, use_tqdm=False), strict=True):
        assert output.prompt_logprobs is not None
        for token, entry in zip(tokens[1:], output.prompt_logprobs[1:], strict=True):
            assert entry is not None
            losses.append(-entry[token].logprob)
            favourites.append(max(entry.items(), key=lambda candidate: candidate[1].logprob)[0])
    return Reading(math.fsum(losses) / len(losses), tuple(favourites))
