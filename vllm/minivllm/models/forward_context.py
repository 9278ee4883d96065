"""Per-step context passed through the model's forward pass alongside the tokens.

In vLLM v0.33.0: `vllm/forward_context.py` (`ForwardContext`), which layers find in a global
variable; here it is passed down to them and is immutable: each step has its own.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

# An `AttentionFunction`; in a model with latent attention a `LatentAttentionFunction`.
Attention = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class AuxHiddenStates:
    """Hidden states from between the layers, which the decoder adds to `states` for a drafter to
    read.

    - `layer_ids`: 0 is the embedding; i is the residual stream that layer i reads, the output of
      layer i - 1.
    - `states`: for each of them, in ascending order, `[tokens, hidden_size]`.
    """

    layer_ids: tuple[int, ...]
    states: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """The step as the layers see it. Anything else that a layer needs per step becomes a field
    here.

    - `attention`: the attention function, bound to this step's block tables and metadata.
    - `aux_hidden_states`: hidden states to keep; None for none.
    """

    attention: Attention
    aux_hidden_states: AuxHiddenStates | None = None

    @classmethod
    def of(cls, context: "ForwardContext | Attention") -> "ForwardContext":
        """Return `context` itself, or wrap a bare attention function."""
        return context if isinstance(context, ForwardContext) else cls(context)
