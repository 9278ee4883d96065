"""How well an engine still predicts: loss on held-out text, and agreement with another engine, token by token.

The text goes through the engine as prompts whose log probabilities are asked for. So every prediction is made by
attention over the engine's own cache, in its blocks, in whatever they are stored as, and with its weights as they are.

What no engine has can be asked of the decoder alone: `decoder_loss`, with weights or a cache that are only rounded as
if they were stored in fewer bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.config import ModelConfig
from minivllm.config.checks import require
from minivllm.entrypoints.llm import LLM
from minivllm.errors import MinivllmError
from minivllm.lab.corpus import held_out_texts
from minivllm.models.attention import AttentionFunction, CausalAttention
from minivllm.models.decoder import Decoder
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
    require(tokens >= 2, f"a text of {tokens} token cannot be read: what a token is given are those before it; give 2")
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


@torch.inference_mode()
def decoder_loss(model: Decoder, texts: Sequence[list[int]], attention: AttentionFunction | None = None) -> float:
    """Nats per token in predicting texts of equal lengths; `attention` (None: plain) has them one after another."""
    ids = torch.tensor(texts, device=model.lm_head.weight.device)
    count, tokens = ids.shape
    positions = torch.arange(tokens, device=ids.device).repeat(count)
    attention = attention or CausalAttention(model.config, [tokens] * count)
    logits = model.compute_logits(model(ids.flatten(), positions, attention)).float().view(count, tokens, -1)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).item()


class RoundedCache(CausalAttention):
    """Attention over what `rounded` makes of keys and values `[tokens, kv_heads, head_dim]`, as a quantized cache does.

    `outlier` makes the first channel of the first KV head so many times larger in the keys, and as much smaller in the
    queries: every score stays what it was, but for the rounding.
    """

    def __init__(
        self, config: ModelConfig, lengths: Sequence[int], rounded: Callable[[Tensor], Tensor], outlier: float = 1.0
    ) -> None:
        super().__init__(config, lengths)
        self.rounded, self.outlier = rounded, outlier

    def __call__(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As `AttentionFunction`."""
        q, k, group = q.clone(), k.clone(), q.shape[1] // k.shape[1]
        k[:, 0, 0] *= self.outlier
        q[:, :group, 0] /= self.outlier
        return super().__call__(layer_index, q, self.rounded(k), self.rounded(v))


@contextmanager
def rounded_weights(model: Decoder, rounded: Callable[[Tensor], Tensor], outlier: float = 1.0) -> Iterator[float]:
    """The model with what `rounded` makes of every layer's weights `[out, in]`, and afterwards as it was.

    Yields the root mean square error of the weights, relative to their own. `outlier` makes the first input channel of
    qkv and of gate and up so many times larger, and the norm before them as much smaller there: before it is rounded,
    that is the same model.
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
