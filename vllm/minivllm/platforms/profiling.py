"""Named ranges for PyTorch's profiler.

In vLLM v0.33.0: `vllm/v1/utils.py` (`record_function_or_nullcontext`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_NOTHING = nullcontext()


def record_function_or_nullcontext(name: str) -> AbstractContextManager[Any]:
    """Return a profiler range while a profiler runs, else a no-op: an unrecorded range would
    still cost 8 µs.
    """
    return torch.profiler.record_function(name) if torch.autograd._profiler_enabled() else _NOTHING
