"""An engine and the server in front of it, as a process.

`http_server.py` handles the socket, the signals and the shutdown.

In vLLM v0.33.0: `vllm/entrypoints/launchers/`.
"""

import socket
from pathlib import Path

import uvloop
from fastapi import FastAPI

from minivllm.engine.arg_utils import EngineArgs
from minivllm.engine.async_llm import AsyncLLM
from minivllm.engine.prometheus import PrometheusStatLogger
from minivllm.entrypoints.openai.api_server import build_app
from minivllm.entrypoints.openai.chat_template import read_template
from minivllm.entrypoints.openai.http_server import bind, make_server, signals_end_the_start, until_the_end
from minivllm.entrypoints.openai.lora_modules import check_lora_settings, lora_modules_of
from minivllm.entrypoints.openai.serving_models import OpenAIServingModels
from minivllm.entrypoints.openai.settings import FrontendArgs
from minivllm.entrypoints.xray.routes import StepFeed, add_xray


def serve(args: EngineArgs, settings: FrontendArgs, template: str | None) -> int:
    """Serve until a signal arrives or the engine ends; return the exit code. `template` is used if
    the model has none.

    Raises:
        MinivllmError: the arguments are invalid, or the port is in use.
        EngineDeadError: the engine died before it was ready.
    """
    check_lora_settings(args, settings)
    # First the port: to find it in use after loading a model would waste minutes.
    with bind(settings) as listening:
        template = read_template(settings.chat_template, args.model) or template
        # The event loop, which handles signals later, does not run yet.
        with signals_end_the_start():
            engine = AsyncLLM(args)
        try:
            return uvloop.run(_serve(engine, listening, args, settings, template))
        finally:
            engine.shutdown()


async def _serve(
    engine: AsyncLLM, listening: socket.socket, args: EngineArgs, settings: FrontendArgs, template: str | None
) -> int:
    app = make_app(engine, args, settings, template)
    await app.state.models.init_static_loras(lora_modules_of(settings.lora_modules))
    if settings.xray:
        name = (settings.served_model_name or [Path(args.model).name])[0]
        add_xray(app, StepFeed(engine, name), args.data_parallel_size)
    server = make_server(app, settings)
    return await until_the_end(server, engine, listening, settings, app.state.server)


def make_app(engine: AsyncLLM, args: EngineArgs, settings: FrontendArgs, template: str | None) -> FastAPI:
    """Return the application that serves an engine, and start counting the engine's metrics."""
    names = settings.served_model_name or [str(args.model)]
    metrics = PrometheusStatLogger(args, engine.engine_core.engines, names[0])
    engine.stat_logger = metrics
    for index, stats in enumerate(engine.engine_stats):
        # So that gauges have values before the first step.
        metrics.record(stats, engine.output_processor.take_stats(index), index)
    longest = engine.input_processor.limits.max_model_len
    folders = settings.runtime_lora_path
    models = OpenAIServingModels(names, str(args.model), longest, engine, folders)
    return build_app(engine, models, settings, template, metrics.registry)
