"""What can go wrong with a request: each error has an HTTP status and a body in OpenAI's form.

{"error": {"message": …, "type": …, "param": …, "code": …}}
"""

from __future__ import annotations

import errno
import logging
import sqlite3
from collections.abc import Iterable
from typing import Any, ClassVar

from earnest.errors import EarnestError, nearest

log = logging.getLogger("earnest.serve")
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG}
SQLITE_NO_ROOM = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR}


class ServeError(EarnestError):
    """The base: a request that cannot be served, with what is allowed and the way out."""

    status: ClassVar[int] = 400
    type: ClassVar[str] = "invalid_request_error"
    code: ClassVar[str | None] = None
    headers: ClassVar[dict[str, str]] = {}

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
    headers: ClassVar[dict[str, str]] = {"WWW-Authenticate": 'Bearer realm="earnest serve"'}


class Forbidden(ServeError):
    status, type, code = 403, "permission_error", "forbidden"


class NotFound(ServeError):
    status, code = 404, "not_found"


def no_completion(name: str, choice: int) -> NotFound:
    """The error for a completion that does not exist, or that the caller may not see."""
    return NotFound(f"there is no completion {name[:80]!r} with a choice {choice} here.", "completion_id")


class NoModel(ServeError):
    status, code = 404, "model_not_found"


class NoAdapter(NoModel):
    """There is no adapter of this name, or the caller may not see it; both have the same message."""

    def __init__(self, name: str) -> None:
        super().__init__(f"there is no adapter {name[:160]!r}; GET /v1/models lists what there is.", "model")
        self.name = name

    def suggest(self, known: Iterable[str]) -> ServeError:
        """The same error with the name among ``known`` that it may be a misspelling of, if there is one."""
        found = nearest(self.name, known)
        if not found.startswith("did you mean"):
            return self
        return NoModel(f"there is no adapter {self.name[:160]!r}; {found} GET /v1/models lists what there is.", "model")


class Conflict(ServeError):
    status, code = 409, "conflict"


class TooLarge(ServeError):
    status, code = 413, "request_too_large"


class Busy(ServeError):
    status, type, code = 429, "rate_limit_error", "rate_limit_exceeded"
    headers: ClassVar[dict[str, str]] = {"Retry-After": "1"}


class Loading(ServeError):
    status, type, code = 503, "server_error", "model_loading"
    headers: ClassVar[dict[str, str]] = {"Retry-After": "2"}


class TooSlow(ServeError):
    status, code = 408, "request_timeout"


class DamagedVersion(ServeError):
    status, type, code = 500, "server_error", "damaged_version"


def damaged(adapter: str, number: int) -> DamagedVersion:
    return DamagedVersion(
        f"the files of version {number} of {adapter} are damaged or missing; roll back to another version, or restore "
        "them from a copy.",
        "model",
    )


class NoRoom(ServeError):
    """The server's disk is full."""

    status, type, code = 507, "server_error", "insufficient_storage"


def error_response(error: Exception) -> tuple[int, dict[str, Any], dict[str, str]]:
    """(status, body, headers). An error that is not the client's is logged, and its details are not sent."""
    if no_room(error):
        log.error("a request could not be stored: %s", error)
        error = NoRoom(
            "the server's disk takes no more data, so nothing was stored; free space on it and try again. "
            "Chats with store: false are answered."
        )
    if isinstance(error, ServeError):
        return error.status, error.body(), error.headers
    if isinstance(error, EarnestError):
        return 400, body(str(error), "invalid_request_error", None, "invalid_value"), {}
    log.error("a request failed", exc_info=error)
    return 500, body("an internal error of the server; its log has the details.", "server_error", None, None), {}


def reason(error: BaseException) -> str:
    """An error in words; of an unexpected one also its class."""
    return str(error) if isinstance(error, EarnestError) else f"{type(error).__name__}: {error}"


def no_room(error: BaseException) -> bool:
    """Whether an error means that the disk is full, read-only or broken."""
    if isinstance(error, sqlite3.Error):
        return (getattr(error, "sqlite_errorcode", 0) & 0xFF) in SQLITE_NO_ROOM
    return isinstance(error, OSError) and error.errno in NO_ROOM
