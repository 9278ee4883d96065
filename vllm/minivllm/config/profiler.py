"""The settings of `start_profile`. In vLLM v0.33.0: `vllm/config/profiler.py`."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from minivllm.config.checks import checked_arguments, require, require_counts, require_flags
from minivllm.errors import MinivllmError


@checked_arguments
@dataclass(kw_only=True, slots=True)
class ProfilerConfig:
    """Settings of PyTorch's profiler. An invalid value raises a `MinivllmError`.

    - `profiler`: "torch", or None for none. `torch_profiler_dir`: the folder for the traces.
    - `torch_profiler_with_stack`, `…_record_shapes`, `…_with_memory`, `…_with_flops`: what is
      recorded for each operation. `torch_profiler_use_gzip`: compress the trace.
    - `delay_iterations`: steps to skip after the start. `max_iterations`: the maximum that
      are recorded; 0: all until the end.
    """

    profiler: str | None = None
    torch_profiler_dir: str = ""
    torch_profiler_with_stack: bool = True
    torch_profiler_record_shapes: bool = False
    torch_profiler_with_memory: bool = False
    torch_profiler_with_flops: bool = False
    torch_profiler_use_gzip: bool = True
    delay_iterations: int = 0
    max_iterations: int = 0

    def __post_init__(self) -> None:
        require(self.profiler in (None, "torch"), f"profiler is {self.profiler!r}; it must be 'torch' or None")
        require(
            self.profiler is None or (isinstance(self.torch_profiler_dir, str) and bool(self.torch_profiler_dir)),
            f"torch_profiler_dir is {self.torch_profiler_dir!r}; it must name a folder for the traces",
        )
        require_flags(self, *(field.name for field in fields(self) if field.type is bool))
        require_counts(self, 0, "delay_iterations", "max_iterations")

    @classmethod
    def of(cls, value: "Mapping[str, Any] | ProfilerConfig | None") -> "ProfilerConfig | None":
        """Return the config for a dictionary, a config or None; return None if nothing is to be
        recorded.

        Raises:
            MinivllmError: an entry is invalid.
        """
        if isinstance(value, Mapping):
            value = cls(**value)
        if value is not None and not isinstance(value, ProfilerConfig):
            raise MinivllmError(f"profiler_config is {value!r}; it must be a dictionary, or ProfilerConfig(...)")
        return value if value is not None and value.profiler is not None else None
