"""minivllm: the twelve mechanisms of the lessons, fused into one small serving engine.

Names are handed on lazily, so that `import minivllm.core` stays free of torch.
"""

from importlib import import_module

__version__ = "0.1.0"

_HOMES = {
    "CompletionOutput": "minivllm.outputs",
    "EngineArgs": "minivllm.engine.arg_utils",
    "LLM": "minivllm.entrypoints.llm",
    "LLMEngine": "minivllm.engine.llm_engine",
    "MinivllmError": "minivllm.errors",
    "ModelConfig": "minivllm.config",
    "RequestOutput": "minivllm.outputs",
    "SamplingParams": "minivllm.sampling_params",
    "StructuredOutputsParams": "minivllm.config",
    "TextPrompt": "minivllm.inputs",
    "TokensPrompt": "minivllm.inputs",
    "UnsupportedModelError": "minivllm.errors",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'minivllm' has no attribute {name!r}; there are: {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
