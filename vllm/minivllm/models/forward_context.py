"""What one step hands through the model's forward pass beside its tokens.

In vLLM v0.33.0: `vllm/forward_context.py` (`ForwardContext`), which layers find in a global variable; here it is passed
down to them, and never changed: the next step has its own.
"""

from dataclasses import dataclass

from minivllm.models.attention import AttentionFunction


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """The step as the layers see it. What else a layer needs to know of a step becomes a field here.

    - `attention`: attends over the keys and values of this step's requests, with the step's tables.
    """

    attention: AttentionFunction

    @classmethod
    def of(cls, context: "ForwardContext | AttentionFunction") -> "ForwardContext":
        """The context, or one of which only the attention matters."""
        return context if isinstance(context, ForwardContext) else cls(context)
