"""Turn exceptions into errors on the wire: `{"error": {message, type, param, code}}`.

A body that does not fit the request's schema is a "Bad Request", and `param` is the path to the
field. Anything else that is wrong with a request is a "BadRequestError", and `param` is the field,
if one is to blame. Unknown paths and methods get FastAPI's own errors.

In vLLM v0.33.0: `vllm/entrypoints/serve/exception_handling/`.
"""

import re
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from minivllm.errors import EngineDeadError, EngineStoppedError, MinivllmError
from minivllm.logger import init_logger

logger = init_logger(__name__)
# A body of a megabyte can be wrong in a million places: how much of it a message tells.
MAX_ERRORS, MAX_INPUT_CHARACTERS, MAX_ERROR_CHARACTERS = 10, 200, 1000
BRANCH = re.compile(r"[\[\]{}()]|Request\Z|\A(str|int|float|bool|bytes|none|list|dict)\Z")
"""The names of types, which pydantic inserts for each member of a union that it has tried."""


class RequestError(MinivllmError):
    """An error in a request whose status is not 400; by default, its type is named after the
    status.
    """

    def __init__(self, message: str, status: int, kind: str | None = None, parameter: str | None = None) -> None:
        super().__init__(message, parameter)
        self.status = HTTPStatus(status)
        self.kind = kind or self.status.phrase.replace(" ", "").removesuffix("Error") + "Error"


def error_body(error: Exception) -> dict[str, dict[str, Any]]:
    """Return the body for this exception; a fault of our own is logged, and the client learns only
    its kind.
    """
    known = _known(error)
    readable = str(known).encode("utf8", "backslashreplace").decode()  # it may quote half a character
    return {"error": {"message": readable, "type": known.kind, "param": known.parameter, "code": known.status.value}}


def _known(error: Exception) -> RequestError:
    if isinstance(error, RequestError):
        return error
    if isinstance(error, MinivllmError):
        return RequestError(str(error), 400, parameter=error.parameter)
    # A client may try again, at another server or later.
    if isinstance(error, EngineStoppedError):
        return RequestError(str(error), 503)
    # The reason may name files and addresses of this machine: it goes to the log only.
    if isinstance(error, EngineDeadError):
        return RequestError("the engine's core has ended; the server's log says why", 500)
    logger.error("A request failed", exc_info=error)
    return RequestError("internal server error", 500)


def json_response(error: Exception) -> JSONResponse:
    """Return the complete HTTP reply for this exception."""
    body = error_body(error)
    return JSONResponse(body, body["error"]["code"])


async def _handle(request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, RequestValidationError):
        return json_response(_of_validation(error.errors()))
    if isinstance(error, MinivllmError | EngineDeadError):
        return json_response(error)
    # FastAPI wraps whatever is raised while a body is read.
    if isinstance(error.__cause__, MinivllmError):
        return json_response(error.__cause__)
    if not isinstance(error, HTTPException):
        return json_response(RequestError("internal server error", 500))
    if error.status_code in (404, 405):
        return JSONResponse({"detail": error.detail}, error.status_code, error.headers)
    return json_response(RequestError(str(error.detail), error.status_code, HTTPStatus(error.status_code).phrase))


def _of_validation(errors: Sequence[Any]) -> MinivllmError:
    # Our own checks run inside of pydantic, which wraps their exceptions.
    for error in errors:
        if isinstance(own := error.get("ctx", {}).get("error"), MinivllmError):
            return own
    lines = "; ".join(_line(error) for error in errors[:MAX_ERRORS])
    message = f"{len(errors)} validation error{'s' * (len(errors) > 1)}: {lines}"
    return RequestError(message, 400, "Bad Request", _path(errors[0]["loc"]))


def _line(error: Any) -> str:
    value = error.get("input")
    # A whole conversation would bury the message.
    is_long = isinstance(value, dict | list | bytes)
    shown = f"{type(value).__name__} of {len(value)}" if is_long else str(value)[:MAX_INPUT_CHARACTERS]
    return f"{_path(error['loc'])}: {error['msg']}, not {shown}"[:MAX_ERROR_CHARACTERS]


def _path(location: Sequence[int | str]) -> str:
    """Return the path to a field, without the names of a union's members."""
    parts = [str(part) for part in location]
    return ".".join([part for part in parts if not BRANCH.search(part)] or parts)


HANDLED = (RequestValidationError, HTTPException, MinivllmError, EngineDeadError, Exception)
EXCEPTION_HANDLERS: dict[Any, Any] = dict.fromkeys(HANDLED, _handle)
"""Handlers with which an application answers every exception by an error on the wire."""
