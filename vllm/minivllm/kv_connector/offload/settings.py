"""Settings of the tier in host memory, from `kv_connector_extra_config`.

In vLLM v0.33.0: `vllm/v1/kv_offload/cpu/spec.py` (`CPUOffloadingSpec`),
`vllm/distributed/kv_transfer/kv_connector/v1/simple_cpu_offload_connector.py`,
`vllm/config/vllm.py` (`_post_init_kv_transfer_config`, which makes a connector of
`kv_offloading_size`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any

from minivllm.config.checks import (
    Rule,
    at_least,
    check_fields,
    is_number,
    refuse_unknown,
    require,
)

BYTES = Rule(lambda value: is_number(value) and value > 0, "above 0 bytes")


@dataclass(frozen=True, kw_only=True)
class OffloadSettings:
    """The tier's settings in `kv_connector_extra_config`.

    - `cpu_bytes_to_use`: bytes of host memory, for all ranks together. `num_cpu_blocks`: instead of
      that, a number of blocks, one of which is a null block, as in the first pool.
    - `offload_prompt_only`: store no block with generated tokens.
    """

    cpu_bytes_to_use: Annotated[float, BYTES] | None = None
    num_cpu_blocks: Annotated[int, at_least(2)] | None = None
    offload_prompt_only: bool = True

    @classmethod
    def of(cls, extra_config: Mapping[str, Any]) -> "OffloadSettings":
        """Read and check the settings.

        Raises:
            MinivllmError: a key is unknown, or a value is invalid.
        """
        refuse_unknown("kv_connector_extra_config has no key", extra_config, [field.name for field in fields(cls)])
        return cls(**extra_config)

    def __post_init__(self) -> None:
        check_fields(self)
        require(
            self.cpu_bytes_to_use is not None or self.num_cpu_blocks is not None,
            "the host tier has no size: set kv_offloading_size, or cpu_bytes_to_use in kv_connector_extra_config",
        )
