"""Linear layers, and the one way to change how they compute: each passes its input to its
`LinearMethod`.

A linear's first method creates its parameters. After loading, it may transform them or hand over to
another method. The method computes the matmul:

    UnquantizedLinearMethod    weight [out, in]                       F.linear
    PanelLinearMethod          the same numbers in panels             compiled loops on a CPU, where they are faster
    QuantizedLinearMethod      packed integers and their scales       `minivllm.models.quantized`

To replace or wrap a linear, give it another method.

In vLLM v0.33.0: `vllm/model_executor/layers/linear.py` (`LinearMethodBase`,
`UnquantizedLinearMethod`, `MergedColumnParallelLinear`),
`vllm/model_executor/model_loader/utils.py` (`process_weights_after_loading`).
"""

import math
from abc import ABC, abstractmethod
from collections import Counter

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minivllm.kernels.cpu.linear_choice import most_rows_in_panels
from minivllm.kernels.cpu.panel_linear import PanelLinear
from minivllm.kernels.elementwise import silu_and_mul
from minivllm.logger import init_logger

logger = init_logger(__name__)


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
        """Switch to panels if they are the faster form on this CPU, at least for few rows."""
        most_rows = most_rows_in_panels(linear.weight, isinstance(linear, GatedLinear))
        if most_rows:
            linear.method = PanelLinearMethod(linear, most_rows)


class PanelLinearMethod(LinearMethod):
    """The method of a single linear on a CPU: its weight and bias in panels, for up to `most_rows`
    rows; `F.linear` for more.

    If panels serve all numbers of rows, the plain weight is released, unless something else holds
    it too (tied embeddings). A gated linear's panels hold gate and up side by side.
    """

    def __init__(self, linear: "Linear", most_rows: float = math.inf) -> None:
        self.most_rows = most_rows
        self.matmul = PanelLinear(linear.weight, linear.bias, gated=isinstance(linear, GatedLinear))
        # Registered as buffers, the panels count as the model's memory.
        linear.register_buffer("panels", self.matmul.panels, persistent=False)
        linear.register_buffer("panel_bias", self.matmul.bias, persistent=False)
        if most_rows == math.inf:
            linear.register_parameter("weight", None)
            linear.bias = None

    def apply(self, linear: "Linear", x: Tensor) -> Tensor:
        """Multiply with the panels, or with the plain weight."""
        if len(x) > self.most_rows:
            return F.linear(x, linear.weight, linear.bias)
        return self.matmul(x, activate=False)

    def apply_gated(self, linear: "Linear", x: Tensor) -> Tensor:
        """Multiply and apply the activation, in one pass if with the panels."""
        if len(x) > self.most_rows:
            return super().apply_gated(linear, x)
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
    """Let the method of every linear process its loaded weights, and log how they compute on a CPU.
    Idempotent.
    """
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    for linear in linears:
        linear.method.process_weights_after_loading(linear)
    forms = Counter(map(_form_on_cpu, linears))
    if forms.keys() - {None}:
        logger.info("Linears on this CPU: %s", ", ".join(f"{count} {form}" for form, count in forms.items()))


def _form_on_cpu(linear: Linear) -> str | None:
    if not isinstance(linear.method, PanelLinearMethod):
        return "as torch multiplies them" if linear.method is UNQUANTIZED and linear.weight.is_cpu else None
    most_rows = linear.method.most_rows
    return "in panels" if most_rows == math.inf else f"in panels up to {most_rows:.0f} rows"


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
