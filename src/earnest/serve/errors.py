"""What can go wrong with a request: each has an HTTP status, and OpenAI's words for it.

{"error": {"message": …, "type": …, "param": …, "code": …}}
"""

from __future__ import annotations

from typing import Any, ClassVar

from earnest.errors import EarnestError


class ServeError(EarnestError):
    """The base: a request that cannot be served, with what is allowed and the way out."""

    status: ClassVar[int] = 400
    type: ClassVar[str] = "invalid_request_error"
    code: ClassVar[str | None] = None
    retry_after: ClassVar[int | None] = None

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param

    def body(self) -> dict[str, Any]:
        return body(str(self), self.type, self.param, self.code)


def body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An error in OpenAI's shape."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class BadRequest(ServeError):
    code = "invalid_value"


class TooLong(ServeError):
    code = "context_length_exceeded"


class NoKey(ServeError):
    status, type, code = 401, "authentication_error", "invalid_api_key"


class Forbidden(ServeError):
    status, type, code = 403, "permission_error", "forbidden"


class NotFound(ServeError):
    status, code = 404, "not_found"


class NoModel(ServeError):
    status, code = 404, "model_not_found"


class Conflict(ServeError):
    status, code = 409, "conflict"


class TooLarge(ServeError):
    status, code = 413, "request_too_large"


class Busy(ServeError):
    """A queue is full."""

    status, type, code, retry_after = 429, "rate_limit_error", "rate_limit_exceeded", 1


class Loading(ServeError):
    status, type, code, retry_after = 503, "server_error", "model_loading", 2
