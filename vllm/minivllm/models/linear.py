"""Linear layers, and the one way to change how they compute: each passes its input to its
`LinearMethod`.

A linear's first method creates its parameters. After loading, it may transform them or hand over to
another method. The method computes the matmul:

    UnquantizedLinearMethod    weight [out, in]                       F.linear
    PanelLinearMethod          the same numbers in panels             compiled loops on a CPU; chosen after loading
    QuantizedLinearMethod      packed integers and their scales       `minivllm.models.quantized`

To replace or wrap a linear, give it another method.

In vLLM v0.33.0: `vllm/model_executor/layers/linear.py` (`LinearMethodBase`,
`UnquantizedLinearMethod`, `MergedColumnParallelLinear`),
`vllm/model_executor/model_loader/utils.py` (`process_weights_after_loading`).
"""

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivllm.kernels.cpu.panel_linear import PanelLinear, can_pack
from minivllm.kernels.elementwise import silu_and_mul


class LinearMethod(ABC):
    """The way a linear computes. One object may serve many linears, so per-linear state is stored
    on the linear.
    """

    @abstractmethod
    def apply(self, linear: "Linear", x: Tensor) -> Tensor:
        """Return `x @ weight.T + bias`: `[rows, in]` to `[rows, out]`."""

    def apply_gated(self, linear: "Linear", x: Tensor) -> Tensor:
        """Return `silu(gate) * up` of the two halves of the matmul: `[rows, in]` to `[rows, out /
        2]`.

        A method overrides this if it can fuse the activation into the matmul.
        """
        return silu_and_mul(self.apply(linear, x))

    def process_weights_after_loading(self, linear: "Linear") -> None:
        """Change the weights' layout, or give the linear another method. Called after all
        weights are loaded.
        """
        return


class LoadableLinearMethod(LinearMethod):
    """A method that a linear can begin with: it creates the parameters that the loader fills."""

    @abstractmethod
    def create_weights(self, linear: "Linear", in_features: int, out_features: int, input_parts: int) -> None:
        """Create the linear's parameters except the bias: uninitialised, with torch's default dtype
        and device.

        `input_parts`: number of ranks that a row of the whole weight is divided over, `in_features`
        each.
        """


class UnquantizedLinearMethod(LoadableLinearMethod):
    """Weights as they are stored, `[out, in]`."""

    def create_weights(self, linear: "Linear", in_features: int, out_features: int, input_parts: int) -> None:
        """Create the plain weight."""
        linear.weight = parameter(torch.empty(out_features, in_features))

    def apply(self, linear: "Linear", x: Tensor) -> Tensor:
        """Multiply with the plain weight."""
        return F.linear(x, linear.weight, linear.bias)

    def process_weights_after_loading(self, linear: "Linear") -> None:
        """Switch to panels if compiled loops support this weight."""
        if can_pack(linear.weight):
            linear.method = PanelLinearMethod(linear)


class PanelLinearMethod(LinearMethod):
    """The method of a single linear on a CPU; it lays out the linear's weight and bias in panels.

    The plain weight is released, unless something else holds it too (tied embeddings). A gated
    linear's panels hold gate and up side by side.
    """

    def __init__(self, linear: "Linear") -> None:
        self.matmul = PanelLinear(linear.weight, linear.bias, gated=isinstance(linear, GatedLinear))
        # Registered as buffers, the panels count as the model's memory.
        linear.register_parameter("weight", None)
        linear.bias = None
        linear.register_buffer("panels", self.matmul.panels, persistent=False)
        linear.register_buffer("panel_bias", self.matmul.bias, persistent=False)

    def apply(self, linear: "Linear", x: Tensor) -> Tensor:
        """Multiply with the panels."""
        return self.matmul.without_gate(x)

    def apply_gated(self, linear: "Linear", x: Tensor) -> Tensor:
        """Multiply and apply the activation, in one pass."""
        return self.matmul(x)


UNQUANTIZED = UnquantizedLinearMethod()


class Linear(nn.Module):
    """A matrix product with uninitialised weights: the loader overwrites them, so initialising
    would waste time.

    The method decides which parameters exist besides `bias`: `weight`, or `packed` and `scales`.
    """

    weight: nn.Parameter
    packed: nn.Parameter
    scales: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        method: LoadableLinearMethod = UNQUANTIZED,
        input_parts: int = 1,
    ) -> None:
        """Create the weights; `input_parts` as in `LoadableLinearMethod.create_weights`."""
        super().__init__()
        self.method: LinearMethod = method
        self.input_parts = input_parts
        method.create_weights(self, in_features, out_features, input_parts)
        self.bias = parameter(torch.empty(out_features)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Map `[rows, in]` to `[rows, out]`."""
        return self.method.apply(self, x)


class GatedLinear(Linear):
    """Gate and up projections of an MLP as one matmul, with the activation: `silu(gate(x)) *
    up(x)`.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Map `[rows, in]` to `[rows, out / 2]`."""
        return self.method.apply_gated(self, x)


def process_weights_after_loading(model: nn.Module) -> None:
    """Let the method of every linear process its loaded weights. Idempotent."""
    for module in model.modules():
        if isinstance(module, Linear):
            module.method.process_weights_after_loading(module)


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of all parameters and buffers of a module, as stored in memory; tied ones
    count once.
    """
    tensors = [*model.parameters(), *model.buffers()]
    # By address: tied tensors have one.
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def parameter(tensor: Tensor) -> nn.Parameter:
    """Return a parameter that is not trained."""
    return nn.Parameter(tensor, requires_grad=False)
