"""A cost of steps that is easy to add up by hand."""

from dataclasses import dataclass

from minivllm_simulate.cost_model import StepShape


@dataclass(frozen=True)
class LinearCost:
    """Seconds that grow with a step's counts."""

    per_step: float
    per_request: float = 0.0
    per_token: float = 0.0
    per_pair: float = 0.0

    def seconds(self, shape: StepShape) -> float:
        counted = self.per_request * shape.num_reqs + self.per_token * shape.num_tokens
        return self.per_step + counted + self.per_pair * shape.num_pairs
