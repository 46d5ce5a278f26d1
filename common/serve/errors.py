"""Errors as clients get them: OpenAI's error object, and never a part of an answer.

See common/serve/README.md#what-it-answers"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from starlette.responses import Response

from common.serve.engine_loop import EngineError, EngineStopped, PromptTooLong, QueueFull

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}
RETRY_AFTER_S = 1
MAX_MESSAGE_CHARS = 1000  # characters of a message, which may quote what the client has sent


class ApiError(Exception):
    """An error response. `param`: the invalid field. `code`: an identifier for programs."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        message = message[:MAX_MESSAGE_CHARS]
        param = param and param[:MAX_MESSAGE_CHARS]
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def content(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def headers(self) -> dict[str, str]:
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        return {"Retry-After": str(RETRY_AFTER_S)} if self.status in (429, 503) else {}


def to_json(content: Any) -> bytes:
    """Return `content` as JSON in ASCII: some clients end lines at U+2028."""
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()


def json_response(content: Any, status: int = 200, headers: Any = None) -> Response:
    return Response(to_json(content), status, headers, media_type="application/json")


def error_response(error: ApiError) -> Response:
    return json_response(error.content(), error.status, error.headers())


def bad(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param, code)


def api_error(error: Exception, fields: Collection[str] = ()) -> ApiError:
    """Return the `ApiError` for an exception of the engine. `fields` are those of the body; if the
    message begins with one of them, it becomes `param`."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFull):
        return ApiError(429, str(error), None, "queue_full")
    if isinstance(error, PromptTooLong):
        return bad(str(error), "prompt", "context_length_exceeded")
    if isinstance(error, ValueError):
        first = str(error).split(" ")[0].rstrip(":")
        return bad(str(error), first if first in fields else None)
    if isinstance(error, EngineError):
        return ApiError(503 if isinstance(error, EngineStopped) else 500, str(error))
    return ApiError(500, f"the server has failed: {type(error).__name__}")  # details are in the log
