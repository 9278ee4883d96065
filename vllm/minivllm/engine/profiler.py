"""Trace steps with PyTorch's profiler. In vLLM v0.33.0: `vllm/profiler/wrapper.py`
(`TorchProfilerWrapper`).
"""

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from minivllm.config.profiler import ProfilerConfig
from minivllm.engine.arg_utils import EngineArgs
from minivllm.errors import MinivllmError
from minivllm.logger import init_logger

logger = init_logger(__name__)


class TorchProfiler:
    """Records the steps of an engine in this process, and writes them as a trace for a browser's
    trace viewer.
    """

    def __init__(self, config: ProfilerConfig, prefix: str | None = None) -> None:
        self._config = config
        self._prefix = prefix or "minivllm"
        self._num_steps = 0
        self._profile: torch.profiler.profile | None = None
        self._done = False

    def before_step(self) -> None:
        """Start recording at the first step after `delay_iterations`."""
        if self._profile is not None or self._done or self._num_steps < self._config.delay_iterations:
            return
        config = self._config
        self._profile = torch.profiler.profile(
            with_stack=config.torch_profiler_with_stack,
            record_shapes=config.torch_profiler_record_shapes,
            profile_memory=config.torch_profiler_with_memory,
            with_flops=config.torch_profiler_with_flops,
        )
        self._profile.start()

    def after_step(self) -> None:
        """Stop recording after the last requested step."""
        self._num_steps += 1
        last = self._config.max_iterations and self._config.delay_iterations + self._config.max_iterations
        if last and self._num_steps >= last:
            self.stop()

    def stop(self) -> Path | None:
        """Stop recording, write the trace and return its path; return None if no step was recorded."""
        self._done = True
        profile, self._profile = self._profile, None
        if profile is None:
            return None
        profile.stop()
        folder = Path(self._config.torch_profiler_dir)
        folder.mkdir(parents=True, exist_ok=True)
        ending = "json.gz" if self._config.torch_profiler_use_gzip else "json"
        path = folder / f"{self._prefix}_{os.getpid()}.{time.time_ns()}.pt.trace.{ending}"
        profile.export_chrome_trace(str(path))
        logger.info("Profile of %d steps: %s", self._num_steps - self._config.delay_iterations, path)
        return path


def make_profiler(args: EngineArgs, prefix: str | None, limits: Mapping[str, int | None]) -> TorchProfiler:
    """Create a profiler whose limits override `profiler_config`'s unless they are None.

    Raises:
        MinivllmError: there is no `profiler_config`, or the engine computes in other processes.
    """
    config = ProfilerConfig.of(args.profiler_config)
    if config is None:
        raise MinivllmError('nothing is recorded without profiler_config={"profiler": "torch", …}')
    if args.multiprocess or args.tensor_parallel_size > 1 or args.distributed_executor_backend == "mp":
        raise MinivllmError("only an engine in this process can be recorded: leave out multiprocess and use one rank")
    changes = {name: value for name, value in limits.items() if value is not None}
    return TorchProfiler(replace(config, **changes), prefix)
