"""minivllm: the twelve mechanisms of the lessons, fused into one small serving engine.

Names are imported lazily, so that `import minivllm.core` stays free of torch. Whatever a script for
vLLM imports from any of vLLM's modules can be imported from here.
"""

from importlib import import_module

__version__ = "0.1.0"
__version_tuple__ = (0, 1, 0)

_HOMES = {
    "AsyncEngineArgs": "minivllm.engine.arg_utils",
    "AsyncLLM": "minivllm.engine.async_llm",
    "AsyncLLMEngine": "minivllm.engine.async_llm",
    "CompletionOutput": "minivllm.outputs",
    "EngineArgs": "minivllm.engine.arg_utils",
    "FlexibleArgumentParser": "minivllm.config.flags",
    "KVTransferConfig": "minivllm.config",
    "LLM": "minivllm.entrypoints.llm",
    "LLMEngine": "minivllm.engine.llm_engine",
    "Logprob": "minivllm.outputs",
    "MinivllmError": "minivllm.errors",
    "LoRARequest": "minivllm.core.lora_request",
    "ModelConfig": "minivllm.config",
    "PromptType": "minivllm.inputs",
    "RequestOutput": "minivllm.outputs",
    "RequestOutputKind": "minivllm.sampling_params",
    "SamplingParams": "minivllm.sampling_params",
    "StructuredOutputsParams": "minivllm.config",
    "TextPrompt": "minivllm.inputs",
    "TokensPrompt": "minivllm.inputs",
    "UnsupportedModelError": "minivllm.errors",
    "cleanup_dist_env_and_memory": "minivllm.platforms.device_memory",
    "init_logger": "minivllm.logger",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'minivllm' has no attribute {name!r}; it has: {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
