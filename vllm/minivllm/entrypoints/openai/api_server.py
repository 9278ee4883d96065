"""The server's routes, over one `AsyncLLM`.

In vLLM v0.33.0: `vllm/entrypoints/launchers/app.py` (`build_app`),
`vllm/entrypoints/launchers/api_server/app_state.py` (`init_app_state`),
`vllm/entrypoints/launchers/api_server/routers.py` and the routers of each group of routes.
"""

import os
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

import minivllm
from minivllm.engine.async_llm import AsyncLLM
from minivllm.entrypoints.openai.answer import Answer, Json
from minivllm.entrypoints.openai.chat_answer import ChatAnswer
from minivllm.entrypoints.openai.completion_answer import CompletionAnswer
from minivllm.entrypoints.openai.errors import RequestError, register_exception_handlers
from minivllm.entrypoints.openai.middleware import (
    JSON_ONLY,
    AuthenticationMiddleware,
    BoundedRoute,
    HttpMetricsMiddleware,
    OpenRequestsMiddleware,
    ServerState,
)
from minivllm.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    LoadLoRAAdapterRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
    UnloadLoRAAdapterRequest,
)
from minivllm.entrypoints.openai.responses_answer import ResponsesAnswer
from minivllm.entrypoints.openai.responses_protocol import ResponsesRequest, not_stored
from minivllm.entrypoints.openai.serving_engine import OpenAIServing
from minivllm.entrypoints.openai.serving_models import OpenAIServingModels
from minivllm.entrypoints.openai.settings import FrontendArgs
from minivllm.entrypoints.openai.stream import as_json, as_long_json, with_cancellation
from minivllm.errors import EngineDeadError, MinivllmError

DEVELOPMENT_VARIABLES = ("MINIVLLM_SERVER_DEV_MODE", "VLLM_SERVER_DEV_MODE")


def build_app(
    engine: AsyncLLM,
    models: OpenAIServingModels,
    settings: FrontendArgs,
    template: str | None,
    registry: CollectorRegistry,
) -> FastAPI:
    """Return the application. `template` is the chat template; `registry` has the metrics."""
    app = FastAPI(title="minivllm", version=minivllm.__version__)
    app.router.route_class = BoundedRoute
    app.state.server = ServerState()
    app.state.models = models
    register_exception_handlers(app)
    _add_middleware(app, settings, registry)
    serving = OpenAIServing(engine, models, settings, template)
    _add_generation(app, serving)
    _add_tokenization(app, serving)
    _add_instruments(app, engine, registry)

    @app.get("/v1/models")
    async def show_models() -> Json:
        return models.show()

    if settings.runtime_lora_path:
        _add_adapters(app, models)

    # Anyone who reaches the server could slow it down with this route.
    if any(os.environ.get(name, "0") not in ("", "0") for name in DEVELOPMENT_VARIABLES):

        @app.post("/reset_prefix_cache")
        async def reset_prefix_cache() -> Json:
            return {"success": await engine.reset_prefix_cache()}

    return app


def _add_middleware(app: FastAPI, settings: FrontendArgs, registry: CollectorRegistry) -> None:
    """Add the middleware. The last one added sees a request first."""
    app.add_middleware(OpenRequestsMiddleware, state=app.state.server)
    if settings.api_key:
        app.add_middleware(AuthenticationMiddleware, keys=settings.api_key)
    app.add_middleware(CORSMiddleware, allow_origins=settings.allowed_origins, allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(HttpMetricsMiddleware, registry=registry)


def _add_generation(app: FastAPI, serving: OpenAIServing) -> None:
    engine = serving.engine
    checks = [*JSON_ONLY]
    # Only with a connector may a prefill engine hold blocks for a refused request.
    if engine.engine_args.kv_transfer_config:
        checks.append(_tell_if_declined(engine))

    async def answered(endpoint: type[Answer], request: GenerationRequest, raw: Request) -> Response:
        work = serving.create(endpoint, request, raw.headers)
        answer = await with_cancellation(work, raw, engine.parts)
        return answer if isinstance(answer, Response) else _as_json(answer)

    @app.post("/v1/completions", dependencies=checks)
    async def create_completion(request: CompletionRequest, raw: Request) -> Response:
        return await answered(CompletionAnswer, request, raw)

    @app.post("/v1/chat/completions", dependencies=checks)
    async def create_chat_completion(request: ChatCompletionRequest, raw: Request) -> Response:
        return await answered(ChatAnswer, request, raw)

    @app.post("/v1/responses", dependencies=checks)
    async def create_response(request: ResponsesRequest, raw: Request) -> Response:
        return await answered(ResponsesAnswer, request.as_chat(), raw)

    @app.get("/v1/responses/{response_id}")
    @app.post("/v1/responses/{response_id}/cancel")
    async def show_response(response_id: str) -> None:
        raise not_stored(response_id)


def _tell_if_declined(engine: AsyncLLM) -> Any:
    """Return a dependency that tells the prefill engine when a request is refused here while that
    engine still holds the keys and values of the request's prompt.

    Otherwise it would hold those blocks until their lease ends, and a client that keeps sending
    requests that cannot be served could fill its cache.
    """

    async def watch(request: Request) -> AsyncIterator[None]:
        try:
            yield
        except (MinivllmError, RequestValidationError) as refusal:
            # A server that is only busy (503) may serve the request later, and needs the blocks
            # then.
            if not isinstance(refusal, RequestError) or refusal.status < 500:
                body = await request.json()
                engine.decline(body.get("kv_transfer_params") if isinstance(body, dict) else None)
            raise

    return Depends(watch)


def _add_tokenization(app: FastAPI, serving: OpenAIServing) -> None:
    @app.post("/tokenize", dependencies=JSON_ONLY)
    async def tokenize(request: TokenizeCompletionRequest | TokenizeChatRequest) -> Response:
        return Response(await as_long_json(await serving.create_tokenize(request)), media_type="application/json")

    @app.post("/detokenize", dependencies=JSON_ONLY)
    async def detokenize(request: DetokenizeRequest) -> Response:
        return _as_json(await serving.create_detokenize(request))


def _as_json(answer: Json) -> Response:
    return Response(as_json(answer), media_type="application/json")


def _add_adapters(app: FastAPI, models: OpenAIServingModels) -> None:
    @app.post("/v1/load_lora_adapter", dependencies=JSON_ONLY)
    async def load_lora_adapter(request: LoadLoRAAdapterRequest) -> Response:
        return Response(await models.load_lora_adapter(request))

    @app.post("/v1/unload_lora_adapter", dependencies=JSON_ONLY)
    async def unload_lora_adapter(request: UnloadLoRAAdapterRequest) -> Response:
        return Response(await models.unload_lora_adapter(request))


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
