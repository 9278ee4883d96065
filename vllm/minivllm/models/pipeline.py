"""Pipeline parallelism: each stage holds some of the layers, and hands the hidden states on to the
next stage.

Only `2 * tokens * hidden_size` numbers cross to the next stage in a step (the last layer's output
and the residual stream), compared with two all-reduces in every layer with tensor parallelism. So
this is how to divide a model over slow links. But a step takes as long as before, and each stage is
idle while the others compute. So several steps, of different requests, must be in flight: with m
steps for p stages, a fraction of min(m, p) / p of the stages is busy.

The first stage holds the embedding, the last one the final norm and the head. Huang et al. 2019,
"GPipe", arXiv:1811.06965. In vLLM v0.33.0: `vllm/distributed/utils.py` (`get_pp_indices`),
`vllm/model_executor/models/utils.py` (`make_layers`, `PPMissingLayer`).
"""

from dataclasses import dataclass, replace

from minivllm.config import ModelConfig
from minivllm.errors import MinivllmError


@dataclass(frozen=True)
class Stage:
    """A pipeline stage: number `rank`, counted from 0, of `size`."""

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """Return whether this stage starts from token ids."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Return whether this stage computes logits."""
        return self.rank == self.size - 1


def get_pp_indices(num_hidden_layers: int, pp_rank: int, pp_size: int) -> tuple[int, int]:
    """Return the first layer of a stage, and the one after its last.

    Layers left over after an even division go to the stages before the last, from the back, since
    the last one also computes the head.

    Raises:
        MinivllmError: there are more stages than layers.
    """
    if pp_size > num_hidden_layers:
        raise MinivllmError(
            f"pipeline_parallel_size is {pp_size}, but the model has {num_hidden_layers} layers, and each stage needs "
            f"at least one: use at most {num_hidden_layers}"
        )
    layers, remaining = divmod(num_hidden_layers, pp_size)
    sizes = [layers] * pp_size
    for index in range(remaining):
        sizes[-2 - index] += 1  # from the last but one on, backwards
    start = sum(sizes[:pp_rank])
    return start, start + sizes[pp_rank]


def stage_config(config: ModelConfig, stage: Stage) -> ModelConfig:
    """Return the config of one stage's layers. Raises `MinivllmError` if there are more stages
    than layers.
    """
    if stage.size == 1:
        return config
    start, end = get_pp_indices(config.num_hidden_layers, stage.rank, stage.size)
    kinds = config.layer_types[start:end] if config.layer_types else None
    return replace(config, num_hidden_layers=end - start, layer_types=kinds)
