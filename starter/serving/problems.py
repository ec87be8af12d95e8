"""Errors as a client sees them: an HTTP status, and a JSON object in OpenAI's shape.

    {"error": {"message": "/max_tokens: must be from 0 to 65536, not -1", "type": "invalid_request_error",
               "param": "max_tokens", "code": "invalid_value"}}

``message`` begins with a JSON pointer where a value in the body is at fault, and ``param`` is the field that holds it.
"""

from __future__ import annotations

from collections.abc import Mapping

from starter.errors import (
    BackendError,
    CapacityError,
    EngineError,
    MissingWingError,
    QueueFullError,
    RequestError,
    SchemaError,
)

INVALID = "invalid_request_error"
RETRY_SECONDS = 1  # what a client is told to wait when too many requests wait, or too many clients are connected


class ApiError(Exception):
    """Refuses a request. ``status`` is HTTP's, the other fields are those of the error object."""

    def __init__(self, status: int, message: str, *, kind: str = INVALID, param: str | None = None,
                 code: str | None = None, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.param, self.code = status, message, kind, param, code
        self.headers = dict(headers or {})

    def to_dict(self) -> dict[str, object]:
        """The body of the answer, or of the last event of a stream."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def of_field(error: SchemaError) -> ApiError:
    """A value of the body that is malformed: 400, with its JSON pointer."""
    return ApiError(400, str(error), param=error.path.split("/")[1] if error.path else None, code="invalid_value")


def of_request(error: RequestError) -> ApiError:
    """A request that the engine refused: 429 if it may be sent again later, else 400."""
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), kind="rate_limit_error", code="rate_limit_exceeded",
                        headers={"Retry-After": str(RETRY_SECONDS)})
    if isinstance(error, CapacityError):
        return ApiError(400, f"/max_tokens: {error}", param="max_tokens", code="context_length_exceeded")
    return ApiError(400, str(error), code="invalid_value")


def as_api_error(error: EngineError | ApiError) -> ApiError:
    """Any error of the engine's family; an ApiError as it is."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, SchemaError):
        return of_field(error)
    if isinstance(error, RequestError):
        return of_request(error)
    if isinstance(error, MissingWingError):
        return ApiError(501, str(error), kind="server_error", code="not_implemented")
    if isinstance(error, BackendError):
        return ApiError(500, str(error), kind="server_error", code="internal_error")
    return ApiError(503, str(error), kind="server_error", code="engine_stopped")
