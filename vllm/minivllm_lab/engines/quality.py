"""Measure how well an engine still predicts: loss on held-out text, and agreement with another
engine, token by token.

The text goes through the engine as prompts with prompt log probabilities requested. So every
prediction uses attention over the engine's own paged cache, in the dtype it is stored in, and the
engine's own weights.

Formats that no engine supports are measured on the decoder alone: `decoder_loss`, with weights
rounded as if they were stored in fewer bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.entrypoints.llm import LLM
from minivllm.errors import MinivllmError
from minivllm.models.decoder import Decoder
from minivllm.models.latent_attention import causal_attention
from minivllm.sampling_params import SamplingParams
from minivllm_lab.corpus import first_passages, held_out_texts


class Reading(NamedTuple):
    """An engine's predictions of a text: `loss` in nats per token, and the most likely token at
    each position.
    """

    loss: float
    favourites: tuple[int, ...]

    def agreement(self, other: Reading) -> float:
        """Return the fraction of positions at which both readings predict the same next token,
        given the same text so far.
        """
        pairs = zip(self.favourites, other.favourites, strict=True)
        return sum(favourite == another for favourite, another in pairs) / len(self.favourites)


def held_out_tokens(llm: LLM, texts: int = 16, tokens: int = 256) -> list[list[int]]:
    """Return the first `tokens` tokens of `texts` held-out texts, in the engine's own tokenization;
    see `first_passages`.

    Raises:
        MinivllmError: the engine has no tokenizer, or there are not enough texts of that length.
    """
    tokenizer = llm.llm_engine.tokenizer
    if tokenizer is None:
        raise MinivllmError("reading texts needs a tokenizer: build the engine without skip_tokenizer_init")
    return first_passages([tokenizer.encode(text).ids for text in held_out_texts()], texts, tokens)


def read(llm: LLM, texts: Sequence[list[int]]) -> Reading:
    """Have the engine predict every token but the first of these texts, each of at least two
    tokens.
    """
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    losses, favourites = [], []
    for tokens, output in zip(texts, llm.generate(list(texts), params, use_tqdm=False), strict=True):
        assert output.prompt_logprobs is not None
        for token, entry in zip(tokens[1:], output.prompt_logprobs[1:], strict=True):
            assert entry is not None
            losses.append(-entry[token].logprob)
            favourites.append(max(entry.items(), key=lambda candidate: candidate[1].logprob)[0])
    return Reading(math.fsum(losses) / len(losses), tuple(favourites))


@torch.inference_mode()
def decoder_loss(model: Decoder, texts: Sequence[list[int]]) -> float:
    """Return the loss in nats per token over texts of equal length."""
    ids = torch.tensor(texts, device=model.lm_head.weight.device)
    count, tokens = ids.shape
    positions = torch.arange(tokens, device=ids.device).repeat(count)
    attention = causal_attention(model.config, [tokens] * count)
    logits = model.compute_logits(model(ids.flatten(), positions, attention)).float().view(count, tokens, -1)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).item()


@contextmanager
def rounded_weights(model: Decoder, rounded: Callable[[Tensor], Tensor], outlier: float = 1.0) -> Iterator[float]:
    """Pass every layer's weights `[out, in]` through `rounded` inside the block, and restore them
    on exit.

    Yields the root mean square error of the weights, relative to their own root mean square. The
    first input channel of qkv and of gate and up is multiplied by `outlier`, and the norm before
    them is divided by it there: without rounding, this is the same model.
    """
    weights = dict(model.layers.named_parameters())
    linears = [weight for name, weight in weights.items() if name.endswith("proj.weight")]
    originals = {name: weight.clone() for name, weight in weights.items()}
    try:
        for name, weight in weights.items():
            if name.endswith(("qkv_proj.weight", "gate_up_proj.weight")):
                weight[:, 0] *= outlier
            elif name.endswith("layernorm.weight"):
                weight[0] /= outlier
        wrong = size = 0.0
        for weight in linears:
            approximate = rounded(weight)
            wrong += (approximate - weight).square().sum().item()
            size += weight.square().sum().item()
            weight.copy_(approximate)
        yield math.sqrt(wrong / size)
    finally:
        for name, original in originals.items():
            weights[name].copy_(original)
