"""minivllm: the twelve mechanisms of the lessons, fused into one small serving engine.

Names are handed on lazily, so that `import minivllm.core` stays free of torch.
"""

from importlib import import_module

__version__ = "0.1.0"

_HOMES = {
    "LLM": "minivllm.entrypoints.llm",
    "ModelConfig": "minivllm.config",
    "MinivllmError": "minivllm.errors",
    "RequestOutput": "minivllm.outputs",
    "SamplingParams": "minivllm.sampling_params",
    "UnsupportedModelError": "minivllm.errors",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'minivllm' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
