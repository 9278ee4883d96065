"""The server: its routes, over one `AsyncLLM`, and its process.

`http_server.py` handles the socket, the signals and the shutdown.

In vLLM v0.33.0: `vllm/entrypoints/launchers/app.py` (`build_app`),
`vllm/entrypoints/launchers/api_server/app_state.py` (`init_app_state`),
`vllm/entrypoints/launchers/api_server/routers.py` and the routers of each group of routes.
"""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from functools import partial

import uvloop
from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

import minivllm
from minivllm.engine.arg_utils import EngineArgs
from minivllm.engine.async_llm import AsyncLLM
from minivllm.engine.prometheus import PrometheusStatLogger
from minivllm.entrypoints.openai import middleware, protocol
from minivllm.entrypoints.openai.answer import Answer, Json
from minivllm.entrypoints.openai.chat_answer import ChatAnswer
from minivllm.entrypoints.openai.chat_template import read_template
from minivllm.entrypoints.openai.completion_answer import CompletionAnswer
from minivllm.entrypoints.openai.errors import EXCEPTION_HANDLERS, RequestError
from minivllm.entrypoints.openai.http_server import bind, signals_end_the_start, until_the_end
from minivllm.entrypoints.openai.responses_answer import ResponsesAnswer
from minivllm.entrypoints.openai.responses_protocol import ResponsesRequest, not_stored
from minivllm.entrypoints.openai.serving_engine import OpenAIServing
from minivllm.entrypoints.openai.serving_models import check_lora_settings
from minivllm.entrypoints.openai.settings import FrontendArgs
from minivllm.entrypoints.openai.stream import as_json, with_cancellation
from minivllm.entrypoints.xray.routes import StepFeed, add_xray
from minivllm.errors import EngineDeadError, MinivllmError


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
            return uvloop.run(_serve(engine, listening, settings, template))
        finally:
            engine.shutdown()


async def _serve(engine: AsyncLLM, listening: socket.socket, settings: FrontendArgs, template: str | None) -> int:
    app = await make_app(engine, settings, template)
    return await until_the_end(app, engine, listening, settings)


async def make_app(engine: AsyncLLM, settings: FrontendArgs, template: str | None) -> FastAPI:
    """Return the application that serves an engine, whose metrics are counted from now on.

    Raises:
        MinivllmError: an adapter that the server starts with cannot be served.
    """
    app = FastAPI(title="minivllm", version=minivllm.__version__, exception_handlers=EXCEPTION_HANDLERS)
    app.router.route_class = middleware.BoundedRoute
    app.state.server = middleware.ServerState()
    serving = OpenAIServing(engine, settings, template)
    metrics = PrometheusStatLogger(engine.engine_args, engine.engine_core.engines, serving.models.names[0])
    engine.stat_logger = metrics
    for index, stats in enumerate(engine.engine_stats):
        # So that gauges have values before the first step.
        metrics.record(stats, engine.output_processor.take_stats(index), index)
    # The last one added sees a request first.
    app.add_middleware(middleware.OpenRequestsMiddleware)
    if settings.api_key:
        app.add_middleware(middleware.AuthenticationMiddleware, keys=settings.api_key)
    app.add_middleware(CORSMiddleware, allow_origins=settings.allowed_origins, allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(middleware.HttpMetricsMiddleware, registry=metrics.registry)
    _add_api(app, serving)
    _add_instruments(app, engine, metrics.registry)
    await serving.models.init_static_loras()
    if settings.xray:
        name = (settings.served_model_name or [engine.model_name])[0]
        add_xray(app, StepFeed(engine, name), engine.engine_args.data_parallel_size)
    return app


def _add_api(app: FastAPI, serving: OpenAIServing) -> None:
    engine = serving.engine

    async def tell_if_declined(request: Request) -> AsyncIterator[None]:
        """Tell the prefill engine when a request is refused here while that engine still holds the
        keys and values of the request's prompt.

        Otherwise it would hold those blocks until their lease ends, and a client that keeps sending
        requests that cannot be served could fill its cache.
        """
        try:
            yield
        except (MinivllmError, RequestValidationError) as refusal:
            # A server that is only busy (503) may serve the request later, and needs the blocks
            # then.
            if not isinstance(refusal, RequestError) or refusal.status < 500:
                body = await request.json()
                engine.decline(body.get("kv_transfer_params") if isinstance(body, dict) else None)
            raise

    # Only with a connector may a prefill engine hold blocks for a refused request.
    checks = [*middleware.JSON_ONLY, *([Depends(tell_if_declined)] if engine.engine_args.kv_transfer_config else [])]

    async def answered(endpoint: type[Answer], request: protocol.GenerationRequest, raw: Request) -> Response:
        answer = await with_cancellation(endpoint(serving, request, raw.headers).create(), raw, engine.parts)
        return answer if isinstance(answer, Response) else _as_json(answer)

    @app.post("/v1/completions", dependencies=checks)
    async def create_completion(request: protocol.CompletionRequest, raw: Request) -> Response:
        return await answered(CompletionAnswer, request, raw)

    @app.post("/v1/chat/completions", dependencies=checks)
    async def create_chat_completion(request: protocol.ChatCompletionRequest, raw: Request) -> Response:
        return await answered(ChatAnswer, request, raw)

    @app.post("/v1/responses", dependencies=checks)
    async def create_response(request: ResponsesRequest, raw: Request) -> Response:
        return await answered(ResponsesAnswer, request.as_chat(), raw)

    @app.get("/v1/responses/{response_id}")
    @app.post("/v1/responses/{response_id}/cancel")
    async def show_response(response_id: str) -> None:
        raise not_stored(response_id)

    @app.post("/tokenize", dependencies=middleware.JSON_ONLY)
    async def tokenize(request: protocol.TokenizeRequest) -> Response:
        # A million ids take a while to write.
        return await asyncio.to_thread(_as_json, await serving.create_tokenize(request))

    app.post("/detokenize", dependencies=middleware.JSON_ONLY)(serving.create_detokenize)

    app.get("/v1/models")(serving.models.show_available_models)
    if serving.settings.runtime_lora_path:
        post = partial(app.post, dependencies=middleware.JSON_ONLY, response_class=Response)
        post("/v1/load_lora_adapter")(serving.models.load_lora_adapter)
        post("/v1/unload_lora_adapter")(serving.models.unload_lora_adapter)


def _as_json(answer: Json) -> Response:
    return Response(as_json(answer), media_type="application/json")


def _add_instruments(app: FastAPI, engine: AsyncLLM, registry: CollectorRegistry) -> None:
    @app.get("/health")
    @app.api_route("/ping", methods=["GET", "POST"], include_in_schema=False)
    async def health() -> Response:
        try:
            await engine.check_health()
        except EngineDeadError:
            return Response(status_code=503)
        return Response(status_code=200)

    @app.get("/load")
    async def load() -> Json:
        return {"server_load": app.state.server.num_open}

    @app.get("/version")
    async def version() -> Json:
        return {"version": minivllm.__version__}

    @app.get("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        return Response(generate_latest(registry), headers={"content-type": CONTENT_TYPE_LATEST})

    # Anyone who reaches the server could slow it down with this route.
    if any(os.environ.get(name, "0") not in ("", "0") for name in ("MINIVLLM_SERVER_DEV_MODE", "VLLM_SERVER_DEV_MODE")):

        @app.post("/reset_prefix_cache")
        async def reset_prefix_cache() -> Json:
            return {"success": await engine.reset_prefix_cache()}
