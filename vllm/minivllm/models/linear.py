"""Linear layers, and the one way to change how they compute: each passes its input to its `LinearMethod`.

The method that a linear begins with creates its parameters; after loading they may be transformed, or another method
take over. It computes with them:

    UnquantizedLinearMethod    weight [out, in]                       F.linear
    PanelLinearMethod          the same numbers in panels             compiled loops on a CPU; chosen after loading
    QuantizedLinearMethod      packed integers and their scales       `minivllm.models.quantized`

To replace or wrap a linear, give it another method.

In vLLM v0.33.0: `vllm/model_executor/layers/linear.py` (`LinearMethodBase`, `UnquantizedLinearMethod`,
`MergedColumnParallelLinear`), `vllm/model_executor/model_loader/utils.py` (`process_weights_after_loading`).
"""

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivllm.kernels.cpu.panel_linear import PanelLinear, can_pack
from minivllm.kernels.elementwise import silu_and_mul


class LinearMethod(ABC):
    """How a linear computes. One object may serve many linears, so per-linear state is stored on the linear."""

    @abstractmethod
    def apply(self, linear: "Linear", x: Tensor) -> Tensor:
        """`x @ weight.T + bias`: `[rows, in]` to `[rows, out]`."""

    def apply_gated(self, linear: "Linear", x: Tensor) -> Tensor:
        """`silu(gate) * up` of the two halves of the product: `[rows, in]` to `[rows, out / 2]`.

        A method overrides this if it can fuse the activation into the product.
        """
        return silu_and_mul(self.apply(linear, x))

    def process_weights_after_loading(self, linear: "Linear") -> None:
        """Changes the weights' layout, or gives the linear another method. Called after all weights are loaded."""
        return


class LoadableLinearMethod(LinearMethod):
    """A method that a linear can begin with: it creates the parameters that the loader fills."""

    @abstractmethod
    def create_weights(self, linear: "Linear", in_features: int, out_features: int, input_parts: int) -> None:
        """Creates the linear's parameters except the bias: uninitialised, with torch's default dtype and device.

        `input_parts`: number of ranks that a row of the whole weight is divided over, `in_features` each.
        """


class UnquantizedLinearMethod(LoadableLinearMethod):
    """Weights as they are stored, `[out, in]`."""

    def create_weights(self, linear: "Linear", in_features: int, out_features: int, input_parts: int) -> None:
        """As `LoadableLinearMethod`."""
        linear.weight = parameter(torch.empty(out_features, in_features))

    def apply(self, linear: "Linear", x: Tensor) -> Tensor:
        """As `LinearMethod`."""
        return F.linear(x, linear.weight, linear.bias)

    def process_weights_after_loading(self, linear: "Linear") -> None:
        """Switches to panels if compiled loops support this weight."""
        if can_pack(linear.weight):
            linear.method = PanelLinearMethod(linear)


class PanelLinearMethod(LinearMethod):
    """The method of a single linear on a CPU; it lays out the linear's weight and bias in panels.

    The plain weight is released, unless something else holds it too (tied embeddings). A gated linear's panels hold
    gate and up side by side.
    """

    def __init__(self, linear: "Linear") -> None:
        self.product = PanelLinear(linear.weight, linear.bias, gated=isinstance(linear, GatedLinear))
        linear.register_parameter("weight", None)
        linear.bias = None
        linear.register_buffer("panels", self.product.panels, persistent=False)
        linear.register_buffer("panel_bias", self.product.bias, persistent=False)

    def apply(self, linear: "Linear", x: Tensor) -> Tensor:
        """As `LinearMethod`."""
        return self.product.without_gate(x)

    def apply_gated(self, linear: "Linear", x: Tensor) -> Tensor:
        """As `LinearMethod`, in one pass."""
        return self.product(x)


UNQUANTIZED = UnquantizedLinearMethod()


class Linear(nn.Module):
    """A matrix product with uninitialised weights: the loader overwrites them, so initialising would waste time.

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
        """`input_parts` as in `LoadableLinearMethod.create_weights`."""
        super().__init__()
        self.method: LinearMethod = method
        self.input_parts = input_parts
        method.create_weights(self, in_features, out_features, input_parts)
        self.bias = parameter(torch.empty(out_features)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """`[rows, in]` to `[rows, out]`."""
        return self.method.apply(self, x)


class GatedLinear(Linear):
    """Gate and up projections of an MLP as one product, with the activation: `silu(gate(x)) * up(x)`."""

    def forward(self, x: Tensor) -> Tensor:
        """`[rows, in]` to `[rows, out / 2]`."""
        return self.method.apply_gated(self, x)


def process_weights_after_loading(model: nn.Module) -> None:
    """Lets the method of every linear process its loaded weights. Idempotent."""
    for module in model.modules():
        if isinstance(module, Linear):
            module.method.process_weights_after_loading(module)


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers of a module, as stored in memory; tied ones count once."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def parameter(tensor: Tensor) -> nn.Parameter:
    """A parameter that is not trained."""
    return nn.Parameter(tensor, requires_grad=False)
