"""The server's routes, over one `AsyncLLM`.

In vLLM v0.33.0: `vllm/entrypoints/launchers/app.py` (`build_app`),
`vllm/entrypoints/launchers/api_server/app_state.py` (`init_app_state`),
`vllm/entrypoints/launchers/api_server/routers.py` and the routers of each group of routes.
"""

import os
from collections.abc import Awaitable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from pydantic import BaseModel

import minivllm
from minivllm.engine.async_llm import AsyncLLM
from minivllm.entrypoints.openai.declined import tell_if_declined
from minivllm.entrypoints.openai.errors import ErrorResponse, register_exception_handlers
from minivllm.entrypoints.openai.middleware import (
    JSON_ONLY,
    AuthenticationMiddleware,
    BodySizeMiddleware,
    OpenRequestsMiddleware,
    ServerState,
    XRequestIdMiddleware,
)
from minivllm.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    CompletionRequest,
    CompletionResponse,
    DetokenizeRequest,
    DetokenizeResponse,
    LoadLoRAAdapterRequest,
    ModelList,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
    TokenizeResponse,
    UnloadLoRAAdapterRequest,
)
from minivllm.entrypoints.openai.serving_chat import OpenAIServingChat
from minivllm.entrypoints.openai.serving_completion import OpenAIServingCompletion
from minivllm.entrypoints.openai.serving_models import OpenAIServingModels
from minivllm.entrypoints.openai.serving_tokenization import OpenAIServingTokenization
from minivllm.entrypoints.openai.settings import FrontendArgs
from minivllm.entrypoints.openai.stream import with_cancellation
from minivllm.errors import EngineDeadError

DEVELOPMENT_VARIABLES = ("MINIVLLM_SERVER_DEV_MODE", "VLLM_SERVER_DEV_MODE")
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse} for status in (400, 404, 413, 422, 500, 503)
}


def build_app(
    engine: AsyncLLM,
    models: OpenAIServingModels,
    settings: FrontendArgs,
    template: str | None,
    registry: CollectorRegistry,
) -> FastAPI:
    """Return the application. `template` is the chat template; `registry` has the metrics."""
    app = FastAPI(title="minivllm", version=minivllm.__version__)
    app.state.server = ServerState()
    register_exception_handlers(app)
    _add_middleware(app, settings)
    _add_generation(app, engine, models, settings, template)
    _add_tokenization(app, OpenAIServingTokenization(engine, models, settings, template))
    _add_instruments(app, engine, registry)

    @app.get("/v1/models", response_model=ModelList)
    async def show_models() -> ModelList:
        return models.show()

    if settings.runtime_lora_path:
        _add_adapters(app, models)

    # Anyone who reaches the server could slow it down with this route.
    if any(os.environ.get(name, "0") not in ("", "0") for name in DEVELOPMENT_VARIABLES):

        @app.post("/reset_prefix_cache")
        async def reset_prefix_cache() -> JSONResponse:
            return JSONResponse({"success": await engine.reset_prefix_cache()})

    return app


def _add_middleware(app: FastAPI, settings: FrontendArgs) -> None:
    """Add the middleware. The last one added sees a request first."""
    app.add_middleware(BodySizeMiddleware)
    app.add_middleware(OpenRequestsMiddleware, state=app.state.server)
    if settings.api_key:
        app.add_middleware(AuthenticationMiddleware, keys=settings.api_key)
    if settings.enable_request_id_headers:
        app.add_middleware(XRequestIdMiddleware)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=settings.allowed_origins,
        allow_credentials=settings.allow_credentials,
        allow_methods=settings.allowed_methods,
        allow_headers=settings.allowed_headers,
    )


def _add_generation(
    app: FastAPI, engine: AsyncLLM, models: OpenAIServingModels, settings: FrontendArgs, template: str | None
) -> None:
    completions = OpenAIServingCompletion(engine, models, settings, template)
    chat = OpenAIServingChat(engine, models, settings, template)
    # Only with a connector may a prefill engine hold blocks for a refused request.
    checks = [*JSON_ONLY, tell_if_declined(engine)] if engine.engine_args.kv_transfer_config else JSON_ONLY

    @app.post("/v1/completions", dependencies=checks, response_model=CompletionResponse, responses=ERRORS)
    async def create_completion(request: CompletionRequest, raw: Request) -> Response:
        return await _answered(with_cancellation(completions.create(request, raw.headers), raw, engine.parts))

    @app.post("/v1/chat/completions", dependencies=checks, response_model=ChatCompletionResponse, responses=ERRORS)
    async def create_chat_completion(request: ChatCompletionRequest, raw: Request) -> Response:
        return await _answered(with_cancellation(chat.create(request, raw.headers), raw, engine.parts))


async def _answered(work: Awaitable[BaseModel | Response]) -> Response:
    answer = await work
    if isinstance(answer, BaseModel):
        return Response(answer.model_dump_json(), media_type="application/json")
    return answer


def _add_tokenization(app: FastAPI, serving: OpenAIServingTokenization) -> None:
    @app.post("/tokenize", dependencies=JSON_ONLY, response_model=TokenizeResponse, responses=ERRORS)
    async def tokenize(request: TokenizeCompletionRequest | TokenizeChatRequest) -> Response:
        return await _answered(serving.create_tokenize(request))

    @app.post("/detokenize", dependencies=JSON_ONLY, response_model=DetokenizeResponse, responses=ERRORS)
    async def detokenize(request: DetokenizeRequest) -> Response:
        return await _answered(serving.create_detokenize(request))


def _add_adapters(app: FastAPI, models: OpenAIServingModels) -> None:
    @app.post("/v1/load_lora_adapter", dependencies=JSON_ONLY, responses=ERRORS)
    async def load_lora_adapter(request: LoadLoRAAdapterRequest) -> Response:
        return Response(await models.load_lora_adapter(request))

    @app.post("/v1/unload_lora_adapter", dependencies=JSON_ONLY, responses=ERRORS)
    async def unload_lora_adapter(request: UnloadLoRAAdapterRequest) -> Response:
        return Response(await models.unload_lora_adapter(request))


def _add_instruments(app: FastAPI, engine: AsyncLLM, registry: CollectorRegistry) -> None:
    async def health() -> Response:
        try:
            await engine.check_health()
        except EngineDeadError:
            return Response(status_code=503)
        return Response(status_code=200)

    app.get("/health", responses={503: {}})(health)
    app.api_route("/ping", methods=["GET", "POST"], responses={503: {}}, include_in_schema=False)(health)

    @app.get("/load")
    async def load() -> JSONResponse:
        return JSONResponse({"server_load": app.state.server.num_open})

    @app.get("/version")
    async def version() -> JSONResponse:
        return JSONResponse({"version": minivllm.__version__})

    @app.get("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        return Response(generate_latest(registry), headers={"content-type": CONTENT_TYPE_LATEST})
