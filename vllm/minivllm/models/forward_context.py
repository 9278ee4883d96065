"""Per-step context passed through the model's forward pass alongside the tokens.

In vLLM v0.33.0: `vllm/forward_context.py` (`ForwardContext`), which layers find in a global variable; here it is passed
down to them and is immutable: each step has its own.
"""

from dataclasses import dataclass

from minivllm.models.attention import AttentionFunction


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """The step as the layers see it. Anything else that a layer needs per step becomes a field here.

    - `attention`: the attention function, bound to this step's block tables and metadata.
    """

    attention: AttentionFunction

    @classmethod
    def of(cls, context: "ForwardContext | AttentionFunction") -> "ForwardContext":
        """Return `context` itself, or wrap a bare attention function."""
        return context if isinstance(context, ForwardContext) else cls(context)
