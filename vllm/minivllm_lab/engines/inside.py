"""Access to the internals of an engine in this process, for lessons, benchmarks and tests.

A server's front end uses `EngineCoreClient` instead.
"""

from minivllm.engine.core import EngineCore
from minivllm.engine.inproc_client import InprocClient
from minivllm.engine.llm_engine import LLMEngine
from minivllm.entrypoints.llm import LLM
from minivllm.errors import MinivllmError
from minivllm.executor.uniproc_executor import UniprocExecutor
from minivllm.worker.model_runner import ModelRunner


def core_of(engine: LLM | LLMEngine) -> EngineCore:
    """Return the core of an engine.

    Raises:
        MinivllmError: it runs in another process.
    """
    client = engine.llm_engine.engine_core if isinstance(engine, LLM) else engine.engine_core
    if not isinstance(client, InprocClient):
        raise MinivllmError("the core of this engine runs in another process: leave multiprocess out to look into it")
    return client.engine_core


def runner_of(engine: LLM | LLMEngine | EngineCore) -> ModelRunner:
    """Return the model runner of an engine, or of its core.

    Raises:
        MinivllmError: it runs in another process, as with several ranks.
    """
    core = engine if isinstance(engine, EngineCore) else core_of(engine)
    if not isinstance(core.executor, UniprocExecutor):
        raise MinivllmError("the model of this engine runs in other processes: use one rank to look into it")
    return core.executor.worker.runner
